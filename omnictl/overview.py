"""One deployment as `ps` and `doctor` describe it: the record, whether it lives, and what its server says.

The keys are stable: they are the JSON of `omnictl ps`.
"""

from __future__ import annotations

from typing import Any

from omnictl.api_keys import key_for
from omnictl.client import Client
from omnictl.state import DamagedState, Deployment, State, Store
from runtime.errors import OmniError

STAGE_KEYS = (
    *("stage", "replica", "process", "pid", "devices", "state", "reason", "elapsed_s"),
    *("queued", "running", "requests", "restarts", "resident_bytes"),
)


def describe(store: Store, name: str) -> dict[str, Any]:
    """Never fails for a single deployment: what cannot be read or asked is its `state` and `reason`."""
    try:
        deployment = store.load(name)
    except DamagedState as error:
        return _empty(name) | {"state": str(State.DAMAGED), "reason": f"{error.message} ({error.hint})"}
    except OmniError as error:  # removed since it was listed
        return _empty(name) | {"state": str(State.DEAD), "reason": error.message}
    facts = _empty(name) | _record(deployment)
    if deployment.observed is State.DEAD:
        return facts | {"reason": "its server is gone; omnictl logs shows its end, omnictl down removes it"}
    return facts | _ask(deployment) if deployment.is_alive else facts


def _ask(deployment: Deployment) -> dict[str, Any]:
    """What the server says: its phase is the state, unless a `down` is under way."""
    try:
        with Client(deployment.url, key_for(deployment)) as client:
            report = client.status()
            tasks = client.ready()["tasks"]
    except OmniError as error:
        return {"reason": error.message}
    failure = report.get("failure") or {}
    return {
        "state": str(State.STOPPING) if deployment.state is State.STOPPING else report["phase"],
        "reason": failure.get("message", ""),
        "open_requests": report["open_requests"],
        "queued_requests": report["queued_requests"],
        "tasks": tasks,
        "stages": [{key: row[key] for key in STAGE_KEYS} for row in report["stages"]],
    }


def _record(deployment: Deployment) -> dict[str, Any]:
    return {
        "state": str(deployment.observed),
        "reason": deployment.reason or "",
        "model": deployment.model,
        "model_names": list(deployment.model_names),
        "url": deployment.url,
        "host": deployment.host,
        "port": deployment.port,
        "pid": deployment.process.pid,
        "started_at": deployment.started_at,
        "log_dir": deployment.log_dir,
    }


def _empty(name: str) -> dict[str, Any]:
    unknown = dict.fromkeys(("model", "url", "host", "port", "pid", "started_at", "log_dir"))
    counts = {"open_requests": 0, "queued_requests": 0}
    return {"name": name, "state": "", "reason": "", **unknown, "model_names": [], **counts, "tasks": {}, "stages": []}
