"""Credit of an edge: what may be on its way at once."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.connectors.credits import EdgeCredits


def test_credits_hold_back_what_does_not_fit() -> None:
    credits = EdgeCredits(100)
    assert credits.take(60)
    assert credits.take(40)
    assert not credits.take(1)
    credits.give(60)
    assert credits.take(60)
    assert (credits.in_flight_bytes, credits.num_in_flight, credits.peak_bytes, credits.num_refused) == (100, 2, 100, 1)


def test_a_payload_larger_than_the_edge_goes_alone() -> None:
    credits = EdgeCredits(100)
    assert credits.take(500)
    assert not credits.take(1)
    credits.give(500)
    assert credits.take(1)
    assert not credits.take(500)


def test_payloads_in_messages_need_no_credit() -> None:
    credits = EdgeCredits(100)
    assert credits.take(500)
    assert credits.take(0)
    credits.give(0)
    assert (credits.num_in_flight, credits.in_flight_bytes) == (1, 500)


@given(st.integers(1, 200), st.lists(st.integers(0, 300)), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_bytes_in_flight_never_pass_the_capacity(capacity: int, sizes: list[int], chance: random.Random) -> None:
    credits, flying = EdgeCredits(capacity), []
    for size in sizes:
        while not credits.take(size):
            assert flying
            credits.give(flying.pop(chance.randrange(len(flying))))
        flying.append(size)
        assert credits.in_flight_bytes == sum(flying)
        assert credits.in_flight_bytes <= capacity or credits.num_in_flight == 1
    for size in flying:
        credits.give(size)
    assert (credits.in_flight_bytes, credits.num_in_flight) == (0, 0)
