"""Signal processing of the vocoder, frame by frame: spectra and F0 in, samples out, state carried in between.

The network predicts five spectra a frame of 12.5 ms; their sum is one complex spectrum,

    S = exp(lh) e^(i pi tanh(theta)) STFT(pulses(f0)) + exp(ln) Z + exp(lr) e^(i phi)

and the waveform is its inverse STFT. However a request's frames are split over calls, the samples are those of
`hibari.dsp.synth` over all of them at once. Knows nothing of networks or texts; code2wav calls it.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft

SAMPLE_RATE_HZ = 24_000
HOP = 300
OVERLAP = 4
N_FFT = OVERLAP * HOP
NUM_BINS = N_FFT // 2 + 1
PADDING_BLOCKS = 2
"""The first frame is centred on the first sample, so two blocks of its window lie before it."""
HELD_BACK_FRAMES = 4
"""Frames whose samples wait for the next call: two for the F0 and the window ahead, two for the overlap."""

_VOICED_MIN_HZ, _HARMONICS_MAX_HZ = 40.0, 11_000.0
_SINE_MIN = 2e-3
"""Below this, sin(a t) / sin(t / 2) is replaced by its limit."""
_LOG_MAGNITUDE_MAX = 7.0

FloatArray = npt.NDArray[np.float32]
ComplexArray = npt.NDArray[np.complex64]

_WINDOW = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)).astype(np.float32)  # periodic Hann
_SOURCE_WINDOW = _WINDOW / np.float32(N_FFT / 4)  # a unit cosine then peaks at 1 in the STFT
_SQUARED_WINDOW = (_WINDOW * _WINDOW).reshape(OVERLAP, HOP)
_WEIGHT_NEXT = (((np.arange(HOP) + 0.5) / HOP - 0.5) % 1.0).astype(np.float32)
"""Sample j of frame k lies at k + (j + 0.5) / HOP - 0.5: between k-1 and k in the first half, k and k+1 after."""
_WEIGHT_THIS = (1.0 - _WEIGHT_NEXT).astype(np.float32)


class Spectra(NamedTuple):
    """Five parts of a spectrum per frame, each [num_frames, NUM_BINS] float32, C order."""

    harmonic_log: FloatArray
    harmonic_phase: FloatArray
    noise_log: FloatArray
    free_log: FloatArray
    free_phase: FloatArray

    @property
    def num_frames(self) -> int:
        return len(self.harmonic_log)

    def part(self, start: int, stop: int | None = None) -> Spectra:
        return Spectra(*(array[start:stop] for array in self))

    def followed_by(self, other: Spectra) -> Spectra:
        return Spectra(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def no_spectra() -> Spectra:
    return Spectra(*(np.zeros((0, NUM_BINS), np.float32) for _ in Spectra._fields))


class Synthesizer:
    """The waveform of one request, from its first frame to its last, over as many calls as it takes.

    Noise is drawn frame by frame from one generator, so the calls' sizes do not show in it.
    """

    def __init__(self, seed: int) -> None:
        self._noise = np.random.Generator(np.random.PCG64(seed))
        self._f0 = np.zeros(0, np.float32)  # of the last frame that has pulses and of the one that has none yet
        self._sum_hz = 0.0  # of the F0 of all samples so far: the pulses' phase times the sample rate
        self._pulses = np.zeros(0, np.float32)  # beginning half a window before the next frame's centre
        self._begun = False  # whether `_pulses` has been continued to the left
        self._pending = no_spectra()  # frames that wait for their pulses
        self._windowed = np.zeros((OVERLAP - 1, N_FFT), np.float32)  # the last frames, which the next ones overlap
        self._num_frames = 0  # frames that went through the overlap

    def fork(self) -> Synthesizer:
        """An independent copy. Cheap: the arrays are shared, as none is ever changed in place."""
        twin = copy.copy(self)
        twin._noise = copy.deepcopy(self._noise)
        return twin

    def push(self, spectra: Spectra, f0: FloatArray, *, last: bool = False) -> FloatArray:
        """The samples that these frames complete, float32 [n]; after the `last` call HOP for each frame in total.

        f0: [num_frames] in Hz, 0 or less where unvoiced. Samples may exceed 1.
        """
        self._pending = self._pending.followed_by(spectra)
        self._extend_pulses(f0, last)
        sources = self._take_sources(last)
        ready, self._pending = self._pending.part(0, len(sources)), self._pending.part(len(sources))
        return self._overlap(self._windowed_frames(ready, sources), last)

    def _extend_pulses(self, f0: FloatArray, last: bool) -> None:
        """Pulses for every frame whose neighbours are known; beyond both ends the F0 stays as it is there."""
        curve = np.concatenate([self._f0 if len(self._f0) else f0[:1], f0])
        if last:
            curve = np.concatenate([curve, curve[-1:]])
        self._f0 = curve[-2:]
        if len(curve) > 2:
            pulses, self._sum_hz = _pulse_train(_interpolate(curve), self._sum_hz)
            self._pulses = np.concatenate([self._pulses, pulses])

    def _take_sources(self, last: bool) -> FloatArray:
        """Windows [n, N_FFT] of pulses around the centres of the next frames; mirrored at the true ends only."""
        half = N_FFT // 2
        if not self._begun and (last or len(self._pulses) > half):
            self._begun = len(self._pulses) > 0
            self._pulses = _mirrored(self._pulses, half, 0)
        if self._begun and last:
            self._pulses = _mirrored(self._pulses, 0, half)
        if not self._begun or len(self._pulses) < N_FFT:
            return np.zeros((0, N_FFT), np.float32)
        num_windows = min(self._pending.num_frames, (len(self._pulses) - N_FFT) // HOP + 1)
        windows = np.lib.stride_tricks.sliding_window_view(self._pulses, N_FFT)[::HOP][:num_windows]
        self._pulses = self._pulses[num_windows * HOP :]
        return windows

    def _windowed_frames(self, spectra: Spectra, sources: FloatArray) -> FloatArray:
        """Complete spectra, back in time and windowed: [n, N_FFT]."""
        spectrum: ComplexArray = fft.rfft(sources * _SOURCE_WINDOW, axis=1)
        spectrum *= _polar(spectra.harmonic_log, np.float32(np.pi) * np.tanh(spectra.harmonic_phase))
        noise = self._noise.standard_normal((len(sources), 2 * NUM_BINS), dtype=np.float32).view(np.complex64)
        spectrum += noise * _magnitude(spectra.noise_log)
        spectrum += _polar(spectra.free_log, spectra.free_phase)
        frames: FloatArray = fft.irfft(spectrum, n=N_FFT, axis=1)
        return frames * _WINDOW

    def _overlap(self, frames: FloatArray, last: bool) -> FloatArray:
        """Add up what overlaps. Block b of HOP samples is complete once frame b is there; the first two are padding."""
        first_block, num_frames = self._num_frames, self._num_frames + len(frames)
        frames = np.concatenate([self._windowed, frames])
        self._windowed, self._num_frames = frames[-(OVERLAP - 1) :], num_frames
        if last and num_frames:
            frames = np.concatenate([frames, np.zeros((PADDING_BLOCKS, N_FFT), np.float32)])
        num_blocks = len(frames) - (OVERLAP - 1)
        parts = frames.reshape(-1, OVERLAP, HOP)
        blocks = np.zeros((num_blocks, HOP), np.float32)
        for k in range(OVERLAP):
            start = OVERLAP - 1 - k
            blocks += parts[start : start + num_blocks, k]
        blocks *= _normalization(first_block, num_blocks, num_frames if last else None)
        return blocks[max(0, PADDING_BLOCKS - first_block) :].reshape(-1)


def _interpolate(curve: FloatArray) -> FloatArray:
    """F0 per sample, [(n - 2) * HOP], of the inner frames of `curve` [n]; linear between the frames' centres."""
    half = HOP // 2
    samples = np.empty((len(curve) - 2, HOP), np.float32)
    before, this, after = curve[:-2, None], curve[1:-1, None], curve[2:, None]
    samples[:, :half] = before * _WEIGHT_THIS[:half] + this * _WEIGHT_NEXT[:half]
    samples[:, half:] = this * _WEIGHT_THIS[half:] + after * _WEIGHT_NEXT[half:]
    return samples.reshape(-1)


def _pulse_train(f0: FloatArray, sum_hz: float) -> tuple[FloatArray, float]:
    """Every harmonic below 11 kHz at unit amplitude, 0 where unvoiced; and the new sum of the F0.

    sum over h <= H of cos(h t) = sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2
    """
    audible = np.maximum(f0, np.float32(_VOICED_MIN_HZ))
    sums_hz = np.cumsum(np.concatenate([[sum_hz], audible]), dtype=np.float64)[1:]
    phase = (np.modf(sums_hz * (1.0 / SAMPLE_RATE_HZ))[0] * (2 * np.pi)).astype(np.float32)
    order = np.floor(_HARMONICS_MAX_HZ / audible) + np.float32(0.5)
    divisor = np.sin(phase * np.float32(0.5)) * np.float32(2)
    at_peak = np.abs(divisor) <= _SINE_MIN
    pulses = np.sin(order * phase) / np.where(at_peak, np.float32(1), divisor)
    pulses = np.where(at_peak, order, pulses) - np.float32(0.5)
    return np.where(f0 > _VOICED_MIN_HZ, pulses, np.float32(0)), float(sums_hz[-1])


def _mirrored(samples: FloatArray, left: int, right: int) -> FloatArray:
    return np.pad(samples, (left, right), mode="reflect") if len(samples) else samples


def _magnitude(log_magnitude: FloatArray) -> FloatArray:
    return np.exp(np.minimum(log_magnitude, np.float32(_LOG_MAGNITUDE_MAX)))


def _polar(log_magnitude: FloatArray, angle: FloatArray) -> ComplexArray:
    number = np.empty(angle.shape, np.complex64)
    np.cos(angle, out=number.real)
    np.sin(angle, out=number.imag)
    number *= _magnitude(log_magnitude)
    return number


def _normalization(first_block: int, num_blocks: int, num_frames: int | None) -> FloatArray:
    """1 / the summed squared windows that overlap in each block; fewer do at the start, and at the end if known."""
    sums = np.zeros((num_blocks, HOP), np.float32)
    for k in range(OVERLAP):
        frame = np.arange(first_block, first_block + num_blocks) - k
        exists = (frame >= 0) & (frame < (num_frames if num_frames is not None else first_block + num_blocks))
        sums[exists] += _SQUARED_WINDOW[k]
    return np.reciprocal(np.maximum(sums, np.float32(1e-11)))
