"""Which frames a vocoder decodes next. Pure: knows frame counts, not frames, networks or clocks.

Chunk bounds follow from the input alone, never from when it came: a network whose output depends a little on what
else is in its input (dynamic int8 scales) then gives a request the same samples every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Frames [start, stop) of a segment are wanted; the network sees [context_start, context_stop)."""

    start: int
    stop: int
    context_start: int
    context_stop: int

    @property
    def num_frames(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ChunkPolicy:
    """A small first chunk for early sound, then a ramp to large ones, which waste less on context.

    The ramp never outruns the player: if making sound takes `worst_rtf` of its duration or less, each chunk is there
    before what was sent earlier has been played. `held_back_frames` is what the signal processing keeps to itself
    until the next chunk comes.
    """

    first_chunk_frames: int = 32
    steady_chunk_frames: int = 120
    context_frames: int = 27
    worst_rtf: float = 0.8
    held_back_frames: int = 4

    def __post_init__(self) -> None:
        first, steady = self.first_chunk_frames, self.steady_chunk_frames
        if not self.held_back_frames < first <= steady:
            raise ConfigError(
                f"first_chunk_frames {first}, steady_chunk_frames {steady}: expected"
                f" {self.held_back_frames} < first_chunk_frames <= steady_chunk_frames"
            )
        if self._affordable(first, first) < first:
            raise ConfigError(
                f"first_chunk_frames {first} is too small to keep a player fed at a real-time factor of"
                f" {self.worst_rtf}",
                hint=f"only {self._affordable(first, first)} frames could follow in time; make the first chunk larger",
            )

    def require_context(self, reach_frames: int) -> None:
        """ConfigError when the context is smaller than how far the network looks to either side."""
        if self.context_frames < reach_frames:
            raise ConfigError(
                f"context_frames {self.context_frames} is smaller than the network's reach of {reach_frames} frames",
                hint=f"set context_frames to {reach_frames} or more",
            )

    def size(self, first: int, sent: int) -> int:
        """Frames of the next chunk of a request whose first chunk had `first` and all so far `sent`."""
        if sent == 0:
            return self.first_chunk_frames
        return max(self.first_chunk_frames, min(self.steady_chunk_frames, self._affordable(first, sent)))

    def _affordable(self, first: int, sent: int) -> int:
        """Frames that can be made before the player, who began when the first chunk was sent, has none left."""
        return int((sent - self.held_back_frames) / self.worst_rtf) - (sent - first)

    def next_chunk(self, size: int, start: int, available: int, *, complete: bool) -> Chunk | None:
        """The chunk of `size` at frame `start` of a segment of which `available` frames are there.

        None when it has to wait for more frames. The last chunk of a complete segment is what is left of it.
        """
        stop = start + size
        if complete:
            stop = min(stop, available)
            if start >= stop:
                return None
        elif available < stop + self.context_frames:
            return None
        return Chunk(start, stop, max(0, start - self.context_frames), min(available, stop + self.context_frames))
