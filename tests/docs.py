"""Pages that are made from the code. `python -m tests.docs NAME` writes one; a test fails when one is stale.

python -m tests.docs cli        docs/cli.md, from the Typer application and the error tree
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from omnictl.cli import app
from runtime.errors import ERRORS, OmniError

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH = 80
CLI_HEAD = """# The command line

Made by `python -m tests.docs cli`; do not edit.

Data goes to stdout, as a table or, with `--json`, as one JSON document; everything else goes to stderr.
"""


def cli_page() -> str:
    sections = [CLI_HEAD, _exit_codes()]
    for path in _command_paths(typer.main.get_command(app), ()):
        title = " ".join(("omnictl", *path))
        sections.append(f"## {title}\n\n```text\n{_help(path)}\n```\n")
    return "\n".join(sections)


def _command_paths(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The application itself, then each command, depth first, in the order of `--help`."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from _command_paths(below, (*path, name))


def _help(path: tuple[str, ...]) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], prog_name="omnictl", env={"COLUMNS": str(WIDTH)})
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())


def _exit_codes() -> str:
    by_code: dict[int, list[type[OmniError]]] = {}
    for error in ERRORS.values():
        by_code.setdefault(error.exit_code, []).append(error)
    lines = ["## Exit codes", "", "| code | meaning |", "|---|---|", "| 0 | done |"]
    for code, errors in sorted(by_code.items()):
        names = ", ".join(dict.fromkeys(f"`{error.code}`" for error in errors))
        lines.append(f"| {code} | {names} |")
    lines.append("| 128 + n | ended by signal n before its work was done: 130 is Ctrl-C, 143 SIGTERM |")
    return "\n".join([*lines, ""])


PAGES: Mapping[str, Callable[[], str]] = {"cli": cli_page}


def main() -> None:
    for name in sys.argv[1:] or PAGES:
        (DOCS / f"{name}.md").write_text(PAGES[name]())


if __name__ == "__main__":
    main()
