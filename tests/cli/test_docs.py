"""Generated pages are fresh, and every command has what the page promises."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import typer

from omnictl.cli import app
from tests.docs import DOCS, PAGES

VIEWS = ("up", "ps", "logs", "down", "chat", "doctor", "version", "plan", "pull")


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_fresh(name: str) -> None:
    assert (DOCS / f"{name}.md").read_text() == PAGES[name](), f"run: python -m tests.docs {name}"


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_has_json_and_every_command_a_description(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert any("--json" in parameter.opts for parameter in command.params)
    assert inspect.cleandoc(command.help or "").endswith(".")


def test_help_imports_nothing_heavy_and_is_quick() -> None:
    code = (
        "import sys, time\nbegan = time.process_time()\nsys.argv = ['omnictl', '--help']\n"
        "from omnictl.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy', 'httpx', 'rich', 'docker', 'pydantic', 'yaml', 'av'}\n"
        "print(sorted(heavy & set(sys.modules)), time.process_time() - began, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded, _, seconds = done.stderr.strip().rpartition(" ")
    assert loaded == "[]"
    assert float(seconds) < 0.4
