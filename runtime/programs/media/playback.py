"""How much of a voice is made at a time, from how much of it the player still has. Pure: knows counts of frames and
seconds, no clock, no network and no request. Programs that make sound in chunks use it.

The network's last bit can depend on how its input is cut. So a request that wants the same sound every time is cut by
counts alone (`buffered_s` None); any other one by what its player has.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import ConfigError

MIN_WAIT_S = 0.001
BACKLOG = 8
"""Times as much is made at once of what is there already: it costs no waiting, only the time to make it."""


@dataclass(slots=True)
class Player:
    """A client's player as far as it can be known from here: it starts with the first sound, plays at the speed of
    time, and waits for more when it has none.
    """

    played_out_s: float = 0.0
    """When it will have nothing left, by the caller's clock; 0 before the first sound."""

    def buffered_s(self, now_s: float) -> float:
        return max(0.0, self.played_out_s - now_s)

    def add(self, audio_s: float, now_s: float) -> bool:
        """Sound that leaves now. Returns whether the player had run out: there was a silence."""
        ran_out = 0.0 < self.played_out_s < now_s
        self.played_out_s = max(now_s, self.played_out_s) + audio_s
        return ran_out


@dataclass(frozen=True, slots=True)
class PlaybackPolicy:
    """A small chunk first, for early sound. Then as much as the player has beyond `reserve_s`: frames that come no
    slower than they are played are there before it is through. So chunks grow with the buffer up to the steady size,
    which wastes little on context, and are small again when it runs low. Of what is there already more goes at once,
    up to `max_chunk_frames`.
    """

    frame_s: float
    first_chunk_frames: int = 4
    steady_chunk_frames: int = 25
    max_chunk_frames: int = 100
    reserve_s: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.first_chunk_frames <= self.steady_chunk_frames <= self.max_chunk_frames:
            raise ConfigError(
                f"first_chunk_frames {self.first_chunk_frames}, steady_chunk_frames {self.steady_chunk_frames},"
                f" max_chunk_frames {self.max_chunk_frames}: expected each at least 1, and none smaller than the one"
                " before"
            )

    def next_size(self, num_ready: int, num_sent: int, buffered_s: float | None, *, complete: bool) -> int:
        """Frames to make now of the `num_ready` that are there; 0 to wait for more. complete: no more will come."""
        wanted = self._wanted(num_sent, buffered_s)
        if num_ready < wanted and not complete:
            return 0
        is_cut_by_counts = buffered_s is None or num_sent == 0
        return min(num_ready, wanted if is_cut_by_counts else min(BACKLOG * wanted, self.max_chunk_frames))

    def wait_s(self, num_ready: int, num_sent: int, buffered_s: float | None) -> float | None:
        """For a request that has to wait: when what is there will do, since the player goes on. None: never."""
        if buffered_s is None or num_sent == 0 or num_ready < self.first_chunk_frames:
            return None
        return max(MIN_WAIT_S, buffered_s - self.reserve_s - (num_ready + 1) * self.frame_s)

    def _wanted(self, num_sent: int, buffered_s: float | None) -> int:
        """Frames that are worth a run."""
        if num_sent == 0:
            return self.first_chunk_frames
        grown = num_sent if buffered_s is None else int((buffered_s - self.reserve_s) / self.frame_s)
        return min(max(self.first_chunk_frames, grown), self.steady_chunk_frames)
