"""What arrives out of its time: pieces before their Submit, anything after its request's end. Both bounded."""

from __future__ import annotations

import time
from collections import OrderedDict

from runtime.messages import Piece


class Parking:
    """Pieces of requests that this replica has not been told of yet, oldest request first."""

    def __init__(self, *, max_pieces: int = 4096, timeout_s: float = 60.0) -> None:
        self._max_pieces, self._timeout_s = max_pieces, timeout_s
        self._pieces: OrderedDict[str, tuple[float, list[Piece]]] = OrderedDict()
        self._count = 0

    def put(self, piece: Piece) -> list[Piece]:
        """Keep a piece; returns those that had to give way (of the oldest requests)."""
        since_s, pieces = self._pieces.get(piece.request_id, (time.monotonic(), []))
        pieces.append(piece)
        self._pieces[piece.request_id] = (since_s, pieces)
        self._count += 1
        evicted: list[Piece] = []
        while self._count > self._max_pieces:
            evicted += self.take(next(iter(self._pieces)))
        return evicted

    def take(self, request_id: str) -> list[Piece]:
        """The pieces of a request, in order of arrival; they are not kept any longer."""
        _, pieces = self._pieces.pop(request_id, (0.0, []))
        self._count -= len(pieces)
        return pieces

    def expired(self) -> list[Piece]:
        """Pieces whose Submit has not come in time."""
        limit_s = time.monotonic() - self._timeout_s
        late: list[Piece] = []
        while self._pieces:
            request_id, (since_s, _) = next(iter(self._pieces.items()))
            if since_s > limit_s:
                break
            late += self.take(request_id)
        return late

    def next_expiry_s(self) -> float | None:
        """Seconds until `expired` may have something; None when nothing is parked."""
        if not self._pieces:
            return None
        since_s, _ = next(iter(self._pieces.values()))
        return max(0.001, since_s + self._timeout_s - time.monotonic())


class EndedRequests:
    """The newest `limit` requests that are over, with the epoch up to which they are.

    An abort that overtakes its Submit is remembered here as well, so that the request never starts.
    """

    def __init__(self, limit: int = 16_384) -> None:
        self._limit = limit
        self._epochs: OrderedDict[str, int] = OrderedDict()

    def add(self, request_id: str, epoch: int) -> None:
        self._epochs[request_id] = max(epoch, self._epochs.pop(request_id, epoch))
        while len(self._epochs) > self._limit:
            self._epochs.popitem(last=False)

    def covers(self, request_id: str, epoch: int) -> bool:
        return self._epochs.get(request_id, -1) >= epoch

    def __len__(self) -> int:
        return len(self._epochs)
