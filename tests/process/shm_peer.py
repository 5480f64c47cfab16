"""A real process with a shared-memory connector that does what the test tells it: one call, one answer.

`python -m tests.process.shm_peer FOLDER CAPACITY SEGMENT IDLE_S` is the process; `Peer` is the test's end of it.
Frames on stdin and stdout: 4 bytes little-endian length, then msgpack.
"""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec
import numpy as np

from runtime.connectors.arena import ShmSettings
from runtime.connectors.shm import ShmConnector
from runtime.errors import OmniError, from_fields
from runtime.messages import Ref
from runtime.payload import Payload

KIB, MIB = 1 << 10, 1 << 20
ANSWER_TIMEOUT_S = 30.0


class Answer(msgspec.Struct):
    value: Any = None
    error: dict[str, Any] | None = None
    num_waits: int = 0
    """Times that the command gave up the processor by itself: sleeps and waits."""


def make_payload(size_bytes: int, *, request_id: str = "r", fill: int = 1, sequence: int = 0) -> Payload:
    return Payload(
        "latents",
        request_id,
        edge="a->b",
        sequence=sequence,
        meta={"fill": fill},
        tensors={"data": np.full(size_bytes, fill, np.uint8)},
    )


def fields(ref: Ref) -> list[Any]:
    """A ref as it travels to the peer."""
    return msgspec.to_builtins(ref)  # type: ignore[no-any-return]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def size_bytes(folder: Path) -> int:
    return sum(entry.stat(follow_symlinks=False).st_size for entry in os.scandir(folder))


class _Commands:
    def __init__(self, connector: ShmConnector) -> None:
        self.connector = connector
        self.held: list[Payload] = []

    def put(self, size_bytes: int, request_id: str = "r", fill: int = 1) -> Ref:
        return self.connector.put(make_payload(size_bytes, request_id=request_id, fill=fill))

    def get(self, ref: list[Any]) -> dict[str, Any]:
        """Read every byte, so that memory that is not there would kill this process."""
        payload = self.connector.get(msgspec.convert(ref, Ref))
        self.held.append(payload)
        data = payload.tensors["data"]
        return {"size": data.size, "min": int(data.min()), "max": int(data.max()), "fill": payload.meta["fill"]}

    def reread(self) -> list[int]:
        """The first byte of everything got so far."""
        return [int(payload.tensors["data"][0]) for payload in self.held]

    def forget(self) -> None:
        self.held.clear()

    def reclaim(self, ref: list[Any]) -> bool:
        return self.connector.reclaim(msgspec.convert(ref, Ref))

    def cleanup(self, request_id: str) -> None:
        self.connector.cleanup(request_id)

    def trim(self) -> None:
        self.connector.trim()

    def health(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.connector.health())

    def close(self) -> None:
        self.connector.close()

    def limit_file_size(self, size_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


def voluntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def _read_frame(stream: BinaryIO) -> bytes | None:
    length = stream.read(4)
    return stream.read(int.from_bytes(length, "little")) if len(length) == 4 else None


def _write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(len(data).to_bytes(4, "little") + data)
    stream.flush()


def main(arguments: list[str]) -> None:
    folder, capacity, segment, idle_s = arguments
    commands = _Commands(ShmConnector(ShmSettings(Path(folder), int(capacity), int(segment), float(idle_s))))
    while (frame := _read_frame(sys.stdin.buffer)) is not None:
        name, options = msgspec.msgpack.decode(frame)
        waits_before = voluntary_switches()
        try:
            answer = Answer(getattr(commands, name)(**options))
        except OmniError as exc:
            answer = Answer(error=exc.to_fields())
        answer.num_waits = voluntary_switches() - waits_before
        _write_frame(sys.stdout.buffer, msgspec.msgpack.encode(answer))


class Peer:
    """Starts the process and talks to it. Raises the process's own errors; fails when it dies or does not answer."""

    def __init__(
        self, folder: Path, *, capacity_bytes: int = 64 * MIB, segment_bytes: int = MIB, idle_s: float = 60.0
    ) -> None:
        settings = [str(folder), str(capacity_bytes), str(segment_bytes), str(idle_s)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.process.shm_peer", *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self.num_waits = 0
        """What the last call took, over there."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def call(self, name: str, **options: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        data = msgspec.msgpack.encode((name, options))
        self.process.stdin.write(len(data).to_bytes(4, "little") + data)
        answer = msgspec.msgpack.decode(self._read(self._read_length()), type=Answer)
        self.num_waits = answer.num_waits
        if answer.error is not None:
            raise from_fields(answer.error)
        return answer.value

    def put(self, size_bytes: int, **options: Any) -> Ref:
        return msgspec.convert(self.call("put", size_bytes=size_bytes, **options), Ref)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(ANSWER_TIMEOUT_S)

    def _read_length(self) -> int:
        return int.from_bytes(self._read(4), "little")

    def _read(self, size_bytes: int) -> bytes:
        assert self.process.stdout is not None
        data, deadline_s = b"", time.monotonic() + ANSWER_TIMEOUT_S
        while len(data) < size_bytes:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise TimeoutError(f"process {self.pid} did not answer within {ANSWER_TIMEOUT_S} s")
            chunk = self.process.stdout.read(size_bytes - len(data))
            if not chunk:
                raise EOFError(f"process {self.pid} ended with {self.process.wait(ANSWER_TIMEOUT_S)}")
            data += chunk
        return data

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait(ANSWER_TIMEOUT_S)
        self.process.stdin.close()
        self.process.stdout.close()


if __name__ == "__main__":
    main(sys.argv[1:])
