"""A deployment as local processes: one server in a session of its own, which starts the workers itself.

Every process of a deployment carries its folder in the environment variable below, so what a killed server
leaves behind is found again. `launch` and the commands call this; what is recorded is `state`'s.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from omnictl import ports, settings
from omnictl.processes import ProcessId, descendants, readable, with_environment
from omnictl.state import Deployment
from runtime.errors import EnvironmentProblem

MARKER_VARIABLE = "OMNICTL_DEPLOYMENT"
KILL_TIMEOUT_S = 5.0
ORPHAN_TIMEOUT_S = 3.0
"""How long workers of a dead server may take to leave by themselves."""
SWEEP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class StopReport:
    """What a stop came to.

    killed: pids that did not leave when asked. swept: names of shared-memory files of dead owners that were removed;
    unswept: those that could not be.
    """

    was_alive: bool
    killed: tuple[int, ...]
    port_free: bool
    swept: tuple[str, ...]
    unswept: tuple[str, ...]


def server_command(folder: Path, host: str, port: int) -> list[str]:
    """-P keeps the current folder off the module path: a `runtime` that lies there must not shadow ours."""
    command = [sys.executable, "-P", "-m", "runtime.serve", "--plan", str(folder / "plan.json")]
    return [*command, "--host", host, "--port", str(port), "--state-dir", str(folder)]


def start_server(command: list[str], folder: Path, api_key_file: str | None) -> subprocess.Popen[bytes]:
    """Start it in its own session, so that a Ctrl-C at the terminal reaches only us.

    Keys go by the environment: arguments are shown to every user of the machine.
    """
    environment = {
        **os.environ,
        **settings.runtime_environment(),
        MARKER_VARIABLE: str(folder),
        "PYTHONUNBUFFERED": "1",
    }
    if api_key_file is not None:
        environment[settings.API_KEY_FILE_VARIABLE] = api_key_file
    try:
        with open(folder / "logs" / "server.log", "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
    except OSError as error:
        raise EnvironmentProblem(f"cannot start the server: {error}") from error


def processes_of(folder: Path, server: ProcessId | None = None) -> list[ProcessId]:
    """Every process of a deployment but the server itself, also when the server is gone."""
    found = with_environment(MARKER_VARIABLE, str(folder))
    if server is not None and server.is_alive():
        found = _union(found, descendants(server.pid))
    return [process for process in found if process != server]


def stop(deployment: Deployment, folder: Path, *, timeout_s: float, hurry_fd: int | None = None) -> StopReport:
    """Ask the server to drain and kill it after the time; then make sure that nothing of the deployment is left.

    `hurry_fd`: when it becomes readable the drain is cut short. Raises EnvironmentProblem when something stays.
    """
    server = deployment.process
    was_alive = server.is_alive()
    others = processes_of(folder, server)
    killed = _drain(server, timeout_s, hurry_fd)
    killed += end_leftovers(folder, others)
    # With all our processes gone, a port that is held has been taken by somebody else: told, not an error.
    port_free = not ports.is_bound(deployment.host, deployment.port)
    swept, unswept = sweep(deployment.shm_dir)
    return StopReport(was_alive=was_alive, killed=tuple(killed), port_free=port_free, swept=swept, unswept=unswept)


def end_leftovers(folder: Path, known: list[ProcessId] | None = None) -> list[int]:
    """Wait for processes without a server to leave by themselves, kill those that do not; returns the killed."""
    deadline = time.monotonic() + ORPHAN_TIMEOUT_S
    stubborn = [p for p in _union(known or [], processes_of(folder)) if not p.wait(deadline - time.monotonic())]
    killed: list[int] = []
    while stubborn := _union(stubborn, processes_of(folder)):
        for process in stubborn:
            process.send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_TIMEOUT_S
        if stuck := [p for p in stubborn if not p.wait(deadline - time.monotonic())]:
            raise _stuck(stuck)
        killed += [p.pid for p in stubborn]
        # Looked for again: one of the killed may have been starting another.
        stubborn = []
    return killed


def sweep(shm_dir: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Remove the shared-memory files of dead owners: names of the removed, and of those that had to be left."""
    command = [sys.executable, "-P", "-m", "runtime.sweep", shm_dir]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SWEEP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentProblem(f"sweep of {shm_dir}: not done after {SWEEP_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EnvironmentProblem(f"sweep of {shm_dir}: {reason}")
    answer = json.loads(done.stdout)
    return tuple(answer["removed"]), tuple(answer["failed"])


def _drain(server: ProcessId, timeout_s: float, hurry_fd: int | None) -> list[int]:
    """The pids that had to be killed: none or the server's."""
    with server.opened() as fd:
        if fd is None:
            return []
        server.send(signal.SIGTERM)
        fds = [fd] if hurry_fd is None else [fd, hurry_fd]
        if fd in readable(fds, timeout_s):
            return []
        server.send(signal.SIGKILL)
        if not readable([fd], KILL_TIMEOUT_S):
            raise _stuck([server])
    return [server.pid]


def _union(some: list[ProcessId], others: list[ProcessId]) -> list[ProcessId]:
    return list({p.pid: p for p in [*some, *others]}.values())


def _stuck(processes: list[ProcessId]) -> EnvironmentProblem:
    pids = ", ".join(str(p.pid) for p in processes)
    return EnvironmentProblem(f"not gone after SIGKILL: process {pids}", hint="a device driver may hold it; see dmesg")
