"""From a plan to a started server: what stands under the name already, the port, the folder, the process.

`up` calls this. All that changes a deployment happens here under its lock; waiting for it is `startup`'s.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from omnictl import output, ports, settings
from omnictl.api_keys import ApiKeys
from omnictl.backends import process
from omnictl.logs import SERVER, last_lines
from omnictl.processes import identify
from omnictl.state import DamagedState, Deployment, State, Store
from runtime.errors import ConfigError, EnvironmentProblem, OmniError, Unavailable

NUM_LAST_LINES = 10
MAX_DIFFERENCES = 6
DEFAULT_DRAIN_S = 20.0
DRAIN_MARGIN_S = 30.0
"""On top of the drain time that the plan grants to running requests: closing connections, ending workers."""
QUICK_STOP_S = 8.0
"""For a server that never became ready: only its own warm-up may be under way."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `up` was asked to serve, every value checked. `port` None: the first free one."""

    name: str
    plan_json: str
    model: str
    model_names: tuple[str, ...]
    host: str
    port: int | None
    api_keys: ApiKeys


@dataclass(frozen=True, slots=True)
class Launched:
    """A deployment to wait for. `server` is None when somebody else started it: then it is not ours to stop."""

    deployment: Deployment
    server: subprocess.Popen[bytes] | None


def living_or_refuse(store: Store, wanted: Wanted) -> Deployment | None:
    """The deployment that already serves exactly this, or None when the name is free to take.

    Raises ConfigError when something else lives under the name. Changes nothing.
    """
    if wanted.name not in store.names():
        return None
    try:
        existing = store.load(wanted.name)
    except DamagedState as error:
        if process.processes_of(store.folder(wanted.name)):
            raise
        output.note(f"{error.message}: the record is damaged and nothing of it runs; it will be replaced")
        return None
    if not existing.is_alive:
        return None
    if existing.state is State.STOPPING:
        raise Unavailable(
            f"deployment {wanted.name!r} is being stopped", hint=f"try again in a moment, or omnictl down {wanted.name}"
        )
    if found := list(_differences(store, existing, wanted)):
        raise ConfigError(
            f"deployment {wanted.name!r} is up at {existing.url} and differs from what is asked for",
            problems=tuple(found[:MAX_DIFFERENCES]),
            hint=f"omnictl down {wanted.name} first, or start a second one with --name OTHER",
        )
    return existing


def launch(store: Store, wanted: Wanted, *, not_ports: Collection[int] = ()) -> Launched:
    """Start the server, or find that somebody was quicker. `not_ports` turned out to be taken."""
    with store.lock(wanted.name):
        if (existing := living_or_refuse(store, wanted)) is not None:
            return Launched(existing, None)
        _clear(store, wanted.name)
        port = _choose_port(store, wanted, not_ports)
        folder = store.prepare(wanted.name, wanted.plan_json)
        command = process.server_command(folder, wanted.host, port)
        server = process.start_server(command, folder, wanted.api_keys.file)
        try:
            deployment = _record(store, wanted, port, server.pid)
            store.save(deployment)
        except BaseException:
            server.kill()
            server.wait(process.KILL_TIMEOUT_S)
            raise
        return Launched(deployment, server)


def drain_timeout_s(store: Store, name: str) -> float:
    """How long the plan lets running requests finish; the default when the plan cannot be read."""
    try:
        return float(json.loads(store.plan_json(name) or "")["limits"]["drain_timeout_s"])
    except (ValueError, KeyError, TypeError):
        return DEFAULT_DRAIN_S


def retire(
    store: Store,
    deployment: Deployment,
    *,
    reason: str | None = None,
    drain: bool = True,
    hurry_fd: int | None = None,
) -> process.StopReport | None:
    """Stop a deployment and all that is of it; None when the record is by now of another run.

    Without a reason the record goes too. With one it stays as failed, with its logs, until the next `up`. `drain`:
    there may be requests of users to wait for.
    """
    with store.lock(deployment.name):
        if not store.update(deployment, State.STOPPING):
            return None
        folder = store.folder(deployment.name)
        timeout_s = drain_timeout_s(store, deployment.name) + DRAIN_MARGIN_S if drain else QUICK_STOP_S
        report = process.stop(deployment, folder, timeout_s=timeout_s, hurry_fd=hurry_fd)
        if reason is None:
            store.remove(deployment.name)
        else:
            store.update(deployment, State.FAILED, reason)
        return report


def _clear(store: Store, name: str) -> None:
    """Say what is left of a dead deployment of the name, and end it."""
    if name not in store.names():
        return
    folder = store.folder(name)
    try:
        dead = store.load(name)
    except OmniError:
        dead = None
    if dead is not None and dead.observed is State.DEAD:
        output.note(f"deployment {name!r} died without `omnictl down` (started {dead.started_at}); its last lines:")
        for line in last_lines(folder / "logs" / f"{SERVER}.log", NUM_LAST_LINES):
            output.note(f"  | {line}")
    killed = process.end_leftovers(folder)
    if killed:
        output.note(f"ended {len(killed)} processes that it left behind")
    shm_dir = dead.shm_dir if dead is not None else str(settings.shm_dir().absolute())
    swept, _ = process.sweep(shm_dir)
    if swept:
        output.note(f"removed {len(swept)} shared-memory files of dead owners")


def _choose_port(store: Store, wanted: Wanted, not_ports: Collection[int]) -> int:
    deployments = list(readable_deployments(store))
    if wanted.port is None and not_ports:
        living = {d.port for d in deployments if d.is_alive}
        return ports.first_free_port(wanted.host, living | set(not_ports))
    return ports.choose_port(wanted.host, wanted.port, deployments)


def readable_deployments(store: Store) -> Iterator[Deployment]:
    for name in store.names():
        try:
            yield store.load(name)
        except OmniError:
            continue


def _record(store: Store, wanted: Wanted, port: int, pid: int) -> Deployment:
    identity = identify(pid, even_ended=True)
    if identity is None:
        raise EnvironmentProblem(f"the server process {pid} cannot be seen in /proc")
    return Deployment(
        name=wanted.name,
        model=wanted.model,
        model_names=wanted.model_names,
        process=identity,
        host=wanted.host,
        port=port,
        url=ports.local_url(wanted.host, port),
        state=State.STARTING,
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        log_dir=str(store.folder(wanted.name) / "logs"),
        shm_dir=str(settings.shm_dir().absolute()),
        api_key_file=wanted.api_keys.file,
        api_keys_sha256=wanted.api_keys.sha256,
    )


def _differences(store: Store, existing: Deployment, wanted: Wanted) -> Iterator[str]:
    """Each value in which the living deployment is not what is asked for."""
    if existing.host != wanted.host:
        yield f"host: {existing.host} -> {wanted.host}"
    if wanted.port not in (None, existing.port):
        yield f"port: {existing.port} -> {wanted.port}"
    if existing.api_keys_sha256 != wanted.api_keys.sha256:
        yield "API keys: others than it was started with"
    try:
        served = json.loads(store.plan_json(existing.name) or "")
    except ValueError:
        yield "plan: its file is damaged"
        return
    asked = json.loads(wanted.plan_json)
    for plan in (served, asked):
        # The same value from another source is the same value.
        plan.pop("provenance", None)
    yield from _value_differences(served, asked, "plan")


def _value_differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _value_differences(old.get(key), new.get(key), f"{path}.{key}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            label = before.get("name", index) if isinstance(before, dict) else index
            yield from _value_differences(before, after, f"{path}[{label}]")
    elif old != new:
        yield f"{path}: {json.dumps(old)} -> {json.dumps(new)}"
