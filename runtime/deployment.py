"""A plan being served: hub, supervisor and orchestrator put together, warmed up, watched and taken down.

What the HTTP server talks to (runtime/server/ports.py). Owns the control sockets' folder and the server's
shared-memory arena.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from runtime.connectors import open_connectors
from runtime.errors import OmniError, StartFailed, Unavailable
from runtime.exchange import Exchange
from runtime.hub import Hub
from runtime.kv_layouts import check_kv_layouts
from runtime.messages import AnyMessage, Beat
from runtime.orchestrator import Availability, Orchestrator, RequestHandle
from runtime.plan import Modality, Plan
from runtime.pool import Replica
from runtime.requests import TERMINALS, Done, Failed, RequestSpec
from runtime.settings import shm_dir
from runtime.supervisor import Folders, Supervisor
from runtime.sweep import new_arena_name, sweep_dead_folders, sweep_dead_owners
from runtime.telemetry import Telemetry
from runtime.tracing import TraceStore
from runtime.warmup import warm_up_requests

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


class Deployment:
    """Make, `start`, and `stop` on one event loop. `phase`: starting, warming, ready, failed, draining."""

    def __init__(self, plan: Plan, plan_file: Path, log_dir: Path) -> None:
        self.plan = plan
        self.phase = "starting"
        self.failure: OmniError | None = None
        self._started_s = time.monotonic()
        sweep_dead_owners(shm_dir())
        sweep_dead_folders()
        self._folder = Path(tempfile.gettempdir()) / f"{new_arena_name()}-0"
        self._folder.mkdir(mode=0o700)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.telemetry = Telemetry()
        self._exchange = Exchange(open_connectors())
        self._hub = Hub(self._folder, self._handle)
        self.orchestrator = Orchestrator(
            plan, hub=self._hub, exchange=self._exchange, telemetry=self.telemetry, unresponsive=self._on_unresponsive
        )
        self.supervisor = Supervisor(
            plan,
            folders=Folders(plan_file, self._folder, log_dir),
            pools=self.orchestrator.pools,
            hub=self._hub,
            telemetry=self.telemetry,
            ready=self.orchestrator.replica_ready,
            down=self.orchestrator.replica_down,
        )
        self._warming: asyncio.Task[None] | None = None

    # ---- what the HTTP server needs ------------------------------------------------------------------

    @property
    def metrics(self) -> CollectorRegistry:
        return self.telemetry.registry

    @property
    def traces(self) -> TraceStore:
        return self.orchestrator.traces

    async def submit(self, spec: RequestSpec) -> RequestHandle:
        """As Orchestrator.submit; Unavailable until the warm-up has passed."""
        if self.phase in ("starting", "warming", "failed"):
            raise Unavailable(
                f"the server is {self.phase}" + (f": {self.failure}" if self.failure else ""),
                hint="see /ready",
                retry_after_s=5,
            )
        return await self.orchestrator.submit(spec)

    def availability(self) -> dict[str, dict[Modality, Availability]]:
        """task -> output modality -> ready, or the reason why not."""
        found = self.orchestrator.availability()
        if self.phase == "ready":
            return found
        reason = f"the server is {self.phase}"
        return {
            task: {m: Availability(False, a.reason or reason) for m, a in modalities.items()}
            for task, modalities in found.items()
        }

    def status(self) -> dict[str, Any]:
        """For people and tools: phase, why, and a row a replica."""
        phase = self.phase
        if phase == "ready" and not self.supervisor.all_ready:
            phase = "degraded"
        failure = self.failure or self.supervisor.failure
        return {
            "name": self.plan.name,
            "model_id": self.plan.model_id,
            "phase": phase,
            "failure": failure.to_fields() if failure is not None else None,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "open_requests": self.orchestrator.num_open,
            "queued_requests": self.orchestrator.admission.num_queued,
            "stages": self.supervisor.rows(),
        }

    # ---- life ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self.supervisor.start()
        self._warming = asyncio.create_task(self._warm_up())

    async def drain(self) -> None:
        """Take nothing new and let the running requests end, within the plan's drain timeout."""
        timeout_s = self.plan.limits.drain_timeout_s if self.phase == "ready" else 0.0  # nobody waits for a warm-up
        self.phase = "draining"
        if self._warming is not None:
            self._warming.cancel()
        cut = await self.orchestrator.drain(timeout_s)
        if cut:
            log.warning("%d requests were cut off", cut)

    async def stop(self) -> None:
        """End every worker and remove what this deployment made outside its state folder."""
        self.phase = "draining"
        await self.supervisor.stop(STOP_TIMEOUT_S)
        self._hub.close()
        self._exchange.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        sweep_dead_owners(shm_dir())

    async def _warm_up(self) -> None:
        """Ready means: every task and modality has answered a real request."""
        try:
            await self._until_all_ready()
            check_kv_layouts(self.plan, self.orchestrator.pools)
            self.phase = "warming"
            for what, spec in warm_up_requests(self.plan):
                began_s = time.monotonic()
                await self._send(what, spec)
                log.info("warm-up %s: %.2f s", what, time.monotonic() - began_s)
        except OmniError as error:
            self.failure, self.phase = error, "failed"
            log.error("start failed: %s", error)
        except Exception as exc:
            log.exception("start failed")
            self.failure, self.phase = StartFailed(f"start failed with {type(exc).__name__}; see the log"), "failed"
        else:
            self.phase = "ready"
            log.info("ready after %.1f s", time.monotonic() - self._started_s)

    async def _until_all_ready(self) -> None:
        changed = self.supervisor.changed
        while not self.supervisor.all_ready:
            if self.supervisor.failure is not None:
                raise self.supervisor.failure
            changed.clear()
            await changed.wait()  # ends: each start has its deadline, and its failure sets the event

    async def _send(self, what: str, spec: RequestSpec) -> None:
        handle = await self.orchestrator.submit(spec)
        async for event in handle:
            if isinstance(event, Failed):
                raise StartFailed(f"warm-up request ({what}) failed: {event.error}", hint="see the stage's log")
            if isinstance(event, TERMINALS) and not isinstance(event, Done):
                raise StartFailed(f"warm-up request ({what}) was aborted")

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, Beat):
            self._exchange.trim()
        if not self.supervisor.handle(message):
            self.orchestrator.handle(message)

    def _on_unresponsive(self, replica: Replica, reason: str) -> None:
        self.supervisor.unresponsive(replica, reason)
