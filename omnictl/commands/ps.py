"""`omnictl ps`: what is deployed on this machine, and how each stage of it does."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from omnictl import output
from omnictl.state import Store


def command(as_json: Annotated[bool, typer.Option("--json", help="All of it as one JSON document.")] = False) -> None:
    """List deployments and their stages."""
    from omnictl.overview import describe

    store = Store()
    found = [describe(store, name) for name in store.names()]
    if as_json:
        output.print_json({"deployments": found})
        return
    if not found:
        output.note("nothing is deployed; omnictl up NAME starts something")
        return
    output.print_table(("name", "state", "url", "model", "since"), [_deployment_row(d) for d in found])
    if stages := [_stage_row(d["name"], row) for d in found for row in d["stages"]]:
        output.write("\n")
        columns = ("name", "stage", "state", "process", "pid", "memory", "running", "queued", "restarts", "reason")
        output.print_table(columns, stages)
    for deployment in found:
        if deployment["reason"]:
            output.note(f"{deployment['name']}: {deployment['reason']}")


def _deployment_row(deployment: dict[str, Any]) -> tuple[object, ...]:
    return tuple(deployment[key] for key in ("name", "state", "url", "model", "started_at"))


def _stage_row(name: str, row: dict[str, Any]) -> tuple[object, ...]:
    stage = row["stage"] if row["replica"] == 0 else f"{row['stage']}.{row['replica']}"
    memory = f"{row['resident_bytes'] / (1 << 20):.0f} MiB"
    reason = "" if row["reason"] == row["state"] else row["reason"]
    counts = (row["running"], row["queued"], row["restarts"])
    return name, stage, row["state"], row["process"], row["pid"], memory, *counts, reason
