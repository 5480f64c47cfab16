"""What must stay light stays light, and model names stay where they belong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "vllm", "diffusers", "transformers", "onnxruntime", "ctranslate2", "hibari", "scipy")


def modules_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(' '.join(sys.modules))"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return {name.split(".")[0] for name in found.stdout.split()}


@pytest.mark.parametrize("module", ["omnictl.cli", "runtime.plan", "runtime.serve", "runtime.worker"])
def test_nothing_heavy_is_imported(module: str) -> None:
    """The server process starts at once, and a worker imports only what its own stages need."""
    assert modules_after(f"import {module}") & set(HEAVY) == set()


def test_the_server_knows_no_engine_and_no_program() -> None:
    code = "import sys, runtime.serve; print(' '.join(sys.modules))"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, check=True)
    loaded = found.stdout.split()
    assert not [name for name in loaded if name.startswith(("runtime.programs", "runtime.engines"))]


def test_model_names_stay_in_recipes_and_programs() -> None:
    names = re.compile(r"sidekick|smollm|hibari|whisper|qwen|\bflux\b|\bwan2", re.IGNORECASE)
    allowed = ("runtime/programs/", "omnictl/_recipes/")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for package in ("omnictl", "runtime")
        for path in sorted((ROOT / package).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(allowed)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if names.search(line)
    ]
    assert found == []
