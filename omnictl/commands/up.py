"""`omnictl up`: from a recipe's name to answering endpoints, and down again on Ctrl-C."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnictl import output, ports, settings
from omnictl.state import Store

if TYPE_CHECKING:
    from omnictl.prepare import Prepared


def command(
    recipe: Annotated[str, typer.Argument(metavar="NAME", help="Short name, model id or file of a recipe.")],
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny build with random weights, to rehearse with.")] = False,
    gpus: Annotated[int | None, typer.Option(min=0, help="Use so many GPUs; 0 for the CPU alone.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = settings.DEFAULT_HOST,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help=f"Default: the first free one from {settings.FIRST_PORT} on.")
    ] = None,
    name: Annotated[str | None, typer.Option(metavar="DEPLOYMENT", help="Default: the recipe's short name.")] = None,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return when it is ready.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return as soon as it is started.")] = False,
    api_key_file: Annotated[
        Path | None,
        typer.Option(envvar=settings.API_KEY_FILE_VARIABLE, help="API keys, one a line. See also OMNICTL_API_KEY."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Give up after so long without progress.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the command, start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What is served, as one JSON document.")] = False,
) -> None:
    """Serve a model.

    Fetches what is missing, starts it, waits until a real request of each kind has passed, and stays: Ctrl-C lets
    running requests finish and stops it, a second one ends it at once. What is already up is left as it is.
    """
    from omnictl.launch import living_or_refuse, readable_deployments
    from omnictl.prepare import Options, prepare
    from omnictl.session import Session
    from omnictl.weights import ensure_weights

    began_s = time.monotonic()
    store = Store()
    prepared = prepare(Options(recipe, tuple(set_ or ()), tiny, gpus, host, port, name, api_key_file))
    wanted = prepared.wanted
    for finding in prepared.machine.findings:
        output.note(f"{finding.level}: {finding.subject}: {finding.text}")
    if tiny:
        output.note("a tiny build: its weights are random numbers, so answers and voices are noise")
    existing = living_or_refuse(store, wanted)
    # Looked at now, so that a taken port is told before anything is fetched; chosen for good when it starts.
    likely_port = existing.port if existing else ports.choose_port(host, port, readable_deployments(store))
    if dry_run:
        _show_plan(store, prepared, likely_port, as_json=as_json)
        return
    if existing is None:
        ensure_weights(prepared.recipe)
    session = Session(store, prepared, as_json=as_json, silence_timeout_s=timeout, began_s=began_s)
    raise typer.Exit(session.run(detach=detach or no_wait, wait=not no_wait))


def _show_plan(store: Store, prepared: Prepared, port: int, *, as_json: bool) -> None:
    """The plan, and the very command that would be run."""
    from omnictl.backends.process import server_command
    from omnictl.commands.plan import print_plan

    wanted, plan = prepared.wanted, prepared.plan
    command = server_command(store.folder(wanted.name), wanted.host, port)
    if as_json:
        document = {"name": wanted.name, "host": wanted.host, "port": port, "command": command}
        output.print_json({**document, "plan": plan.model_dump(mode="json")})
        return
    print_plan(prepared.recipe, prepared.machine, plan)
    output.write(f"\n{shlex.join(command)}\n")
