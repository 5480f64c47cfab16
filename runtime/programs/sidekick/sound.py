"""Where in samples at 16 kHz there is sound, and how loud it is.

Knows nothing of files and models. The ear calls it, and what it makes of a transcript.
"""

from __future__ import annotations

import numpy as np

from runtime.programs.media.audio import SAMPLE_RATE_HZ, FloatArray

_BLOCK = SAMPLE_RATE_HZ // 50
_MARGIN_BLOCKS = 5
_SOUND_RMS = 1e-3
"""A block of 20 ms with less (-60 dB of full scale) is silence."""


def sound_span(samples: FloatArray) -> tuple[int, int] | None:
    """First and last sample (exclusive) with sound, and 0.1 s around them; None when all is silent."""
    loud = np.flatnonzero(block_rms(samples) >= _SOUND_RMS)
    if len(loud) == 0:
        return None
    first, last = int(loud[0]) - _MARGIN_BLOCKS, int(loud[-1]) + 1 + _MARGIN_BLOCKS
    return max(0, first * _BLOCK), min(len(samples), last * _BLOCK)


def block_rms(samples: FloatArray) -> FloatArray:
    """Root mean square of each block of 20 ms; the last one may be shorter."""
    starts = np.arange(0, len(samples), _BLOCK)
    sizes = np.diff(np.append(starts, len(samples)))
    return np.sqrt(np.add.reduceat(np.square(samples, dtype=np.float64), starts) / sizes).astype(np.float32)
