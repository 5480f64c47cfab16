"""The foreground life of `up`: start, wait, announce, attend, stop. Whoever started the server stops it.

Interrupted during the start or while attached, it drains and stops what it started; a second signal ends that
at once. A server that somebody else started is waited for and never stopped.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from typing import Any

from omnictl import output, ports
from omnictl.client import Client
from omnictl.endpoints import endpoints, example_request
from omnictl.interrupts import Interrupts
from omnictl.launch import NUM_LAST_LINES, Launched, launch, readable_deployments, retire
from omnictl.logs import SERVER, last_lines
from omnictl.prepare import Prepared
from omnictl.startup import Outcome, Wait, wait_ready
from omnictl.startup_view import startup_view
from omnictl.state import Deployment, State, Store
from runtime.errors import OmniError, PortInUse, StageDied, StartFailed, Unavailable, from_fields

MAX_PORT_TRIES = 5
SILENCE_MARGIN_S = 30.0
"""The server has deadlines of its own and says what it waited for; ours comes after them."""
ATTEND_INTERVAL_S = 3600.0
COLLECT_TIMEOUT_S = 5.0


class Session:
    """One run of `up`. `silence_timeout_s` None: what the plan's own deadlines make plausible."""

    def __init__(
        self, store: Store, prepared: Prepared, *, as_json: bool, silence_timeout_s: float | None, began_s: float
    ) -> None:
        self._store, self._plan, self._wanted = store, prepared.plan, prepared.wanted
        self._as_json, self._began_s = as_json, began_s
        deadlines_s = [self._plan.limits.request_timeout_s, *(s.start_timeout_s for s in self._plan.stages)]
        self._silence_timeout_s = silence_timeout_s or max(deadlines_s) + SILENCE_MARGIN_S

    def run(self, *, detach: bool, wait: bool) -> int:
        """The exit code. Raises StartFailed, PortInUse, StageDied and what `launch` raises."""
        with Interrupts() as interrupts:
            if not wait:
                return self._do_not_wait()
            launched, wait_result = self._start(interrupts)
            if launched.server is None:
                return self._joined(launched.deployment, wait_result, interrupts)
            if wait_result.outcome is Outcome.INTERRUPTED:
                return self._stop(launched, interrupts)
            if wait_result.outcome is not Outcome.READY:
                raise self._failed(launched, wait_result)
            self._became_ready(launched.deployment)
            return 0 if detach else self._attend(launched, interrupts)

    # ---- start ---------------------------------------------------------------------------------------

    def _do_not_wait(self) -> int:
        launched = launch(self._store, self._wanted)
        state = "starting" if launched.server is not None else "already started"
        self._announce(launched.deployment, state)
        return 0

    def _start(self, interrupts: Interrupts) -> tuple[Launched, Wait]:
        """Launch and wait; again on another port when the chosen one was taken before the server bound it."""
        taken: set[int] = set()
        while True:
            launched = launch(self._store, self._wanted, not_ports=taken)
            result = self._wait(launched, interrupts)
            lost_port = result.outcome is Outcome.EXITED and _exit_code(launched) == PortInUse.exit_code
            if not lost_port:
                return launched, result
            port = launched.deployment.port
            taken.add(port)
            if self._wanted.port is not None or len(taken) == MAX_PORT_TRIES:
                self._clean_up(launched, f"port {port} is taken")
                others = [d for d in readable_deployments(self._store) if d.process != launched.deployment.process]
                raise ports.in_use(self._wanted.host, port, others)
            output.note(f"port {port} was taken in the meantime, trying the next")

    def _wait(self, launched: Launched, interrupts: Interrupts) -> Wait:
        deployment = launched.deployment
        ours = launched.server is not None
        output.note(f"{'starting' if ours else 'waiting for'} {deployment.name} at {deployment.url}")
        key = next(iter(self._wanted.api_keys.keys), None)
        with Client(deployment.url, key) as client, startup_view(deployment.name) as view:
            return wait_ready(
                deployment,
                client,
                interrupts,
                view,
                silence_timeout_s=self._silence_timeout_s,
                settle_for_degraded=not ours,
            )

    def _joined(self, deployment: Deployment, result: Wait, interrupts: Interrupts) -> int:
        """Somebody else's deployment of the same plan: reported, and left as it is."""
        if result.outcome is Outcome.INTERRUPTED and (number := interrupts.take()) is not None:
            return 128 + number
        if result.outcome is Outcome.READY:
            output.note(f"{deployment.name} is already up")
            self._announce(deployment, "ready")
            return 0
        raise Unavailable(
            f"{deployment.name} is already started at {deployment.url}, but {self._reason(result)}",
            hint=f"omnictl ps; omnictl logs --name {deployment.name}; omnictl down {deployment.name}",
        )

    def _became_ready(self, deployment: Deployment) -> None:
        with self._store.lock(deployment.name):
            if not self._store.update(deployment, State.RUNNING):
                raise _stopped_early(deployment)
        output.note(f"{deployment.name} is ready after {time.monotonic() - self._began_s:.1f} s")
        self._announce(deployment, "ready")

    def _announce(self, deployment: Deployment, state: str) -> None:
        tasks = self._plan.tasks
        if self._as_json:
            output.print_json(_document(deployment, state, endpoints(deployment, tasks)))
            return
        output.print_facts({deployment.name: f"{state} at {deployment.url}", **endpoints(deployment, tasks)})
        if (request := example_request(deployment, tasks)) is not None:
            output.write(f"\n{request}\n\n")

    # ---- attached ------------------------------------------------------------------------------------

    def _attend(self, launched: Launched, interrupts: Interrupts) -> int:
        output.note("Ctrl-C stops it; --detach would have left it running")
        with launched.deployment.process.opened() as fd:
            ended = fd is None
            while fd is not None and not ended and not interrupts.received:
                ended = bool(interrupts.wait([fd], ATTEND_INTERVAL_S))
        if not ended:
            return self._stop(launched, interrupts)
        if self._stopped_by_others(launched.deployment):
            output.note(f"{launched.deployment.name} was stopped by another command")
            return 0
        reason = f"the server {_exit_text(_exit_code(launched))}"
        self._show_last_lines(launched.deployment, SERVER)
        self._clean_up(launched, reason)
        raise StageDied(f"{launched.deployment.name}: {reason}", hint=f"start it again: omnictl up {self._plan.name}")

    def _stop(self, launched: Launched, interrupts: Interrupts) -> int:
        """0 when it had been ready, else 128 + the signal: then the start is what did not succeed."""
        number = interrupts.take() or signal.SIGINT
        was_ready = self._recorded_state(launched.deployment) is State.RUNNING
        output.note(f"stopping {launched.deployment.name}; once more ends it at once")
        retire(self._store, launched.deployment, drain=was_ready, hurry_fd=interrupts.fd)
        _exit_code(launched)
        hurried = interrupts.take() is not None
        output.note(f"{launched.deployment.name} is stopped")
        return 0 if was_ready and not hurried else 128 + number

    # ---- failure -------------------------------------------------------------------------------------

    def _failed(self, launched: Launched, result: Wait) -> OmniError:
        """The error to raise for a start that came to nothing; cleans up first."""
        deployment = launched.deployment
        if result.outcome is Outcome.EXITED and self._stopped_by_others(deployment):
            return _stopped_early(deployment)
        reason = self._reason(result, launched)
        self._show_last_lines(deployment, result.failing_process or SERVER)
        self._clean_up(launched, reason)
        hint = from_fields(result.report["failure"]).hint if result.report.get("failure") else None
        return StartFailed(
            f"{deployment.name} did not start: {reason}",
            hint=hint or f"omnictl logs --name {deployment.name} shows all of the log",
        )

    def _reason(self, result: Wait, launched: Launched | None = None) -> str:
        match result.outcome:
            case Outcome.FAILED if result.report.get("failure"):
                return from_fields(result.report["failure"]).message
            case Outcome.EXITED:
                return f"the server {_exit_text(_exit_code(launched) if launched is not None else None)}"
            case Outcome.SILENT:
                phase = result.report.get("phase", "no answer yet")
                return f"no progress for {self._silence_timeout_s:.0f} s (phase: {phase})"
        return f"it is {result.outcome}"

    def _show_last_lines(self, deployment: Deployment, process: str) -> None:
        path = self._store.folder(deployment.name) / "logs" / f"{process}.log"
        if lines := last_lines(path, NUM_LAST_LINES):
            output.note(f"last lines of {path}:")
            for line in lines:
                output.note(f"  | {line}")

    def _clean_up(self, launched: Launched, reason: str) -> None:
        retire(self._store, launched.deployment, reason=reason, drain=False)
        _exit_code(launched)

    def _recorded_state(self, deployment: Deployment) -> State | None:
        """What stands in the record of this very run; None when it is gone or of another run."""
        try:
            current = self._store.load(deployment.name)
        except OmniError:
            return None
        return current.state if current.process == deployment.process else None

    def _stopped_by_others(self, deployment: Deployment) -> bool:
        return self._recorded_state(deployment) in (None, State.STOPPING)


def _exit_code(launched: Launched) -> int | None:
    """The exit code of a server that has ended; collects it. None when it is not our child."""
    return launched.server.wait(COLLECT_TIMEOUT_S) if launched.server is not None else None


def _stopped_early(deployment: Deployment) -> StartFailed:
    return StartFailed(f"{deployment.name} was stopped by another command while it was starting")


def _exit_text(code: int | None) -> str:
    if code is None:
        return "has ended"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _document(deployment: Deployment, state: str, urls: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": deployment.name,
        "state": state,
        "model_names": list(deployment.model_names),
        "url": deployment.url,
        "host": deployment.host,
        "port": deployment.port,
        "pid": deployment.process.pid,
        "started_at": deployment.started_at,
        "log_dir": deployment.log_dir,
        "endpoints": dict(urls),
    }
