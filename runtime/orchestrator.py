"""Owns every request from admission to its single terminal. Schedules stages, never tokens; touches no tensor.

Runs on the server's event loop; hears from replicas through `handle` and from the supervisor through
`replica_ready` and `replica_down`. All ways to the end of a request go through `_end`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from runtime.active import ActiveRequest, EventStream, RequestState
from runtime.admission import Admission
from runtime.errors import (
    ConnectorError,
    DeadlineExceeded,
    OmniError,
    Overloaded,
    StageDied,
    Unavailable,
    from_fields,
)
from runtime.exchange import Exchange
from runtime.graph import primary_input, select
from runtime.hub import Hub
from runtime.messages import (
    Abort,
    Aborted,
    AnyMessage,
    Close,
    Credit,
    Ended,
    Message,
    Output,
    Piece,
    Stamps,
    Started,
    Submit,
    Target,
)
from runtime.outgoing import CLIENT_EDGE
from runtime.payload import Payload
from runtime.plan import MODALITY_PAYLOAD, REQUEST_INPUT, ConnectorKind, EdgeMode, Modality, Plan
from runtime.pool import Life, Pools, Replica
from runtime.requests import AbortedRequest, Delta, Done, Event, Failed, ModalityEnd, RequestSpec
from runtime.telemetry import Telemetry
from runtime.tracing import RequestTrace, TraceStore

log = logging.getLogger(__name__)

SHUTTING_DOWN = "the server is shutting down and takes no new requests"
STRAGGLER_S = 0.05


@dataclass(frozen=True, slots=True)
class Availability:
    ready: bool
    reason: str = ""


class RequestHandle:
    """The client's side of an accepted request: its events, one consumer, and the way to give up."""

    def __init__(self, orchestrator: Orchestrator, request: ActiveRequest) -> None:
        self._orchestrator, self._request = orchestrator, request

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def epoch(self) -> int:
        return self._request.epoch

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for event in self._request.events:
            yield event

    async def abort(self) -> AbortedRequest:
        """Stop the request everywhere; returns when the stages confirmed or the abort timeout is over."""
        return await self._orchestrator.abort(self.request_id)


class Orchestrator:
    """`unresponsive(replica, reason)` is called for a replica that does not confirm an abort in time."""

    def __init__(
        self,
        plan: Plan,
        *,
        hub: Hub,
        exchange: Exchange,
        telemetry: Telemetry,
        unresponsive: Callable[[Replica, str], None],
    ) -> None:
        self.plan, self.pools, self.telemetry = plan, Pools(plan), telemetry
        self.admission = Admission(self.pools, plan.limits, telemetry)
        self.traces = TraceStore(plan.limits.kept_traces)
        self.accepting = True
        self._hub = hub
        self._exchange, self._unresponsive = exchange, unresponsive
        self._requests: dict[str, ActiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- what the server calls -----------------------------------------------------------------------

    async def submit(self, spec: RequestSpec) -> RequestHandle:
        """Admit and start a request.

        InvalidRequest and NotFound for what the plan does not serve, Unavailable for a stage that is out,
        Overloaded when no slot becomes free in time. After this the request yields exactly one terminal.
        """
        try:
            request = await self._admit(spec)
        except OmniError as error:
            self.telemetry.rejected.labels(error.code).inc()
            raise
        self.telemetry.accepted.labels(spec.task).inc()
        self._begin(request)
        return RequestHandle(self, request)

    def update(self, request_id: str, epoch: int, modality: Modality, sequence: int, piece: Payload) -> bool:
        """A later piece of a streaming input. False, and counted, for a request that is not there any more,
        of another epoch, or a sequence number that was used before."""
        request = self._requests.get(request_id)
        if (
            request is None
            or request.state is not RequestState.RUNNING
            or request.epoch != epoch
            or modality not in request.spec.open_inputs
            or sequence < request.next_update[modality]
        ):
            self.telemetry.dropped.inc()
            return False
        request.next_update[modality] = sys.maxsize if piece.last else sequence + 1
        self._feed(request, modality, piece, last=piece.last)
        return True

    async def abort(self, request_id: str) -> AbortedRequest:
        """End a request on the client's behalf. Idempotent; of an unknown or ended one it says so with no stages."""
        request = self._requests.get(request_id)
        if request is None:
            return AbortedRequest(request_id)
        if request.state is RequestState.RUNNING:
            request.state = RequestState.ABORTING
            self._tell_to_abort(request)
        await request.all_acknowledged.wait()  # ends: the acknowledgement deadline sets it
        return AbortedRequest(request_id, tuple(request.acknowledged), tuple(sorted(request.awaiting)))

    def availability(self) -> dict[str, dict[Modality, Availability]]:
        """task -> output modality -> whether a plain request for it would be admitted."""
        return {
            task: {m: self._available(task, m) for m in task_plan.outputs}
            for task, task_plan in self.plan.tasks.items()
        }

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests and wait for the running ones; returns how many were cut off at the deadline."""
        self.accepting = False
        self.admission.refuse_all(Unavailable(SHUTTING_DOWN, retry_after_s=10))
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            cut = list(self._requests.values())
            for request in cut:
                self._end(request, Failed(request.request_id, Unavailable(SHUTTING_DOWN)))
            return len(cut)
        return 0

    @property
    def num_open(self) -> int:
        return len(self._requests)

    # ---- what the supervisor calls -------------------------------------------------------------------

    def replica_ready(self, replica: Replica) -> None:
        self.admission.pump()

    def replica_down(self, replica: Replica, reason: str) -> None:
        """Fail the requests that are bound there and not through with it; nobody else is touched."""
        error_text = f"stage {replica.stage} (replica {replica.index}) went away: {reason}"
        for request_id in list(replica.bound):
            request = self._requests.get(request_id)
            if request is None:
                replica.bound.discard(request_id)
                continue
            self._acknowledge(request, replica.stage)
            if request.state is RequestState.RUNNING and replica.stage not in request.ended:
                error = StageDied(error_text, hint="the stage is being restarted; send the request again")
                self._end(request, Failed(request_id, error), gone=replica.stage)
        replica.bound.clear()
        self.admission.refuse_unready()

    # ---- what replicas say ---------------------------------------------------------------------------

    def handle(self, message: AnyMessage) -> None:
        match message:
            case Output():
                self._on_output(message)
            case Started():
                if (request := self._current(message.request_id, message.epoch)) is not None:
                    request.started.add(message.stage)
            case Ended():
                self._on_ended(message)
            case Aborted():
                self._on_aborted(message)
            case Credit():
                self._exchange.reclaim(message.ref)
            case _:
                log.warning("unexpected message %s", type(message).__name__)

    def _on_output(self, message: Output) -> None:
        try:
            payload = self._exchange.take(message.ref)
        except ConnectorError as error:
            payload, failure = None, error
        if message.reply:
            self._send(message.reply, Credit(CLIENT_EDGE, message.ref))
        request = self._current(message.request_id, message.epoch)
        if request is None:
            self.telemetry.dropped.inc()
        elif payload is None:
            self._end(request, Failed(request.request_id, failure))
        else:
            self._deliver(request, message.stage, payload)

    def _deliver(self, request: ActiveRequest, stage: str, payload: Payload) -> None:
        modality = request.modality_of(stage, payload.kind)
        if modality is None:
            self.telemetry.dropped.inc()
            return
        now_s = time.monotonic()
        Stamps.add(request.trace.arrived, modality, now_s)
        if modality not in request.first_s:
            request.first_s[modality] = now_s - request.accepted_s
            self.telemetry.observe_first(request.spec.task, modality, request.first_s[modality])
        if modality is Modality.AUDIO and "samples" in payload.tensors:
            request.audio_s += payload.tensors["samples"].shape[-1] / payload.meta["sample_rate_hz"]
        request.events.put(Delta(request.request_id, request.epoch, request.next_sequence, modality, payload))
        request.next_sequence += 1
        limit = self.plan.limits.max_unread_bytes
        if request.events.unread_bytes > limit:
            error = Overloaded(f"the client reads too slowly: more than {limit} bytes wait (limit max_unread_bytes)")
            self._end(request, Failed(request.request_id, error))

    def _on_ended(self, message: Ended) -> None:
        request = self._requests.get(message.request_id)
        if request is None or request.epoch != message.epoch or message.stage in request.ended:
            return
        request.ended[message.stage] = message
        request.trace.ended(message.stage, message.trace)
        self._acknowledge(request, message.stage)
        if request.state is not RequestState.RUNNING:
            return
        if message.error is not None:
            self._end(request, Failed(request.request_id, from_fields(message.error)))
            return
        for modality, final in request.graph.finals.items():
            if final == message.stage:
                request.events.put(ModalityEnd(request.request_id, modality, message.reason, message.usage))
        if not request.complete:
            self._advance(request)
        elif not request.unfinished:
            self._complete(request)
        else:
            # a producer's end may come a moment after its consumer's: its usage is part of the answer
            asyncio.get_running_loop().call_later(STRAGGLER_S, self._complete, request)

    def _complete(self, request: ActiveRequest) -> None:
        usage = {stage: ended.usage for stage, ended in request.ended.items()}
        self._end(request, Done(request.request_id, usage))

    def _on_aborted(self, message: Aborted) -> None:
        request = self._requests.get(message.request_id)
        if request is not None:
            request.trace.ended(message.stage, message.trace)
            self._acknowledge(request, message.stage)
            return
        self.pools.replica(message.stage, message.index).bound.discard(message.request_id)  # came after the deadline
        self.admission.pump()

    # ---- the life of a request -----------------------------------------------------------------------

    async def _admit(self, spec: RequestSpec) -> ActiveRequest:
        asked_s = time.monotonic()
        graph = select(self.plan, spec.task, spec.modalities, spec.inputs)
        if not self.accepting:
            raise Unavailable(SHUTTING_DOWN, retry_after_s=10)
        if spec.request_id in self._requests:
            raise OmniError(f"request id {spec.request_id} is in use")
        bindings = await self.admission.acquire(graph, spec.request_id)
        gone = [r for r in bindings.values() if r.state is not Life.READY]
        if gone or not self.accepting:
            self.admission.give_back(bindings, spec.request_id)
            reason = f"stage {gone[0].stage} is {gone[0].state}: {gone[0].reason}" if gone else SHUTTING_DOWN
            raise Unavailable(reason, retry_after_s=5)
        trace = RequestTrace(spec.request_id, spec.task, graph, asked_s)
        return ActiveRequest(spec, graph, bindings, trace, EventStream(trace))

    def _begin(self, request: ActiveRequest) -> None:
        self._requests[request.request_id] = request
        self.traces.open(request.trace)
        self._idle.clear()
        self.telemetry.open_requests.set(len(self._requests))
        timeout_s = request.spec.timeout_s or self.plan.limits.request_timeout_s
        request.deadline = asyncio.get_running_loop().call_later(timeout_s, self._on_deadline, request, timeout_s)
        request.open_inputs = {stage: set(kinds) for stage, kinds in request.graph.entries.items()}
        for modality, payloads in request.spec.inputs.items():
            is_open = modality in request.spec.open_inputs
            for number, payload in enumerate(payloads, 1):
                self._feed(request, modality, payload, last=number == len(payloads) and not is_open)
            request.next_update[modality] = len(payloads)
        self._advance(request)

    def _advance(self, request: ActiveRequest) -> None:
        """Submit every stage whose whole inputs are there; consumers first, so that they expect their data."""
        startable: list[str] = []
        for stage in request.graph.stages:
            if stage in request.submitted:
                continue
            into = [e for e in request.graph.edges if e.target == stage]
            whole = [e.source for e in into if e.mode is EdgeMode.WHOLE]
            chunked = [e.source for e in into if e.mode is EdgeMode.CHUNKED]
            if all(s in request.ended for s in whole) and all(
                s in request.submitted or s in startable for s in chunked
            ):
                startable.append(stage)
        for stage in reversed(startable):
            request.submitted.add(stage)
            self._submit(request, stage)
        for stage in startable:
            for modality, payload, last in request.held_inputs.pop(stage, ()):
                self._feed(request, modality, payload, last=last)

    def _submit(self, request: ActiveRequest, stage: str) -> None:
        inputs = [e.name for e in request.graph.edges if e.target == stage]
        if stage in request.graph.entries:
            inputs.append(REQUEST_INPUT)
        targets = [
            Target(e.name, e.payload, e.mode, e.connector, request.bindings[e.target].address, e.capacity_bytes)
            for e in request.graph.edges
            if e.source == stage
        ]
        for modality, final in request.graph.finals.items():
            if final == stage:
                kind, limit = MODALITY_PAYLOAD[modality], self.plan.limits.max_unread_bytes
                targets.append(Target(CLIENT_EDGE, kind, EdgeMode.CHUNKED, ConnectorKind.SHM, self._hub.address, limit))
        message = Submit(request.request_id, request.epoch, request.spec.params_of(stage), inputs, targets)
        self._send(request.bindings[stage].address, message)

    def _feed(self, request: ActiveRequest, modality: Modality, payload: Payload, *, last: bool) -> None:
        """One input piece to its entry stage; the stage's last piece is the last of its last input.

        A stage that waits for a whole edge has not been submitted yet: its input is held here until then.
        """
        stage = self.plan.tasks[request.spec.task].inputs[modality]
        if stage not in request.submitted:
            request.held_inputs.setdefault(stage, []).append((modality, payload, last))
            return
        if request.state is not RequestState.RUNNING:
            return
        sequence = request.fed.get(stage, 0)
        request.fed[stage] = sequence + 1
        Stamps.add(request.trace.fed, stage, time.monotonic())
        if last:
            request.open_inputs[stage].discard(modality)
        last = last and not request.open_inputs[stage]
        addressed = Payload(
            payload.kind,
            request.request_id,
            request.epoch,
            REQUEST_INPUT,
            sequence,
            last,
            payload.meta,
            payload.tensors,
        )
        try:
            ref = self._exchange.put(ConnectorKind.SHM, addressed)
        except ConnectorError as error:
            self._end(request, Failed(request.request_id, error))
            return
        reply = "" if ref.inline is not None else self._hub.address
        piece = Piece(request.request_id, request.epoch, REQUEST_INPUT, sequence, last, ref, reply)
        self._send(request.bindings[stage].address, piece)

    # ---- the end of a request ------------------------------------------------------------------------

    def _end(self, request: ActiveRequest, terminal: Done | Failed, *, gone: str = "") -> None:
        """The client gets its terminal now; slots are free when the stages confirm."""
        if request.state is not RequestState.RUNNING:
            return
        request.state = RequestState.OVER
        if isinstance(terminal, Failed):
            log.warning("request %s failed: %s", request.request_id, terminal.error)
        self._terminal(request, terminal)
        self._tell_to_abort(request, gone=gone, forget=isinstance(terminal, Failed))

    def _terminal(self, request: ActiveRequest, terminal: Done | Failed | AbortedRequest) -> None:
        kinds = {Done: "done", Failed: "failed", AbortedRequest: "aborted"}
        task, seconds = request.spec.task, time.monotonic() - request.accepted_s
        request.trace.over(kinds[type(terminal)])
        self.telemetry.terminals.labels(task, kinds[type(terminal)]).inc()
        self.telemetry.duration.labels(task).observe(seconds)
        if request.audio_s and isinstance(terminal, Done):
            self.telemetry.real_time_factor.labels(task).observe(seconds / request.audio_s)
        request.events.put(terminal)

    def _tell_to_abort(self, request: ActiveRequest, *, gone: str = "", forget: bool = True) -> None:
        """Abort the stages at work, close those that are through, release those that never started."""
        if request.deadline is not None:
            request.deadline.cancel()
        request.awaiting = {s for s in request.unfinished if s != gone}
        for stage, replica in request.bindings.items():
            if stage in request.awaiting:
                self._send(replica.address, Abort(request.request_id, request.epoch))
            else:
                replica.bound.discard(request.request_id)
                if forget and stage in request.ended:
                    self._send(replica.address, Close(request.request_id, request.epoch))
        if request.awaiting:
            timeout_s = self.plan.limits.abort_timeout_s
            request.acks_deadline = asyncio.get_running_loop().call_later(timeout_s, self._on_acks_deadline, request)
        else:
            self._settle(request)

    def _acknowledge(self, request: ActiveRequest, stage: str) -> None:
        """A stage is through with a request, one way or another: its slot is free."""
        request.bindings[stage].bound.discard(request.request_id)
        if stage in request.awaiting:
            request.awaiting.discard(stage)
            request.acknowledged.append(stage)
            if not request.awaiting:
                self._settle(request)
        self.admission.pump()

    def _on_acks_deadline(self, request: ActiveRequest) -> None:
        for stage in sorted(request.awaiting):
            limit_s = self.plan.limits.abort_timeout_s
            self._unresponsive(request.bindings[stage], f"it did not confirm an abort within {limit_s:g} s")
        self._settle(request)

    def _settle(self, request: ActiveRequest) -> None:
        """Nothing of the request is left anywhere, but in a stage that has not confirmed: that one keeps its slot."""
        if request.acks_deadline is not None:
            request.acks_deadline.cancel()
        if self._requests.pop(request.request_id, None) is None:
            return
        if request.state is RequestState.ABORTING:
            request.state = RequestState.OVER
            missing = tuple(sorted(request.awaiting))
            self._terminal(request, AbortedRequest(request.request_id, tuple(request.acknowledged), missing))
        self.traces.close(request.request_id)
        self._exchange.cleanup(request.request_id)
        self.telemetry.open_requests.set(len(self._requests))
        request.all_acknowledged.set()
        if not self._requests:
            self._idle.set()
        self.admission.pump()

    def _on_deadline(self, request: ActiveRequest, timeout_s: float) -> None:
        working = ", ".join(s for s in request.unfinished) or "no stage"
        error = DeadlineExceeded(f"the request did not end within {timeout_s:g} s; still at work: {working}")
        self._end(request, Failed(request.request_id, error))

    # ---- small helpers -------------------------------------------------------------------------------

    def _current(self, request_id: str, epoch: int) -> ActiveRequest | None:
        request = self._requests.get(request_id)
        if request is None or request.epoch != epoch or request.state is not RequestState.RUNNING:
            return None
        return request

    def _send(self, address: str, message: Message) -> None:
        self._hub.send(address, message)

    def _available(self, task: str, modality: Modality) -> Availability:
        graph = select(self.plan, task, (modality,), (primary_input(self.plan, task),))
        reasons = [reason for stage in graph.stages if (reason := self.pools[stage].why_not_ready())]
        return Availability(not reasons, "; ".join(reasons))
