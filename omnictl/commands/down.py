"""`omnictl down`: drain and stop, and leave nothing behind."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from omnictl import output, settings
from omnictl.backends import process
from omnictl.interrupts import Interrupts
from omnictl.launch import retire
from omnictl.state import DamagedState, Store
from runtime.errors import ConfigError, EnvironmentProblem, OmniError


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Default: the only deployment.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every deployment of this state folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was stopped, as one JSON document.")] = False,
) -> None:
    """Stop a deployment.

    Running requests may finish, within the drain timeout of its plan; Ctrl-C cuts the wait short. Leaves no process
    and no shared memory behind, also of a server that was killed.
    """
    if all_ and name is not None:
        raise ConfigError(f"down {name!r} and --all: choose one of them")
    store = Store()
    names = store.names() if all_ else [store.choose(name)]
    if not names:
        output.note("nothing is deployed")
    stopped, problems = [], []
    for each in names:
        try:
            stopped.append(_stop(store, each))
        except OmniError as error:
            if not all_:
                raise
            problems.append(f"{each}: {error.message}")
    if as_json:
        output.print_json({"stopped": stopped})
    if problems:
        raise EnvironmentProblem("some deployments were not stopped", problems=tuple(problems))


def _stop(store: Store, name: str) -> dict[str, Any]:
    output.note(f"stopping {name}")
    try:
        deployment = store.load(name)
    except DamagedState as error:
        output.note(f"{error.message}: its record is damaged; ending what carries its mark")
        report = _stop_damaged(store, name)
    else:
        with Interrupts() as interrupts:
            found = retire(store, deployment, hurry_fd=interrupts.fd)
        if found is None:
            raise EnvironmentProblem(f"{name} was replaced by another command", hint="omnictl ps")
        report = found
        if not report.port_free:
            output.note(f"port {deployment.port} is held by another program now")
    if report.unswept:
        output.note(f"shared-memory files of dead owners that could not be removed: {', '.join(report.unswept)}")
    ended = {True: "stopped", False: "was not running"}[report.was_alive]
    output.note(f"{name} {ended}" + (f"; killed {len(report.killed)} processes" if report.killed else ""))
    return {
        "name": name,
        "was_alive": report.was_alive,
        "killed": list(report.killed),
        "port_free": report.port_free,
        "removed_shared_memory": list(report.swept),
        "unremoved_shared_memory": list(report.unswept),
    }


def _stop_damaged(store: Store, name: str) -> process.StopReport:
    folder = store.folder(name)
    with store.lock(name):
        killed = process.end_leftovers(folder)
        swept, unswept = process.sweep(str(settings.shm_dir().absolute()))
        store.remove(name)
    return process.StopReport(bool(killed), tuple(killed), True, swept, unswept)
