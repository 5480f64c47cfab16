"""What tests do with audio that came back: say what it is, and measure it with an independent decoder."""

from __future__ import annotations

import io

import av

RATE_HZ = 24_000
SIM_SAMPLES = 6 * 19_200 // 4
"""Samples of one answer of the simulated speech chain: six pieces (tests/plans.py)."""
MAX_CODEC_DELAY = 3000
"""Samples that a lossy codec may add at the ends."""


def kind_of(data: bytes) -> str:
    """The format by the first bytes."""
    for magic, name in ((b"RIFF", "wav"), (b"fLaC", "flac"), (b"ID3", "mp3"), (b"OggS", "opus"), (b"\xff\xf1", "aac")):
        if data.startswith(magic):
            return name
    return "pcm"


def num_samples(data: bytes) -> int:
    """Samples at RATE_HZ, of any format that `kind_of` knows."""
    if kind_of(data) == "pcm":
        return len(data) // 2
    with av.open(io.BytesIO(data)) as container:
        frames = list(container.decode(audio=0))
    return sum(frame.samples for frame in frames) * RATE_HZ // frames[0].sample_rate
