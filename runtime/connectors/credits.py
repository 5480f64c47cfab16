"""How many bytes of one edge are on their way: what keeps a slow consumer from filling the host.

Belongs to the stage loop of the producer and to its thread. Knows sizes only: a payload is taken before it is
put, and the same size is given back when the consumer's credit comes or the request is over.
"""

from __future__ import annotations


class EdgeCredits:
    """Credit of one edge. Payloads of size 0 (those that ride in messages) are free and not counted."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.in_flight_bytes = 0
        self.num_in_flight = 0
        self.peak_bytes = 0
        self.num_refused = 0

    def take(self, size_bytes: int) -> bool:
        """Whether a payload may go now. One larger than the whole capacity goes when nothing else is in flight."""
        if not size_bytes:
            return True
        if self.num_in_flight and self.in_flight_bytes + size_bytes > self.capacity_bytes:
            self.num_refused += 1
            return False
        self.num_in_flight += 1
        self.in_flight_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.in_flight_bytes)
        return True

    def give(self, size_bytes: int) -> None:
        if not size_bytes:
            return
        assert 0 < size_bytes <= self.in_flight_bytes, f"{size_bytes} bytes given, {self.in_flight_bytes} in flight"
        self.num_in_flight -= 1
        self.in_flight_bytes -= size_bytes
