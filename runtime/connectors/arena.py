"""The arena: the shared memory that one producer process holds, as segments that come and go with the load.

Finds room for payloads of any size; does not know requests, refs or consumers. Thread-safe; used by the shm
connector only.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from runtime.connectors.extents import aligned
from runtime.connectors.segment import HEADER_BYTES, OwnedSegment
from runtime.errors import ConfigError, ConnectorError
from runtime.payload import Packed
from runtime.sweep import new_arena_name


@dataclass(frozen=True, slots=True)
class ShmSettings:
    """What bounds the shared memory of one process. ConfigError for values that cannot work."""

    folder: Path
    capacity_bytes: int = 1 << 30
    """Most that all segments together may take. Memory is taken when it is needed."""
    segment_bytes: int = 8 << 20
    """Segments are multiples of this, as far as the capacity allows."""
    idle_s: float = 10.0
    """A segment that has been unused for so long is given back; one small one stays."""

    def __post_init__(self) -> None:
        if not 4096 <= self.segment_bytes <= self.capacity_bytes:
            raise ConfigError(
                f"shared memory: segment_bytes is {self.segment_bytes} and capacity_bytes {self.capacity_bytes}; "
                "expected 4096 <= segment_bytes <= capacity_bytes"
            )
        if self.idle_s < 0:
            raise ConfigError(f"shared memory: idle_s is {self.idle_s}; expected 0 or more")


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one payload, with the header in front of it."""

    segment: OwnedSegment
    offset: int
    size_bytes: int

    def write(self, token: int, packed: Packed) -> None:
        self.segment.write(self.offset, token, packed)


class Arena:
    def __init__(self, settings: ShmSettings) -> None:
        self._settings = settings
        self._name = new_arena_name()
        self._num_created = 0
        self._segments: list[OwnedSegment] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._growth = threading.Lock()
        """Held while a segment is made, which takes a while; other threads find room and free it meanwhile."""

    @property
    def reserved_bytes(self) -> int:
        with self._lock:
            return self._reserved_bytes()

    @property
    def used_bytes(self) -> int:
        """With headers and alignment."""
        with self._lock:
            return sum(s.extents.capacity_bytes - s.extents.free_bytes for s in self._segments)

    def allocate(self, size_bytes: int) -> Slot:
        """Room for a packed payload. ConnectorError, with the bytes needed and free, when there is none."""
        with self._lock:
            slot = self._place(size_bytes)
        if slot is not None:
            return slot
        with self._growth:
            with self._lock:
                slot = self._place(size_bytes)
                if slot is not None:
                    return slot
                new_bytes, least_bytes = self._sizes_for(size_bytes)
            segment = self._create(new_bytes, least_bytes)
            with self._lock:
                return self._add(segment, size_bytes)

    def free(self, slot: Slot) -> None:
        with self._lock:
            slot.segment.erase(slot.offset)
            slot.segment.extents.give(slot.offset, HEADER_BYTES + slot.size_bytes)
            if slot.segment.extents.is_unused:
                slot.segment.unused_since_s = time.monotonic()
                self._drop_idle()

    def trim(self) -> None:
        """Give back segments that have been idle for long enough."""
        with self._lock:
            self._drop_idle()

    def close(self) -> None:
        """Remove all files. Payloads in them are lost to consumers that have not mapped them yet."""
        with self._lock:
            self._is_closed = True
            self._drop(self._segments)

    # ---- below: under the lock, but for _create -------------------------------------------------------

    def _reserved_bytes(self) -> int:
        return sum(s.size_bytes for s in self._segments)

    def _place(self, size_bytes: int) -> Slot | None:
        """The oldest segments fill first, so that younger ones become idle."""
        if self._is_closed:
            raise ConnectorError("connector shm is closed; expected no put after it")
        for segment in self._segments:
            offset = segment.extents.take(HEADER_BYTES + size_bytes)
            if offset is not None:
                return Slot(segment, offset, size_bytes)
        return None

    def _sizes_for(self, size_bytes: int) -> tuple[int, int]:
        """Sizes of a new segment that holds a payload: the wanted one, and the least one."""
        step, capacity = self._settings.segment_bytes, self._settings.capacity_bytes
        least_bytes = 2 * HEADER_BYTES + aligned(size_bytes)
        if self._reserved_bytes() + least_bytes > capacity:
            self._drop([s for s in self._segments if s.extents.is_unused])
        room_bytes = capacity - self._reserved_bytes()
        if least_bytes > room_bytes:
            raise self._full(least_bytes, room_bytes)
        return min(room_bytes, -(-least_bytes // step) * step), least_bytes

    def _full(self, least_bytes: int, room_bytes: int) -> ConnectorError:
        free_bytes = room_bytes + sum(s.extents.free_bytes for s in self._segments)
        largest_bytes = max([room_bytes, *(s.extents.largest_bytes for s in self._segments)])
        return ConnectorError(
            f"shared memory of this process is full: {least_bytes} bytes are needed in one piece, {free_bytes} of "
            f"{self._settings.capacity_bytes} are free, the largest piece has {largest_bytes}",
            hint="send smaller chunks, or lower the capacity_bytes of the edges so that their payloads fit together",
        )

    def _create(self, new_bytes: int, least_bytes: int) -> OwnedSegment:
        try:
            return self._new_segment(new_bytes)
        except ConnectorError:
            with self._lock:
                self._drop([s for s in self._segments if s.extents.is_unused])
            return self._new_segment(least_bytes)

    def _new_segment(self, size_bytes: int) -> OwnedSegment:
        self._num_created += 1
        return OwnedSegment(self._settings.folder / f"{self._name}-{self._num_created}", size_bytes)

    def _add(self, segment: OwnedSegment, size_bytes: int) -> Slot:
        self._segments.append(segment)
        if self._is_closed:
            self._drop([segment])
        slot = self._place(size_bytes)
        assert slot is not None, f"a segment made for {size_bytes} bytes does not hold them"
        return slot

    def _drop_idle(self) -> None:
        before_s = time.monotonic() - self._settings.idle_s
        idle = [s for s in self._segments if s.extents.is_unused and s.unused_since_s <= before_s]
        kept = next((s for s in self._segments if s.size_bytes == self._settings.segment_bytes), None)
        self._drop([s for s in idle if s is not kept])

    def _drop(self, segments: list[OwnedSegment]) -> None:
        for segment in list(segments):
            segment.drop()
            self._segments.remove(segment)
