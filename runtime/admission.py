"""Who may start: a slot in every stage of the sub-graph at once, else a bounded queue with a deadline.

First come, first served per stage: a request never overtakes an earlier one that waits for a stage which it
needs itself, but a text answer does not wait behind a full vocoder.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from runtime.errors import Overloaded, Unavailable
from runtime.graph import SubGraph
from runtime.plan import Limits
from runtime.pool import Pools, Replica
from runtime.telemetry import Telemetry


@dataclass(slots=True)
class _Waiting:
    request_id: str
    graph: SubGraph
    admitted: asyncio.Future[dict[str, Replica]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Admission:
    def __init__(self, pools: Pools, limits: Limits, telemetry: Telemetry) -> None:
        self._pools, self._limits, self._telemetry = pools, limits, telemetry
        self._queue: list[_Waiting] = []

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    async def acquire(self, graph: SubGraph, request_id: str) -> dict[str, Replica]:
        """Bind a replica of each stage. Unavailable when a stage is out, Overloaded when the wait is too long."""
        self._require_ready(graph)
        waiting = _Waiting(request_id, graph)
        self._queue.append(waiting)
        self.pump()
        if waiting.admitted.done():
            return waiting.admitted.result()
        if len(self._queue) > self._limits.max_queued:
            self._queue.remove(waiting)
            raise self._overloaded(f"{len(self._queue)} requests are waiting already (limit max_queued)")
        self._telemetry.queue_depth.set(len(self._queue))
        try:
            async with asyncio.timeout(self._limits.queue_timeout_s):
                return await waiting.admitted
        except asyncio.CancelledError:
            self._abandon(waiting)
            raise
        except TimeoutError:
            self._abandon(waiting)
            limit_s = self._limits.queue_timeout_s
            raise self._overloaded(f"no slot became free within {limit_s:g} s (limit queue_timeout_s)") from None
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)
            self._telemetry.queue_depth.set(len(self._queue))

    def pump(self) -> None:
        """Admit whoever can start now: called when a slot or a replica becomes free."""
        held: set[str] = set()
        for waiting in list(self._queue):
            if waiting.admitted.done() or held & set(waiting.graph.stages):
                continue
            bindings, full = self._pools.bind(waiting.graph, waiting.request_id)
            if full:
                held |= set(full)
                continue
            self._queue.remove(waiting)
            waiting.admitted.set_result(bindings)

    def refuse_unready(self) -> None:
        """A stage went away: those who wait for it are told at once."""
        for waiting in list(self._queue):
            try:
                self._require_ready(waiting.graph)
            except Unavailable as error:
                self._refuse(waiting, error)

    def refuse_all(self, error: Unavailable) -> None:
        """The server is going down: nobody in the queue will start."""
        for waiting in list(self._queue):
            self._refuse(waiting, error)

    def give_back(self, bindings: dict[str, Replica], request_id: str) -> None:
        """Free the slots of a request that does not start after all."""
        for replica in bindings.values():
            replica.bound.discard(request_id)
        self.pump()

    def _refuse(self, waiting: _Waiting, error: Unavailable) -> None:
        self._queue.remove(waiting)
        if not waiting.admitted.done():
            waiting.admitted.set_exception(error)

    def _abandon(self, waiting: _Waiting) -> None:
        """Whoever waited is gone; he may have been admitted in this very moment."""
        admitted = waiting.admitted
        if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
            self.give_back(admitted.result(), waiting.request_id)

    def _require_ready(self, graph: SubGraph) -> None:
        for stage in graph.stages:
            if reason := self._pools[stage].why_not_ready():
                raise Unavailable(reason, hint="see /ready; try again when the stage is back", retry_after_s=5)

    def _overloaded(self, why: str) -> Overloaded:
        return Overloaded(f"the server is at its capacity: {why}", hint="try again later", retry_after_s=2)
