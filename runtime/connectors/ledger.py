"""What was put and not yet reclaimed: found by its ref, and by its request when that is over. Thread-safe."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from runtime.messages import Ref

T = TypeVar("T")
_Key = tuple[str, int]


class Ledger(Generic[T]):
    """One entry a stored payload. Whoever pops an entry, and nobody else, frees what it stands for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[_Key, tuple[str, T]] = {}
        self._requests: dict[str, set[_Key]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request_id: str, ref: Ref, entry: T) -> None:
        key = (ref.arena, ref.token)
        with self._lock:
            self._entries[key] = (request_id, entry)
            self._requests.setdefault(request_id, set()).add(key)

    def find(self, ref: Ref) -> T | None:
        with self._lock:
            found = self._entries.get((ref.arena, ref.token))
        return None if found is None else found[1]

    def pop(self, ref: Ref) -> T | None:
        key = (ref.arena, ref.token)
        with self._lock:
            if (found := self._entries.pop(key, None)) is None:
                return None
            request_id, entry = found
            keys = self._requests[request_id]
            keys.remove(key)
            if not keys:
                del self._requests[request_id]
        return entry

    def pop_request(self, request_id: str) -> list[T]:
        with self._lock:
            return [self._entries.pop(key)[1] for key in self._requests.pop(request_id, ())]

    def pop_all(self) -> list[T]:
        with self._lock:
            entries = [entry for _, entry in self._entries.values()]
            self._entries.clear()
            self._requests.clear()
        return entries
