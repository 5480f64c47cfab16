"""Whisper's input: the log-mel spectrogram of 16 kHz samples, in numpy, equal to the reference feature extractor.

80 mel bands on the Slaney scale up to 8 kHz, windows of 25 ms every 10 ms, 8 decades of range. Pure. The ear calls it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
from scipy import fft

SAMPLE_RATE_HZ = 16_000
N_FFT, HOP = 400, 160
NUM_MELS = 80
FRAMES_PER_S = SAMPLE_RATE_HZ // HOP

_WINDOW = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)  # periodic Hann
_LINEAR_BELOW_HZ, _LINEAR_HZ_PER_MEL = 1000.0, 200.0 / 3
_LOG_STEP = np.log(6.4) / 27

FloatArray = npt.NDArray[np.float32]


def log_mel(samples: FloatArray, num_frames: int) -> FloatArray:
    """[NUM_MELS, num_frames] float32 of `samples` [n], which are cut or followed by silence to fit.

    The range is measured from the loudest value of these frames, so it depends on what they cover.
    """
    fitted = np.zeros(num_frames * HOP, np.float64)
    fitted[: len(samples)] = samples[: len(fitted)]
    padded = np.pad(fitted, N_FFT // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, N_FFT)[::HOP][:num_frames]
    power = np.abs(fft.rfft(windows * _WINDOW, axis=1)) ** 2
    log_spec = np.log10(np.maximum(mel_filters() @ power.T, 1e-10))
    log_spec = np.maximum(log_spec, log_spec.max() - 8.0)
    return ((log_spec + 4.0) / 4.0).astype(np.float32)


@cache
def mel_filters() -> npt.NDArray[np.float64]:
    """[NUM_MELS, N_FFT // 2 + 1] triangles of equal area, evenly spaced on the Slaney scale from 0 to 8 kHz."""
    bins_hz = np.linspace(0, SAMPLE_RATE_HZ / 2, N_FFT // 2 + 1)
    top = _to_mel(SAMPLE_RATE_HZ / 2)
    corners_hz = np.array([_to_hz(mel) for mel in np.linspace(0, top, NUM_MELS + 2)])
    widths_hz = np.diff(corners_hz)
    distance_hz = corners_hz[:, None] - bins_hz[None]
    rising = -distance_hz[:-2] / widths_hz[:-1, None]
    falling = distance_hz[2:] / widths_hz[1:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    areas: npt.NDArray[np.float64] = triangles * (2.0 / (corners_hz[2:] - corners_hz[:-2]))[:, None]
    return areas


def _to_mel(frequency_hz: float) -> float:
    if frequency_hz < _LINEAR_BELOW_HZ:
        return frequency_hz / _LINEAR_HZ_PER_MEL
    return float(_LINEAR_BELOW_HZ / _LINEAR_HZ_PER_MEL + np.log(frequency_hz / _LINEAR_BELOW_HZ) / _LOG_STEP)


def _to_hz(mel: float) -> float:
    first_log_mel = _LINEAR_BELOW_HZ / _LINEAR_HZ_PER_MEL
    if mel < first_log_mel:
        return mel * _LINEAR_HZ_PER_MEL
    return float(_LINEAR_BELOW_HZ * np.exp(_LOG_STEP * (mel - first_log_mel)))
