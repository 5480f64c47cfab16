"""Keeps the worker processes of a plan alive: start with a deadline that progress resets, death watch,
restart within a budget, hang watch, drain.

Knows processes and replicas, nothing of requests: the orchestrator hears of replicas through two callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import OmniError, StageError, from_fields
from runtime.hub import Hub
from runtime.messages import AnyMessage, Beat, Broken, Drain, Progress, Ready
from runtime.plan import Plan, ProcessPlan, RestartBudget
from runtime.pool import Life, Pools, Replica, Trigger
from runtime.settings import shm_dir
from runtime.sweep import sweep_dead_owners
from runtime.telemetry import Telemetry
from runtime.transport import remove_inbox

log = logging.getLogger(__name__)

KILL_TIMEOUT_S = 5.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class RestartCounter:
    """Restarts in the window, against the budget."""

    def __init__(self, budget: RestartBudget) -> None:
        self._budget = budget
        self._times: deque[float] = deque()
        self.total = 0

    def allow(self, now_s: float) -> float | None:
        """Seconds to wait before the next restart, growing with their number; None when the budget is used up."""
        while self._times and now_s - self._times[0] > self._budget.window_s:
            self._times.popleft()
        if len(self._times) >= self._budget.max_restarts:
            return None
        self._times.append(now_s)
        self.total += 1
        return float(self._budget.backoff_s * 2 ** (len(self._times) - 1))


@dataclass(slots=True)
class _Managed:
    """One worker process over its generations."""

    plan: ProcessPlan
    replicas: list[Replica]
    restarts: RestartCounter
    generation: int = 0
    process: asyncio.subprocess.Process | None = None
    start_timeout_s: float = 0.0
    started_s: float = 0.0
    progress_s: float = 0.0
    beat_s: float = 0.0
    resident_bytes: int = 0
    payload_bytes: int = 0
    was_ready: bool = False
    kill_reason: str = ""
    failure: OmniError | None = None
    all_ready: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a deployment's plan file, control sockets (mode 0700) and logs are."""

    plan_file: Path
    sockets: Path
    logs: Path


class Supervisor:
    """`ready(replica)` and `down(replica, reason)` are called on the event loop."""

    def __init__(
        self,
        plan: Plan,
        *,
        folders: Folders,
        pools: Pools,
        hub: Hub,
        telemetry: Telemetry,
        ready: Callable[[Replica], None],
        down: Callable[[Replica, str], None],
    ) -> None:
        self._plan, self._folders = plan, folders
        self._pools, self._hub, self._telemetry = pools, hub, telemetry
        self._ready, self._down = ready, down
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.changed = asyncio.Event()
        """Set whenever a replica's state changes; whoever waits clears it."""
        self._managed = {p.name: self._manage(p) for p in plan.processes}

    def _manage(self, process: ProcessPlan) -> _Managed:
        replicas = [self._pools.replica(r.stage, r.index) for r in process.replicas]
        timeout_s = max(self._plan.stage(r.stage).start_timeout_s for r in replicas)
        return _Managed(process, replicas, RestartCounter(self._plan.restarts), start_timeout_s=timeout_s)

    # ---- from outside --------------------------------------------------------------------------------

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(m), name=name) for name, m in self._managed.items()]

    async def stop(self, timeout_s: float) -> None:
        """Drain every worker; kill what has not left at the deadline."""
        self._stop.set()
        for managed in self._managed.values():
            self._ask_to_leave(managed)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for managed in self._managed.values() if late else ():
                self._kill(managed, "it did not leave in time")
            await asyncio.wait(self._tasks, timeout=KILL_TIMEOUT_S)

    def unresponsive(self, replica: Replica, reason: str) -> None:
        """A replica that does not answer is replaced, unless it is in a step that may still take its time.

        Messages are read between steps, so a long step answers late; one that never ends meets stall_timeout_s.
        """
        if replica.stats is None or replica.stats.step_age_s == 0:
            self._hung(replica, reason)

    def handle(self, message: AnyMessage) -> bool:
        """Take a message that is about replicas. False for all others."""
        match message:
            case Progress() | Ready() | Broken():
                replica = self._pools.replica(message.stage, message.index)
                managed = self._managed[replica.process]
                if managed.generation == message.generation:
                    self._on_news(managed, replica, message)
            case Beat():
                managed = self._managed[message.process]
                if managed.generation == message.generation:
                    self._on_beat(managed, message)
            case _:
                return False
        return True

    @property
    def failure(self) -> OmniError | None:
        """Why some process is out for good, if one is."""
        return next((m.failure for m in self._managed.values() if m.failure is not None), None)

    @property
    def all_ready(self) -> bool:
        return all(r.state is Life.READY for m in self._managed.values() for r in m.replicas)

    def rows(self) -> list[dict[str, Any]]:
        """A row a replica, for people: state, process, load, memory, restarts."""
        now_s = time.monotonic()
        return [self._row(m, r, now_s) for m in self._managed.values() for r in m.replicas]

    # ---- one process ---------------------------------------------------------------------------------

    async def _keep(self, managed: _Managed) -> None:
        """Start, watch and restart one process until stopped or out of budget."""
        while True:
            try:
                reason = await self._live(managed)
            except OSError as exc:
                reason = f"it could not be started: {exc}"
            self._clear(managed)
            for replica in managed.replicas:
                replica.move(Trigger.EXITED, reason)
                self._down(replica, reason)
            self.changed.set()
            await self._sweep()
            if self._stop.is_set():
                return
            log.error("process %s is down: %s", managed.plan.name, reason)
            backoff_s = managed.restarts.allow(time.monotonic()) if managed.was_ready else None
            if backoff_s is None:
                self._give_up(managed, reason)
                return
            try:
                await asyncio.wait_for(self._stop.wait(), backoff_s)
                self._move(managed, Trigger.STOP, "stopped")
                return
            except TimeoutError:
                self._telemetry.restarts.labels(managed.plan.name).inc()
                self._move(managed, Trigger.RESTART, f"restarting after: {reason}")

    async def _live(self, managed: _Managed) -> str:
        """One generation from spawn to exit; returns why it ended."""
        managed.generation += 1
        managed.kill_reason, managed.failure = "", None
        managed.all_ready.clear()
        managed.started_s = managed.progress_s = managed.beat_s = time.monotonic()
        process = managed.process = await self._spawn(managed)
        if self._stop.is_set():
            self._kill(managed, "stopped while it was starting")
        exited = asyncio.create_task(process.wait())
        try:
            await self._until_ready(managed, exited)
            while not exited.done():
                limit_s = self._plan.limits.beat_timeout_s
                await asyncio.wait([exited], timeout=limit_s)
                silence_s = time.monotonic() - managed.beat_s
                if not exited.done() and silence_s > limit_s:
                    self._kill(managed, f"no sign of life for {silence_s:.0f} s")
        finally:
            if process.returncode is None:
                self._kill(managed, "the supervisor ended")
        return managed.kill_reason or _exit_text(exited.result(), managed.failure)

    async def _spawn(self, managed: _Managed) -> asyncio.subprocess.Process:
        name, threads = managed.plan.name, str(managed.plan.num_threads)
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict.fromkeys(THREAD_VARIABLES, threads)
        environment |= managed.plan.environment
        arguments = ["--plan", self._folders.plan_file, "--process", name, "--generation", managed.generation]
        arguments += ["--directory", self._folders.sockets, "--parent", os.getpid()]
        self._folders.logs.mkdir(parents=True, exist_ok=True)
        with (self._folders.logs / f"{name}.log").open("ab") as log_file:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "runtime.worker", *map(str, arguments)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                start_new_session=True,
            )

    async def _until_ready(self, managed: _Managed, exited: asyncio.Task[int]) -> None:
        """Returns when all replicas are ready, or the process is gone; kills it after silence."""
        ready = asyncio.create_task(managed.all_ready.wait())
        try:
            while not ready.done() and not exited.done():
                left_s = managed.progress_s + managed.start_timeout_s - time.monotonic()
                if left_s <= 0:
                    doing = ", ".join(f"{r.stage}: {r.reason}" for r in managed.replicas if r.state is Life.STARTING)
                    limit_s = managed.start_timeout_s
                    self._kill(managed, f"no progress for {limit_s:g} s while {doing} (start_timeout_s)")
                    left_s = KILL_TIMEOUT_S
                await asyncio.wait([ready, exited], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()

    def _on_news(self, managed: _Managed, replica: Replica, message: Progress | Ready | Broken) -> None:
        managed.progress_s = time.monotonic()
        match message:
            case Progress():
                replica.reason = message.phase
            case Broken():
                managed.failure = from_fields(message.error)
                replica.reason = str(managed.failure)
            case Ready() if replica.state is Life.STARTING:
                managed.beat_s = time.monotonic()
                replica.address, replica.generation = message.address, message.generation
                replica.facts = message.facts
                replica.move(Trigger.LOADED, "ready")
                if all(r.state is Life.READY for r in managed.replicas):
                    managed.was_ready = True
                    managed.all_ready.set()
                self._ready(replica)
        self.changed.set()

    def _on_beat(self, managed: _Managed, beat: Beat) -> None:
        managed.beat_s = time.monotonic()
        self._holds(managed, beat.resident_bytes, beat.payload_bytes)
        for stats in beat.stats:
            replica = self._pools.replica(stats.stage, stats.index)
            replica.stats = stats
            self._telemetry.stage(stats, beat.generation)
            limit_s = self._plan.stage(stats.stage).stall_timeout_s
            if stats.step_age_s > limit_s:
                self._hung(replica, f"a step has taken {stats.step_age_s:.1f} s (stall_timeout_s is {limit_s:g})")

    def _holds(self, managed: _Managed, resident_bytes: int, payload_bytes: int) -> None:
        managed.resident_bytes, managed.payload_bytes = resident_bytes, payload_bytes
        self._telemetry.process_memory.labels(managed.plan.name).set(resident_bytes)
        self._telemetry.process_payloads.labels(managed.plan.name).set(payload_bytes)

    # ---- ends ----------------------------------------------------------------------------------------

    def _ask_to_leave(self, managed: _Managed) -> None:
        self._move(managed, Trigger.STOP, "stopping")
        process = managed.process
        if process is None or process.returncode is not None:
            return
        if managed.all_ready.is_set():
            for replica in managed.replicas:
                self._hub.send(replica.address, Drain())
        else:
            self._kill(managed, "stopped while it was starting")

    def _hung(self, replica: Replica, reason: str) -> None:
        """End its process; it is restarted like one that died."""
        self._kill(self._managed[replica.process], f"stage {replica.stage} hangs: {reason}")

    def _clear(self, managed: _Managed) -> None:
        """Forget what the process was doing, and remove its inboxes so that nobody keeps sending to them."""
        self._holds(managed, 0, 0)
        for replica in managed.replicas:
            replica.stats = None
            self._telemetry.idle(replica.stage, replica.index)
            if replica.address:
                remove_inbox(replica.address)

    async def _sweep(self) -> None:
        try:
            await asyncio.to_thread(sweep_dead_owners, shm_dir())
        except OmniError as error:
            log.warning("shared memory was not swept: %s", error)

    def _move(self, managed: _Managed, trigger: Trigger, reason: str) -> None:
        for replica in managed.replicas:
            if replica.state not in (Life.STOPPED, Life.DRAINING):
                replica.move(trigger, reason)
        self.changed.set()

    def _give_up(self, managed: _Managed, reason: str) -> None:
        if managed.failure is None:
            managed.failure = StageError(f"process {managed.plan.name}: {reason}", hint="see its log: omnictl logs")
        self._move(managed, Trigger.GIVE_UP, reason)

    def _kill(self, managed: _Managed, reason: str) -> None:
        process = managed.process
        if process is None or process.returncode is not None:
            return
        log.warning("killing process %s: %s", managed.plan.name, reason)
        managed.kill_reason = managed.kill_reason or reason
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the worker leads a session of its own

    def _row(self, managed: _Managed, replica: Replica, now_s: float) -> dict[str, Any]:
        stats = replica.stats
        return {
            "stage": replica.stage,
            "replica": replica.index,
            "process": replica.process,
            "pid": managed.process.pid if managed.process is not None else None,
            "devices": list(managed.plan.devices),
            "state": str(replica.state),
            "reason": replica.reason,
            "generation": managed.generation,
            "restarts": managed.restarts.total,
            "elapsed_s": round(now_s - managed.started_s, 1),
            "since_progress_s": round(now_s - managed.progress_s, 1),
            "queued": stats.queued if stats else 0,
            "running": stats.running if stats else 0,
            "bound": len(replica.bound),
            "requests": stats.submitted if stats else 0,
            "kv_blocks_used": stats.kv_blocks_used if stats else 0,
            "resident_bytes": managed.resident_bytes,
            "payload_bytes": managed.payload_bytes,
            "facts": replica.facts,
        }


def _exit_text(code: int, failure: OmniError | None) -> str:
    if failure is not None:
        return str(failure)
    if code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return f"exited with code {code}"
