"""Control messages between the server and stage replicas: flat msgspec structs, msgpack, no pickle.

Each replica and the server own one inbox. Anyone may send to an inbox whose address he was told:
the orchestrator tells each producer its consumers' addresses in `Submit`, so payload refs go from stage
to stage directly and the orchestrator hears only of starts, client outputs, ends and errors.
Bytes too large for a message travel through a connector, and the message carries the `Ref`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Ref(msgspec.Struct, frozen=True, array_like=True):
    """How a consumer fetches a payload. `inline` holds the packed bytes themselves when they are few."""

    connector: str
    arena: str = ""
    token: int = 0
    offset: int = 0
    size_bytes: int = 0
    inline: bytes | None = None


class Message(msgspec.Struct, tag_field="type", frozen=True):
    """Base of all messages."""


# ---- to a replica ------------------------------------------------------------------------------------


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A consumer of this request's output: a stage at the far end of an edge, or the client."""

    edge: str
    payload: str
    mode: str
    connector: str
    address: str
    capacity_bytes: int


class Submit(Message, tag="submit", frozen=True):
    """Start of a request at one stage. `inputs` names what will be fed: edges, or "request".

    A stage behind chunked edges gets its Submit before any data (a placeholder).
    """

    request_id: str
    epoch: int
    params: dict[str, Any]
    inputs: list[str]
    targets: list[Target]


class Piece(Message, tag="piece", frozen=True):
    """One payload of an edge, or of the request input. `reply` is where the credit goes ("" for inline)."""

    request_id: str
    epoch: int
    edge: str
    sequence: int
    last: bool
    ref: Ref
    reply: str = ""


class Credit(Message, tag="credit", frozen=True):
    """A consumer is done with a payload: its memory and its share of the edge's capacity are free."""

    edge: str
    ref: Ref


class Abort(Message, tag="abort", frozen=True):
    """Stop working on a request; answered by `Aborted` once nothing more of it will be emitted."""

    request_id: str
    epoch: int


class Close(Message, tag="close", frozen=True):
    """The request is over everywhere: forget it and free what it holds. Not answered."""

    request_id: str
    epoch: int


class Drain(Message, tag="drain", frozen=True):
    """Finish what runs, take nothing new, then leave."""


# ---- to the server -----------------------------------------------------------------------------------


class Progress(Message, tag="progress", frozen=True):
    """A replica is loading. Resets the start deadline."""

    stage: str
    index: int
    generation: int
    phase: str


class Ready(Message, tag="ready", frozen=True):
    """A replica can take work. `facts` are the engine's own (dtype, cache tokens, sample rate, voices)."""

    stage: str
    index: int
    generation: int
    address: str
    facts: dict[str, Any]


class Broken(Message, tag="broken", frozen=True):
    """A replica cannot go on: it could not load, or its engine failed for good. Its process ends after this."""

    stage: str
    index: int
    generation: int
    error: dict[str, Any]


class Stamps(msgspec.Struct, array_like=True):
    """First and last time of something, and how often; seconds of CLOCK_MONOTONIC, the same in all processes."""

    first_s: float
    last_s: float
    count: int = 1

    @classmethod
    def add(cls, times: dict[str, Stamps], name: str, now_s: float) -> None:
        found = times.get(name)
        if found is None:
            times[name] = cls(now_s, now_s)
        else:
            found.last_s = now_s
            found.count += 1


class Spent(msgspec.Struct, frozen=True, array_like=True):
    """What became of a stretch of time in a stage loop: in the engine; idle, as the engine had nothing to do; and, of
    one request, with output that waited for room on an edge. The rest went into messages and payloads."""

    engine_s: float = 0.0
    idle_s: float = 0.0
    held_s: float = 0.0

    def since(self, earlier: Spent) -> Spent:
        return Spent(
            self.engine_s - earlier.engine_s, self.idle_s - earlier.idle_s, max(0.0, self.held_s - earlier.held_s)
        )


class StageTrace(msgspec.Struct, array_like=True):
    """What one stage did of a request, and when. received and sent: edge -> times of its pieces."""

    index: int
    submitted_s: float
    received: dict[str, Stamps]
    sent: dict[str, Stamps]
    complete_s: float = 0.0
    """When the last piece of the input came; 0 if it did not."""
    began_s: float | None = None
    """When the engine first worked on the request, if it tells."""
    ended_s: float = 0.0
    life: Spent = Spent()
    tail: Spent = Spent()
    """From complete_s to ended_s."""


class Started(Message, tag="started", frozen=True):
    """First step on a request at this stage."""

    request_id: str
    epoch: int
    stage: str


class Output(Message, tag="output", frozen=True):
    """A payload for the client. `reply` as in Piece."""

    request_id: str
    epoch: int
    stage: str
    sequence: int
    ref: Ref
    reply: str = ""


class Ended(Message, tag="ended", frozen=True):
    """A stage is through with a request. `error` is OmniError fields; else `reason` is stop or length."""

    request_id: str
    epoch: int
    stage: str
    reason: str
    usage: dict[str, float]
    error: dict[str, Any] | None = None
    trace: StageTrace | None = None


class Aborted(Message, tag="aborted", frozen=True):
    """Answer to Abort: this stage emits nothing more of the request."""

    request_id: str
    epoch: int
    stage: str
    index: int
    trace: StageTrace | None = None


class StageStats(msgspec.Struct, frozen=True):
    """Counters of one replica since its start, and what it does now."""

    stage: str
    index: int
    queued: int
    running: int
    steps: int
    step_age_s: float
    """Seconds the step in progress has taken; 0 between steps."""
    submitted: int
    dropped_pieces: int
    edge_bytes: dict[str, int]
    counters: dict[str, float]
    kv_blocks_used: int = 0
    """Of an engine with a paged cache: blocks that belong to requests."""


class Beat(Message, tag="beat", frozen=True):
    """Once a second from each worker process."""

    process: str
    generation: int
    resident_bytes: int
    stats: list[StageStats]
    payload_bytes: int = 0
    """Of the payloads that wait for their consumers."""


AnyMessage = (
    Submit
    | Piece
    | Credit
    | Abort
    | Close
    | Drain
    | Progress
    | Ready
    | Broken
    | Started
    | Output
    | Ended
    | Aborted
    | Beat
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_batch_decoder = msgspec.msgpack.Decoder(AnyMessage | list[AnyMessage])


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    """Raises msgspec.MsgspecError on anything that is not one of our messages."""
    try:
        return _decoder.decode(data)
    except RecursionError as exc:
        raise msgspec.DecodeError(str(exc)) from exc


def encode_batch(batch: list[Message]) -> bytes:
    return _encoder.encode(batch[0] if len(batch) == 1 else batch)


def decode_batch(data: bytes | memoryview) -> list[AnyMessage]:
    """What `encode` or `encode_batch` made. Raises as `decode`; of a damaged batch nothing is left."""
    try:
        decoded = _batch_decoder.decode(data)
    except RecursionError as exc:
        raise msgspec.DecodeError(str(exc)) from exc
    return decoded if isinstance(decoded, list) else [decoded]
