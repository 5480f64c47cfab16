"""`omnictl trace`: where the time of a request went."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from omnictl import output
from omnictl.state import Store
from runtime.errors import ConfigError, NotFound, NotRunning


class Format(StrEnum):
    TABLE = "table"
    CHROME = "chrome"


def command(
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="REQUEST_ID", help="The x-request-id of an answer, or a chat completion's id."),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The newest request that is over.")] = False,
    name: Annotated[str | None, typer.Option(metavar="DEPLOYMENT", help="Default: the only one.")] = None,
    layout: Annotated[
        Format, typer.Option("--format", help="chrome: trace events, for Perfetto or chrome://tracing.")
    ] = Format.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON document.")] = False,
) -> None:
    """Show where the time of a request went.

    Without REQUEST_ID the requests that can be asked for. The server keeps the newest that ended.
    """
    from omnictl import trace_view
    from omnictl.api_keys import key_for
    from omnictl.client import Client

    if last and request_id is not None:
        raise ConfigError("REQUEST_ID and --last are two ways to name a request; give one of them")
    if layout is Format.CHROME and (as_json or not (last or request_id)):
        raise ConfigError("--format chrome is the document of one request: give REQUEST_ID or --last, and no --json")
    store = Store()
    deployment = store.load(store.choose(name))
    if not deployment.is_alive:
        raise NotRunning(f"{deployment.name} does not run ({deployment.observed})", hint="omnictl up NAME")
    with Client(deployment.url, key_for(deployment)) as client:
        if last:
            request_id = _last(client.traces())
        if request_id is None:
            traces = client.traces()
            if as_json:
                output.print_json({"name": deployment.name, "traces": traces})
            else:
                output.print_table(trace_view.LIST_COLUMNS, map(trace_view.list_row, traces))
            return
        trace = client.trace(request_id)
    if layout is Format.CHROME:
        output.write(json.dumps(trace_view.chrome_events(trace)) + "\n")
    elif as_json:
        output.print_json(trace)
    else:
        trace_view.show(trace)


def _last(traces: list[dict[str, object]]) -> str:
    over = [str(trace["request_id"]) for trace in traces if trace["state"] != "running"]
    if not over:
        raise NotFound("no request has ended yet", hint="omnictl chat 'What is the capital of France?'")
    return over[0]
