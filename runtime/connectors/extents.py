"""Which bytes of a segment are free: first fit over aligned extents, neighbours joined when they come back.

Pure bookkeeping, no memory behind it. Used by the arena, under the connector's lock.
"""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 64


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


class Extents:
    """Free space between two offsets. Sizes are rounded up to the alignment on both ways."""

    def __init__(self, start: int, end: int) -> None:
        self._offsets = [start]
        """Of the free extents, ascending; `_sizes` beside it."""
        self._sizes = [end - start]
        self.capacity_bytes = end - start
        self.free_bytes = end - start

    @property
    def is_unused(self) -> bool:
        return self.free_bytes == self.capacity_bytes

    @property
    def largest_bytes(self) -> int:
        return max(self._sizes, default=0)

    def take(self, size_bytes: int) -> int | None:
        """Offset of an extent of that size; None when no free extent is large enough."""
        size = aligned(size_bytes)
        for i, free in enumerate(self._sizes):
            if free >= size:
                offset = self._offsets[i]
                if free == size:
                    del self._offsets[i], self._sizes[i]
                else:
                    self._offsets[i] += size
                    self._sizes[i] -= size
                self.free_bytes -= size
                return offset
        return None

    def give(self, offset: int, size_bytes: int) -> None:
        """Return an extent exactly as it was taken."""
        size = aligned(size_bytes)
        i = bisect_left(self._offsets, offset)
        self._offsets.insert(i, offset)
        self._sizes.insert(i, size)
        self.free_bytes += size
        self._join_with_next(i)
        if i:
            self._join_with_next(i - 1)

    def _join_with_next(self, i: int) -> None:
        if i + 1 < len(self._offsets) and self._offsets[i] + self._sizes[i] == self._offsets[i + 1]:
            self._sizes[i] += self._sizes[i + 1]
            del self._offsets[i + 1], self._sizes[i + 1]
