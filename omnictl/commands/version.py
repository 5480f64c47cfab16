"""`omnictl version`: this tool, Python, and the engine packages beside what is required."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from omnictl import installed, output


def command(as_json: Annotated[bool, typer.Option("--json", help="As one JSON document.")] = False) -> None:
    """Show versions."""
    extra = installed.engine_extra()
    pinned = [r for r in installed.requirements(extra) if r.operator == "=="]
    if as_json:
        packages = {r.name: {"installed": r.installed, "required": r.version} for r in pinned}
        document = {"omnictl": installed.own_version(), "python": platform.python_version(), "extra": extra}
        output.print_json({**document, "packages": packages})
        return
    facts = {"omnictl": installed.own_version(), "python": platform.python_version()}
    for requirement in pinned:
        note = "" if requirement.problem is None else f"  (required: {requirement.version})"
        facts[requirement.name] = f"{requirement.installed or 'not installed'}{note}"
    output.print_facts(facts)
