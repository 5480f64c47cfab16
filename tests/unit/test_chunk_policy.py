"""Chunk sizes: bounds that do not depend on arrival, a fed player at any real-time factor up to the promised one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.programs.sidekick.chunk_policy import Chunk, ChunkPolicy

POLICY = ChunkPolicy()
FRAME_S = 0.0125


def chunks_of(segments: list[int], policy: ChunkPolicy = POLICY) -> list[Chunk]:
    """All chunks of complete segments of the given lengths."""
    chunks, first, sent = [], 0, 0
    for num_frames in segments:
        start = 0
        while chunk := policy.next_chunk(policy.size(first, sent), start, num_frames, complete=True):
            chunks.append(chunk)
            first, sent, start = first or chunk.num_frames, sent + chunk.num_frames, chunk.stop
    return chunks


def test_ramp_from_first_to_steady() -> None:
    sizes = [chunk.num_frames for chunk in chunks_of([2000])]
    assert sizes[0] == POLICY.first_chunk_frames
    assert sizes[:-1] == sorted(sizes[:-1])
    assert sizes[-2] == POLICY.steady_chunk_frames


@settings(deadline=None)
@given(segments=st.lists(st.integers(1, 700), max_size=12))
def test_chunks_cover_each_segment_once_with_context(segments: list[int]) -> None:
    remaining = iter(chunks_of(segments))
    for num_frames in segments:
        position = 0
        while position < num_frames:
            chunk = next(remaining)
            assert chunk.start == position
            assert chunk.context_start == max(0, chunk.start - POLICY.context_frames)
            assert chunk.context_stop == min(num_frames, chunk.stop + POLICY.context_frames)
            position = chunk.stop
        assert position == num_frames
    assert next(remaining, None) is None


@settings(deadline=None)
@given(num_frames=st.integers(1, 600), arrivals=st.lists(st.integers(1, 80), max_size=40))
def test_chunks_are_the_same_however_the_frames_arrive(num_frames: int, arrivals: list[int]) -> None:
    chunks, first, sent, available = [], 0, 0, 0
    for arrived in [*arrivals, num_frames]:
        available = min(num_frames, available + arrived)
        complete = available == num_frames
        while chunk := POLICY.next_chunk(POLICY.size(first, sent), sent, available, complete=complete):
            chunks.append(chunk)
            first, sent = first or chunk.num_frames, sent + chunk.num_frames
    assert chunks == chunks_of([num_frames])


@pytest.mark.parametrize("available", [31, 32, 58])
def test_waits_for_its_right_context(available: int) -> None:
    assert POLICY.next_chunk(32, 0, available, complete=False) is None
    assert POLICY.next_chunk(32, 0, 59, complete=False) == Chunk(0, 32, 0, 59)


def lowest_buffer_s(segments: list[int], rtf: float, policy: ChunkPolicy = POLICY) -> float:
    """What a player has left, at worst, when a chunk comes; it starts with the first. Time is simulated."""
    lowest_s, now_s, started_s, sent_s = float("inf"), 0.0, 0.0, 0.0
    for number, chunk in enumerate(chunks_of(segments, policy)):
        now_s += rtf * chunk.num_frames * FRAME_S
        if number == 0:
            started_s, sent_s = now_s, -policy.held_back_frames * FRAME_S
        else:
            lowest_s = min(lowest_s, sent_s - (now_s - started_s))
        sent_s += chunk.num_frames * FRAME_S
    return lowest_s


@settings(deadline=None)
@given(
    segments=st.lists(st.integers(POLICY.first_chunk_frames, 1500), min_size=1, max_size=10), rtf=st.floats(0.01, 0.8)
)
def test_the_player_never_runs_dry(segments: list[int], rtf: float) -> None:
    assert lowest_buffer_s(segments, rtf) >= -1e-9


def test_small_first_and_large_second_chunk_would_run_dry() -> None:
    """The simulation can see the fault: without a ramp the second chunk comes too late."""
    assert lowest_buffer_s([1000], 0.8, ChunkPolicy(first_chunk_frames=32, steady_chunk_frames=120, worst_rtf=0.2)) < 0


def test_sound_streams_while_frames_are_still_made() -> None:
    """Frames come one each 20 ms, the last of 500 after 10 s: the first sound is there long before, then it flows."""
    arrivals_s, first, sent = [], 0, 0
    for available in range(1, 501):
        while chunk := POLICY.next_chunk(POLICY.size(first, sent), sent, available, complete=available == 500):
            arrivals_s.append(available * 0.02)
            first, sent = first or chunk.num_frames, sent + chunk.num_frames
    assert arrivals_s[0] < 1.2
    assert len(set(arrivals_s)) >= 6
    assert max(b - a for a, b in zip(arrivals_s, arrivals_s[1:], strict=False)) < 3.0


@pytest.mark.parametrize(
    "settings",
    [
        {"first_chunk_frames": 4},
        {"first_chunk_frames": 130},
        {"first_chunk_frames": 12},
        {"first_chunk_frames": 32, "worst_rtf": 0.95},
    ],
)
def test_settings_that_cannot_hold_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="first_chunk_frames"):
        ChunkPolicy(**settings)  # type: ignore[arg-type]


def test_context_smaller_than_the_reach_is_refused() -> None:
    POLICY.require_context(27)
    with pytest.raises(ConfigError, match="context_frames 8 is smaller than the network's reach of 27"):
        ChunkPolicy(context_frames=8).require_context(27)
