"""The stage loop: one thread that owns one replica's engine, inbox and outputs.

Drain the inbox, step the engine, emit. Knows edges, epochs and refs; nothing of models. Payloads that come
before their Submit are parked; what belongs to an ended or older request is counted and dropped.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from runtime.engines.base import End, Engine, StageOutput, StageWork
from runtime.errors import ConnectorError
from runtime.exchange import Exchange
from runtime.messages import (
    Abort,
    Aborted,
    AnyMessage,
    Close,
    Credit,
    Drain,
    Ended,
    Piece,
    Spent,
    StageStats,
    StageTrace,
    Stamps,
    Started,
    Submit,
    Target,
)
from runtime.outgoing import CLIENT_EDGE, Outgoing
from runtime.parking import EndedRequests, Parking
from runtime.payload import Payload
from runtime.plan import EdgeMode
from runtime.transport import Inbox, Outbox

log = logging.getLogger(__name__)

MAX_DRAINED = 256
"""Messages taken between two steps, so that a flood of input does not hold up running requests."""
SNAPSHOT_INTERVAL_S = 0.25


@dataclass(slots=True)
class _Job:
    epoch: int
    targets: list[Target]
    missing: set[str]
    """Inputs whose last piece has not come."""
    trace: StageTrace
    submitted: Spent
    complete: Spent | None = None
    """What the loop had spent when the request came, and when its input was complete."""
    held_s: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)
    """Edge -> number of pieces sent."""
    arrived: dict[str, int] = field(default_factory=dict)
    """Edge -> sequence of the last piece that came in."""
    owed: list[Piece] = field(default_factory=list)
    """Pieces that were fed and whose credit is held back until the engine has worked on them."""
    held: list[tuple[Target, Payload]] = field(default_factory=list)
    """Payloads of whole edges: they leave when the stage ends, so they never hold an edge's credit while waiting."""
    started: bool = False


class StageLoop:
    """`run` is the body of the replica's thread; only `stats` may be called from others."""

    def __init__(
        self,
        *,
        stage: str,
        index: int,
        engine: Engine,
        inbox: Inbox,
        outbox: Outbox,
        exchange: Exchange,
        server: str,
    ) -> None:
        self.stage, self.index, self.engine = stage, index, engine
        self._inbox, self._outbox, self._exchange = inbox, outbox, exchange
        self._server = Target(CLIENT_EDGE, "", "chunked", "", server, 1)
        self._jobs: dict[str, _Job] = {}
        self._owing: set[str] = set()
        """Requests whose job owes credit."""
        self._parking, self._ended, self._lost = Parking(), EndedRequests(), EndedRequests()
        self._outgoing = Outgoing(
            stage=stage,
            reply=inbox.address,
            outbox=outbox,
            exchange=exchange,
            failed=self._fail,
            released=self._on_released,
        )
        self._held: frozenset[str] = frozenset()
        self._engine_s = self._idle_s = 0.0
        self._draining = False
        self._steps = self._submitted = self._dropped = 0
        self._step_started_s: float | None = None
        self._snapshot: dict[str, float] = {}
        self._snapshot_s = 0.0

    def run(self) -> None:
        """Until drained. An exception out of `Engine.step` is fatal to the process and comes out of here."""
        while not (self._draining and not self._jobs and not self._outgoing.held):
            self._outbox.flush()
            self._wait()
            for message in self._inbox.drain(MAX_DRAINED):
                self._handle(message)
            self._outbox.flush()  # nobody waits for what they are owed until a step is over
            if self._next_step_s() == 0.0:
                self._step()
            if time.monotonic() - self._snapshot_s > SNAPSHOT_INTERVAL_S:
                self._take_snapshot()
            for piece in self._parking.expired():
                self._lose(piece)
        self._outbox.flush()

    def stats(self) -> StageStats:
        """Safe from any thread: numbers as of the last time the loop looked, and the age of the step in progress."""
        counters = dict(self._snapshot)
        started_s = self._step_started_s
        return StageStats(
            stage=self.stage,
            index=self.index,
            queued=int(counters.pop("queued", 0)),
            running=int(counters.pop("running", 0)),
            steps=self._steps,
            step_age_s=0.0 if started_s is None else time.monotonic() - started_s,
            submitted=self._submitted,
            dropped_pieces=self._dropped,
            edge_bytes=self._outgoing.edge_bytes.copy(),
            kv_blocks_used=int(counters.pop("kv_blocks_used", 0)),
            counters=counters,
        )

    def _next_step_s(self) -> float | None:
        """Of the engine, which first hears whose output has no room."""
        if self._outgoing.held.keys() != self._held:
            self._held = frozenset(self._outgoing.held)
            self.engine.hold(self._held)
        return self.engine.next_step_s()

    def _wait(self) -> None:
        """For a message, or until the engine has something to do."""
        next_step_s, expiry_s = self._next_step_s(), self._parking.next_expiry_s()
        wait_s = min((w for w in (next_step_s, expiry_s) if w is not None), default=None)
        if wait_s is not None and wait_s <= 0:
            return
        self._take_snapshot()
        began_s = time.monotonic()
        self._inbox.wait(wait_s)
        waited_s = time.monotonic() - began_s
        if next_step_s is None:
            self._idle_s += waited_s
        else:
            self._engine_s += waited_s

    def _step(self) -> None:
        began_s = self._step_started_s = time.monotonic()
        outputs = self.engine.step()
        self._step_started_s = None
        self._engine_s += time.monotonic() - began_s
        self._steps += 1
        for output in outputs:
            self._emit(output)
        for request_id in [r for r in self._owing if self.engine.consumed(r)]:
            self._pay(request_id, self._jobs[request_id])

    def _take_snapshot(self) -> None:
        self._snapshot = {**self.engine.stats(), "engine_seconds": self._engine_s}
        self._snapshot_s = time.monotonic()

    # ---- what comes in -------------------------------------------------------------------------------

    def _handle(self, message: AnyMessage) -> None:
        match message:
            case Piece():
                self._on_piece(message)
            case Credit():
                self._outgoing.credit(message.ref)
            case Submit():
                self._on_submit(message)
            case Abort():
                job = self._jobs.get(message.request_id)
                trace = self._closed_trace(message.request_id, job) if job is not None else None
                self._forget(message.request_id, message.epoch)
                aborted = Aborted(message.request_id, message.epoch, self.stage, self.index, trace)
                self._outbox.collect(self._server.address, aborted)
            case Close():
                self._forget(message.request_id, message.epoch)
            case Drain():
                self._draining = True
            case _:
                self._dropped += 1

    def _on_submit(self, message: Submit) -> None:
        request_id = message.request_id
        job = self._jobs.get(request_id)
        if self._ended.covers(request_id, message.epoch) or (job is not None and job.epoch >= message.epoch):
            self._dropped += 1
            return
        if job is not None:
            self._drop(request_id, job)
        self._submitted += 1
        trace = StageTrace(self.index, time.monotonic(), {}, {})
        self._jobs[request_id] = _Job(
            message.epoch, message.targets, set(message.inputs), trace, Spent(self._engine_s, self._idle_s)
        )
        wants = frozenset(target.payload for target in message.targets)
        self.engine.submit(
            StageWork(request_id, message.epoch, message.params, frozenset(message.inputs), wants),
        )
        if self._lost.covers(request_id, message.epoch):
            self._fail(
                request_id, ConnectorError(f"input of the request was lost before stage {self.stage} was told of it")
            )
        for piece in self._parking.take(request_id):
            self._on_piece(piece)

    def _on_piece(self, piece: Piece) -> None:
        job = self._jobs.get(piece.request_id)
        if self._ended.covers(piece.request_id, piece.epoch) or (job is not None and piece.epoch < job.epoch):
            self._refuse(piece)
        elif job is None or piece.epoch > job.epoch:
            for evicted in self._parking.put(piece):
                self._lose(evicted)
        elif piece.sequence <= job.arrived.get(piece.edge, -1):
            self._refuse(piece)
        elif piece.sequence > job.arrived.get(piece.edge, -1) + 1:
            self._refuse(piece)
            self._fail(
                piece.request_id, ConnectorError(f"{piece.edge}: pieces before number {piece.sequence} are lost")
            )
        else:
            job.arrived[piece.edge] = piece.sequence
            self._feed(job, piece)

    def _feed(self, job: _Job, piece: Piece) -> None:
        try:
            payload = self._exchange.take(piece.ref)
        except ConnectorError as exc:
            self._refuse(piece)
            self._fail(piece.request_id, exc)
            return
        payload.request_id, payload.epoch = piece.request_id, piece.epoch
        payload.edge, payload.sequence, payload.last = piece.edge, piece.sequence, piece.last
        self._start(piece.request_id, job)
        Stamps.add(job.trace.received, piece.edge, time.monotonic())
        if piece.last:
            job.missing.discard(piece.edge)
            if not job.missing:
                job.trace.complete_s = time.monotonic()
                job.complete = self._spent(piece.request_id, job)
        self.engine.feed(piece.request_id, payload)
        if piece.reply:
            job.owed.append(piece)
            self._owing.add(piece.request_id)
            if self.engine.consumed(piece.request_id):
                self._pay(piece.request_id, job)

    # ---- what goes out -------------------------------------------------------------------------------

    def _emit(self, output: StageOutput) -> None:
        job = self._jobs.get(output.request_id)
        if job is None:
            return
        self._start(output.request_id, job)
        if output.payload is not None:
            for target in job.targets:
                if target.payload != output.payload.kind:
                    continue
                if target.mode == EdgeMode.WHOLE:
                    job.held.append((target, output.payload))
                else:
                    self._post(output.request_id, job, target, output.payload)
        if output.end is not None and output.request_id in self._jobs:
            self._end(output.request_id, job, output.end)

    def _start(self, request_id: str, job: _Job) -> None:
        if not job.started:
            job.started = True
            self._outbox.collect(self._server.address, Started(request_id, job.epoch, self.stage))

    def _post(self, request_id: str, job: _Job, target: Target, payload: Payload, *, last: bool = False) -> None:
        """A header of its own per target: each edge has its own numbering."""
        sequence = job.sent.get(target.edge, 0)
        job.sent[target.edge] = sequence + 1
        Stamps.add(job.trace.sent, target.edge, time.monotonic())
        self._outgoing.post(
            target,
            Payload(payload.kind, request_id, job.epoch, target.edge, sequence, last, payload.meta, payload.tensors),
        )

    def _end(self, request_id: str, job: _Job, end: End) -> None:
        """Close the outgoing edges with an empty last piece; on an error the orchestrator aborts the others."""
        if end.error is None:
            for target, payload in job.held:
                self._post(request_id, job, target, payload)
            for target in job.targets:
                if target.edge != CLIENT_EDGE:
                    self._post(request_id, job, target, Payload(target.payload, request_id), last=True)
        self._pay(request_id, job)
        self._jobs.pop(request_id, None)
        self._ended.add(request_id, job.epoch)
        error = end.error.to_fields() if end.error is not None else None
        trace = self._closed_trace(request_id, job, end.began_s)
        ended = Ended(request_id, job.epoch, self.stage, end.reason, dict(end.usage), error, trace)
        behind = next((t for t in job.targets if t.edge == CLIENT_EDGE), self._server)
        self._outgoing.post_message(request_id, behind, ended)

    def _fail(self, request_id: str, error: ConnectorError) -> None:
        log.warning("request %s: %s", request_id, error)
        job = self._jobs.get(request_id)
        if job is not None:
            self.engine.abort(request_id)
            self._end(request_id, job, End(error=error))

    # ---- the end of a request ------------------------------------------------------------------------

    def _forget(self, request_id: str, epoch: int) -> None:
        job = self._jobs.get(request_id)
        if job is not None and job.epoch <= epoch:
            self._drop(request_id, job)
        self._ended.add(request_id, epoch)
        for piece in self._parking.take(request_id):
            self._on_piece(piece)
        if job is None or job.epoch <= epoch:
            self._outgoing.forget(request_id)

    def _closed_trace(self, request_id: str, job: _Job, began_s: float | None = None) -> StageTrace:
        trace, spent = job.trace, self._spent(request_id, job)
        trace.began_s, trace.ended_s = began_s, time.monotonic()
        trace.life = spent.since(job.submitted)
        if job.complete is not None:
            trace.tail = spent.since(job.complete)
        return trace

    def _spent(self, request_id: str, job: _Job) -> Spent:
        held = self._outgoing.held.get(request_id)
        held_s = job.held_s + (time.monotonic() - held.since_s if held else 0.0)
        return Spent(self._engine_s, self._idle_s, held_s)

    def _on_released(self, request_id: str, held_s: float) -> None:
        if (job := self._jobs.get(request_id)) is not None:
            job.held_s += held_s

    def _drop(self, request_id: str, job: _Job) -> None:
        self.engine.abort(request_id)
        del self._jobs[request_id]
        self._pay(request_id, job)
        self._outgoing.forget(request_id)

    def _pay(self, request_id: str, job: _Job) -> None:
        self._owing.discard(request_id)
        for piece in job.owed:
            self._outbox.collect(piece.reply, Credit(piece.edge, piece.ref))
        job.owed.clear()

    def _lose(self, piece: Piece) -> None:
        """A parked piece that cannot be kept: its request fails when it is submitted, rather than wait for ever."""
        self._lost.add(piece.request_id, piece.epoch)
        self._refuse(piece)

    def _refuse(self, piece: Piece) -> None:
        self._dropped += 1
        if piece.reply:
            self._outbox.collect(piece.reply, Credit(piece.edge, piece.ref))
