"""How long a payload takes from `put` in one process to `get` in another.

`python -m tests.bench.shm [--write]`: the shm connector beside a plain memcpy of the same bytes and beside
`multiprocessing.shared_memory` with one segment a message. All ways take turns within one run, with the same
payloads, the same packing and the same messages, so that the ratios hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import numpy as np
import zmq

from runtime.connectors.arena import ShmSettings
from runtime.connectors.shm import ShmConnector
from runtime.messages import Ref
from runtime.payload import Payload, pack, unpack
from runtime.settings import shm_dir
from tests.bench.report import write_report

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = {4 * KIB: 1000, MIB: 500, 64 * MIB: 60}
NUM_WARMUP_ROUNDS = 5
WAIT_S = 60.0

MEMCPY, MESSAGE, POOL, ONE_SEGMENT = "memcpy", "message alone", "shm connector", "one segment a message"

EXPLANATION = f"""\
*{MEMCPY}* copies the bytes within one process into memory that is warm. *{MESSAGE}* sends a message without a
payload to the other process: the floor of every hand-over. *{POOL}* is ours; payloads of 4 KiB ride in the
message. *{ONE_SEGMENT}* makes a `multiprocessing.shared_memory` segment for each payload.
*put to get*: from the start of the put to the moment at which the consumer has the tensors. *put to read*: until it
has read every byte of them. *cycle*: until the producer has the answer and the memory is free again. All times are
in microseconds; the ratios compare medians of put to get."""
COLUMNS = (
    *("payload", "way", "put to get, median", "p95", "x memcpy", "x one segment"),
    *("put to read, median", "p95", "cycle, median"),
)


class Sent(msgspec.Struct, array_like=True):
    """Message to the consumer. How to get the payload: by a ref, by a segment's name, or there is none."""

    ref: Ref | None = None
    segment: str = ""
    size_bytes: int = 0


class Received(msgspec.Struct, array_like=True):
    """Answer: when the payload was there, when all of it had been read, and the sum of its words."""

    got_ns: int
    read_ns: int
    total: int


@dataclass
class Times:
    """Of one way at one size: an entry a round, in ns from the start of the put."""

    got: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    cycle: list[int] = field(default_factory=list)


@dataclass
class Pipe:
    """Messages to the other process and back. Waits are bounded."""

    receive: zmq.Socket[bytes]
    send: zmq.Socket[bytes]


@contextlib.contextmanager
def open_pipe(folder: str, *, inbox: str, outbox: str) -> Iterator[Pipe]:
    context = zmq.Context()
    pipe = Pipe(context.socket(zmq.PULL), context.socket(zmq.PUSH))
    pipe.receive.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    pipe.receive.bind(f"ipc://{folder}/{inbox}")
    pipe.send.connect(f"ipc://{folder}/{outbox}")
    try:
        yield pipe
    finally:
        context.destroy(linger=0)


# ---- the consumer's process ------------------------------------------------------------------------------


def consume(folder: str, shm_folder: str) -> None:
    """Answer each message until an empty one comes."""
    connector = ShmConnector(ShmSettings(Path(shm_folder)))
    decoder = msgspec.msgpack.Decoder(Sent)
    with open_pipe(folder, inbox="consumer", outbox="producer") as pipe:
        while data := pipe.receive.recv():
            pipe.send.send(msgspec.msgpack.encode(take(decoder.decode(data), connector)))
    connector.close()


def take(sent: Sent, connector: ShmConnector) -> Received:
    if sent.ref is not None:
        payload = connector.get(sent.ref)
        return read(payload, time.perf_counter_ns())
    if not sent.segment:
        now_ns = time.perf_counter_ns()
        return Received(now_ns, now_ns, 0)
    segment = SharedMemory(name=sent.segment)
    payload = unpack(segment.buf[: sent.size_bytes])
    received = read(payload, time.perf_counter_ns())
    del payload  # its views keep the segment from being closed
    segment.close()
    return received


def read(payload: Payload, got_ns: int) -> Received:
    total = int(payload.tensors["data"].sum())
    return Received(got_ns, time.perf_counter_ns(), total)


# ---- the producer's process ------------------------------------------------------------------------------


class Ways:
    """One payload, sent in each of the ways. Its words are all ones, so their sum is their number."""

    def __init__(self, pipe: Pipe, connector: ShmConnector, size_bytes: int) -> None:
        self._pipe, self._connector = pipe, connector
        self._data = np.ones(size_bytes // 8, np.uint64)
        self._copy = np.zeros_like(self._data)
        self._payload = Payload("latents", "request-1", edge="a->b", tensors={"data": self._data})

    def memcpy(self) -> Received:
        np.copyto(self._copy, self._data)
        now_ns = time.perf_counter_ns()
        return Received(now_ns, now_ns, 0)

    def message(self) -> Received:
        return self._exchange(Sent(), 0)

    def pool(self) -> Received:
        ref = self._connector.put(self._payload)
        received = self._exchange(Sent(ref), self._data.size)
        self._connector.reclaim(ref)
        return received

    def one_segment(self) -> Received:
        packed = pack(self._payload)
        segment = SharedMemory(create=True, size=packed.size_bytes)
        packed.write_into(segment.buf[: packed.size_bytes])
        received = self._exchange(Sent(segment=segment.name, size_bytes=packed.size_bytes), self._data.size)
        segment.close()
        segment.unlink()
        return received

    def all(self) -> dict[str, Callable[[], Received]]:
        return {MEMCPY: self.memcpy, MESSAGE: self.message, POOL: self.pool, ONE_SEGMENT: self.one_segment}

    def _exchange(self, sent: Sent, expected_total: int) -> Received:
        self._pipe.send.send(msgspec.msgpack.encode(sent))
        received = msgspec.msgpack.decode(self._pipe.receive.recv(), type=Received)
        if received.total != expected_total:
            raise RuntimeError(f"the consumer read a sum of {received.total}; expected {expected_total}")
        return received


def measure(ways: dict[str, Callable[[], Received]], num_rounds: int) -> dict[str, Times]:
    """Every way once a round, so that all of them meet the same state of the machine."""
    times = {name: Times() for name in ways}
    for i in range(-NUM_WARMUP_ROUNDS, num_rounds):
        for name, way in ways.items():
            started_ns = time.perf_counter_ns()
            received = way()
            ended_ns = time.perf_counter_ns()
            if i >= 0:
                times[name].got.append(received.got_ns - started_ns)
                times[name].read.append(received.read_ns - started_ns)
                times[name].cycle.append(ended_ns - started_ns)
    return times


def run(shm_folder: Path) -> dict[int, dict[str, Times]]:
    connector = ShmConnector(ShmSettings(shm_folder))
    with tempfile.TemporaryDirectory() as folder, open_pipe(folder, inbox="producer", outbox="consumer") as pipe:
        # spawned by multiprocessing, so that both processes share one resource tracker
        consumer = multiprocessing.get_context("spawn").Process(target=consume, args=(folder, str(shm_folder)))
        consumer.start()
        try:
            results = {size: measure(Ways(pipe, connector, size).all(), n) for size, n in ROUNDS.items()}
            pipe.send.send(b"")
            consumer.join(WAIT_S)
        finally:
            consumer.kill()
            connector.close()
    return results


# ---- the report --------------------------------------------------------------------------------------------


def microseconds(times_ns: list[int], percentile: float) -> float:
    return float(np.percentile(times_ns, percentile)) / 1000


def size_label(size_bytes: int) -> str:
    return f"{size_bytes // KIB} KiB" if size_bytes < MIB else f"{size_bytes // MIB} MiB"


def rows(results: dict[int, dict[str, Times]]) -> list[list[str]]:
    lines = []
    for size_bytes, ways in results.items():
        floor, other = (microseconds(ways[name].got, 50) for name in (MEMCPY, ONE_SEGMENT))
        for name, times in ways.items():
            got = microseconds(times.got, 50)
            figures = [got, microseconds(times.got, 95), got / floor, got / other]
            figures += [microseconds(times.read, 50), microseconds(times.read, 95), microseconds(times.cycle, 50)]
            digits = [1, 1, 2, 2, 1, 1, 1]
            cells = [f"{figure:.{n}f}" for figure, n in zip(figures, digits, strict=True)]
            lines.append([size_label(size_bytes), name, *cells])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.shm", description=__doc__)
    parser.add_argument("--write", action="store_true", help="also write docs/measurements/shm.md")
    options = parser.parse_args()
    results = run(shm_dir())
    rounds = ", ".join(f"{n} of {size_label(size)}" for size, n in ROUNDS.items())
    write_report(
        "shm",
        title="The shm connector: put to get between two processes",
        command="make bench-shm ARGS=--write",
        about=EXPLANATION,
        columns=COLUMNS,
        rows=rows(results),
        write=options.write,
        notes=f"Rounds: {rounds}, each way once a round. Linux {platform.release()}, numpy {np.__version__}; "
        f"load average at the end {os.getloadavg()[0]:.1f}.",
    )


if __name__ == "__main__":
    main()
