"""Size is a decision: short files, short functions, and a product that stays a few percent of its reference."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("omnictl", "runtime", "gradio_app", "comfyui_nodes", "scripts")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PRODUCT_LINES = 28_700
"""Five percent of the reference system's 574,000."""
ALLOWED: dict[str, str] = {}
"""file or file:function -> why it may be longer."""


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", [p.relative_to(ROOT) for p in sources(*PACKAGES, "tests")], ids=str)
def test_files_and_functions_are_short(path: Path) -> None:
    text = (ROOT / path).read_text()
    too_long = []
    if str(path) not in ALLOWED and len(text.splitlines()) > MAX_FILE_LINES:
        too_long.append(f"{path}: {len(text.splitlines())} lines, at most {MAX_FILE_LINES}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES and f"{path}:{node.name}" not in ALLOWED:
                too_long.append(f"{path}:{node.lineno} {node.name}: {num_lines} lines, at most {MAX_FUNCTION_LINES}")
    assert too_long == []


def test_the_product_is_small() -> None:
    total = sum(len(path.read_text().splitlines()) for path in sources(*PACKAGES))
    assert total <= MAX_PRODUCT_LINES, f"{total} lines"
