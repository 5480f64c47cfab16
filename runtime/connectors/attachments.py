"""Segments of other processes that this process reads: each mapped once, and let go when its owner gave it back."""

from __future__ import annotations

import threading
from pathlib import Path

from runtime.connectors.segment import AttachedSegment


class Attachments:
    """By name. Thread-safe. Letting go is always safe: views keep the mapping that they look into."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._segments: dict[str, AttachedSegment] = {}

    @property
    def attached_bytes(self) -> int:
        with self._lock:
            return sum(s.size_bytes for s in self._segments.values())

    def find(self, name: str) -> AttachedSegment:
        """ConnectorError when there is no such segment or it is damaged."""
        with self._lock:
            if (segment := self._segments.get(name)) is None:
                # a new segment often takes the place of one that was dropped
                self._drop_left()
                segment = self._segments[name] = AttachedSegment(self._folder, name)
            return segment

    def trim(self) -> None:
        with self._lock:
            self._drop_left()

    def close(self) -> None:
        with self._lock:
            self._segments.clear()

    def _drop_left(self) -> None:
        for name in [name for name, segment in self._segments.items() if segment.is_dropped]:
            del self._segments[name]
