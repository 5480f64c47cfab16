"""Every command has what its page promises, and help is light."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import typer

from omnictl.cli import app

VIEWS = ("up", "ps", "logs", "down", "chat", "doctor", "version", "plan", "pull")


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_has_json_and_every_command_a_description(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert any("--json" in parameter.opts for parameter in command.params)
    assert inspect.cleandoc(command.help or "").endswith(".")


def test_help_imports_nothing_heavy() -> None:
    """What keeps `omnictl --help` below its 0.4 s (docs/measurements/sidekick.md has the time)."""
    code = (
        "import sys\nsys.argv = ['omnictl', '--help']\nfrom omnictl.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy', 'httpx', 'rich', 'docker', 'pydantic', 'yaml', 'av'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stderr.strip() == "[]"
