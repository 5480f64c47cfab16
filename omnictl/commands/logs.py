"""`omnictl logs`: what the server and the worker processes of a deployment wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from omnictl import logs as log_files
from omnictl import output
from omnictl.interrupts import Interrupts
from omnictl.state import Store


def command(
    stage: Annotated[
        str | None, typer.Argument(metavar="STAGE", help="A stage, a process or 'server'. Default: all of them.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C or the end of the server.")
    ] = False,
    name: Annotated[str | None, typer.Option(metavar="DEPLOYMENT", help="Default: the only one.")] = None,
    lines: Annotated[int, typer.Option(min=0, help="So many of the last lines of each file.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document of {file, line}.")] = False,
) -> None:
    """Show log lines, and follow them."""
    if follow and as_json:
        raise typer.BadParameter("--json is one document and --follow has no end; choose one of them")
    store = Store()
    chosen = store.choose(name)
    paths = log_files.log_files(store.folder(chosen) / "logs", store.plan_json(chosen), stage)
    files = [log_files.LogFile(path, lines) for path in paths]
    found = [(file.path.stem, line) for file in files for line in file.new_lines()]
    if as_json:
        found += [(file.path.stem, line) for file in files for line in file.unfinished_line()]
        output.print_json({"name": chosen, "lines": [{"file": file, "line": line} for file, line in found]})
        return
    width = max(len(path.stem) for path in paths) if len(paths) > 1 else 0
    for stem, line in found:
        _show(stem, line, width)
    if follow:
        _follow(store, chosen, files, width)
    for file in files:
        for line in file.unfinished_line():
            _show(file.path.stem, line, width)


def _follow(store: Store, name: str, files: list[log_files.LogFile], width: int) -> None:
    with Interrupts() as interrupts, store.load(name).process.opened() as fd:
        if fd is None:
            output.note(f"{name} does not run; nothing to follow")
            return
        for file, line in log_files.follow(files, interrupts, fd):
            _show(file, line, width)
        if not interrupts.received:
            output.note(f"the server of {name} has ended")


def _show(file: str, line: str, width: int) -> None:
    """With the file's name before it when there are several."""
    output.write(f"{file:<{width}} | {line}\n" if width else f"{line}\n")
