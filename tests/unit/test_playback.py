"""Chunk sizes from the player's buffer: small, growing, steady, small again; nothing lost, no needless silence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.programs.media.playback import PlaybackPolicy, Player

FRAME_S = 0.08
POLICY = PlaybackPolicy(FRAME_S)
FIRST, STEADY, MOST = POLICY.first_chunk_frames, POLICY.steady_chunk_frames, POLICY.max_chunk_frames


class Voice:
    """Frames that come at times `arrivals`, made into chunks by the policy. A run takes time, also by frames."""

    def __init__(
        self, arrivals: list[float], run_s: float = 0.0, run_s_per_frame: float = 0.0, *, seeded: bool = False
    ):
        self.player, self.sizes, self.starts = Player(), list[int](), list[float]()
        self._now_s, self.num_silences = arrivals[0], 0
        while sum(self.sizes) < len(arrivals):
            size = self._size(arrivals, seeded)
            if size:
                self.starts.append(self._now_s)
                self.sizes.append(size)
                self._now_s += run_s + run_s_per_frame * size
                self.num_silences += self.player.add(size * FRAME_S, self._now_s)

    def _size(self, arrivals: list[float], seeded: bool) -> int:
        """As a stage does: look, and if there is nothing to do wait for the next frame or for the policy's time."""
        num_sent, num_there = sum(self.sizes), sum(a <= self._now_s for a in arrivals)
        num_ready = num_there - num_sent
        buffered_s = None if seeded else self.player.buffered_s(self._now_s)
        size = POLICY.next_size(num_ready, num_sent, buffered_s, complete=num_there == len(arrivals))
        if not size:
            wait_s = POLICY.wait_s(num_ready, num_sent, buffered_s)
            later = [arrivals[num_there]] + ([self._now_s + wait_s] if wait_s is not None else [])
            self._now_s = min(later)
        return size


def steadily(num_frames: int, real_time_factor: float) -> list[float]:
    return [(number + 1) * FRAME_S * real_time_factor for number in range(num_frames)]


def test_first_small_then_growing_then_steady() -> None:
    sizes = Voice(steadily(400, 0.3)).sizes
    assert sizes[0] == FIRST
    grown = sizes.index(STEADY)
    assert sizes[:grown] == sorted(sizes[:grown])
    assert set(sizes[grown:-1]) == {STEADY}


def test_small_when_the_player_runs_low() -> None:
    """The upstream stands still until the player has nearly nothing left, and is then just in time."""
    arrivals = steadily(100, 0.3)
    rest_s = Voice(arrivals).player.played_out_s
    arrivals += [rest_s - 0.1 + number * FRAME_S for number in range(50)]
    voice = Voice(arrivals)
    late = [size for size, start_s in zip(voice.sizes, voice.starts, strict=True) if start_s > rest_s - 0.1]
    assert STEADY in voice.sizes
    assert late[0] == FIRST


def test_what_is_there_does_not_wait_for_more_while_the_player_runs_out() -> None:
    """Ten frames of a voice that then stands still: they leave before the player has nothing left."""
    start_s = 10 * FRAME_S
    arrivals = [0.0] * 25 + [start_s] * 10 + [1000.0]
    voice = Voice(arrivals)
    last_s = max(s for s in voice.starts if s < 1000)
    assert sum(size for size, s in zip(voice.sizes, voice.starts, strict=True) if s < 1000) >= 25 + 10 - FIRST
    assert last_s < 35 * FRAME_S


def test_a_backlog_goes_at_once() -> None:
    assert POLICY.next_size(30, 30, 0.0, complete=False) == 30
    assert POLICY.next_size(70, 30, 0.0, complete=False) == 8 * FIRST, "little while the player is silent"
    assert POLICY.next_size(170, 30, 3.0, complete=False) == MOST
    assert POLICY.next_size(170, 0, 0.0, complete=True) == FIRST, "but the first sound comes first"


@settings(deadline=None)
@given(
    num_frames=st.integers(1, 300),
    real_time_factor=st.floats(0.01, 0.85),
    run_s=st.floats(0, 0.03),
    run_s_per_frame=st.floats(0, 0.1 * FRAME_S),
)
def test_a_player_is_kept_fed(num_frames: int, real_time_factor: float, run_s: float, run_s_per_frame: float) -> None:
    """By a voice that is made faster than it is played, with a vocoder that takes its time too."""
    voice = Voice(steadily(num_frames, real_time_factor), run_s, run_s_per_frame)
    assert voice.num_silences == 0
    assert sum(voice.sizes) == num_frames


@settings(deadline=None)
@given(gaps=st.lists(st.floats(0, 2), min_size=1, max_size=120), run_s=st.floats(0, 0.5), seeded=st.booleans())
def test_every_frame_goes_once(gaps: list[float], run_s: float, seeded: bool) -> None:
    arrivals = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    voice = Voice(arrivals, run_s, seeded=seeded)
    assert sum(voice.sizes) == len(gaps)
    assert all(0 < size <= MOST for size in voice.sizes)


@settings(deadline=None)
@given(gaps=st.lists(st.floats(0, 2), min_size=1, max_size=120), run_s=st.floats(0, 0.5))
def test_with_a_seed_chunks_do_not_depend_on_time(gaps: list[float], run_s: float) -> None:
    arrivals = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    assert Voice(arrivals, run_s, seeded=True).sizes == Voice([0.0] * len(gaps), seeded=True).sizes


def test_the_ramp_of_a_request_with_a_seed() -> None:
    assert Voice([0.0] * 130, seeded=True).sizes == [4, 4, 8, 16, 25, 25, 25, 23]


def test_a_player_tells_of_its_silences() -> None:
    player = Player()
    assert player.buffered_s(5.0) == 0.0
    assert not player.add(1.0, 10.0)
    assert player.buffered_s(10.25) == 0.75
    assert not player.add(1.0, 10.5)
    assert player.buffered_s(10.5) == 1.5
    assert player.add(1.0, 13.0)
    assert player.buffered_s(13.0) == 1.0


@pytest.mark.parametrize("sizes", [(0, 25, 100), (26, 25, 100), (4, 25, 24)])
def test_sizes_out_of_order_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=f"first_chunk_frames {sizes[0]}, steady_chunk_frames {sizes[1]}"):
        PlaybackPolicy(FRAME_S, *sizes)
