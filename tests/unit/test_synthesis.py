"""The streaming signal processing against the library's whole-utterance one: the same samples for any split."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hibari import dsp
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.programs.sidekick.synthesis import (
    HELD_BACK_FRAMES,
    HOP,
    NUM_BINS,
    SAMPLE_RATE_HZ,
    FloatArray,
    Spectra,
    Synthesizer,
    no_spectra,
)
from tests.speech import NoiseByFrame


def make_frames(num_frames: int, seed: int = 0) -> tuple[Spectra, FloatArray]:
    """Random spectra of speech-like level, with voiced and unvoiced stretches."""
    rng = np.random.default_rng(seed)
    spread_and_mean = [(1, -1), (1, 0), (1, -4), (1, -3), (3, 0)]
    spectra = [
        (spread * rng.standard_normal((num_frames, NUM_BINS)) + mean).astype(np.float32)
        for spread, mean in spread_and_mean
    ]
    f0 = np.where(rng.random(num_frames) < 0.7, 100 + 150 * rng.random(num_frames), -1.0)
    return Spectra(*spectra), f0.astype(np.float32)


def stream(
    spectra: Spectra, f0: FloatArray, sizes: list[int], *, seed: int = 5, empty_end: bool = False
) -> list[FloatArray]:
    """What each call gives, for chunks of the given sizes and one for the rest."""
    synthesizer, outputs, start = Synthesizer(seed), [], 0
    for size in [*sizes, spectra.num_frames]:
        stop = min(spectra.num_frames, start + size)
        last = stop == spectra.num_frames and not empty_end
        outputs.append(synthesizer.push(spectra.part(start, stop), f0[start:stop], last=last))
        start = stop
        if last:
            return outputs
    return [*outputs, synthesizer.push(no_spectra(), f0[:0], last=True)]


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 5, 7, 60, 333])
def test_equals_the_library_on_the_whole(num_frames: int) -> None:
    spectra, f0 = make_frames(num_frames, seed=num_frames)
    whole = dsp.synth(*(part.T.copy() for part in spectra), f0, NoiseByFrame(5))
    streamed = np.concatenate(stream(spectra, f0, [3] * (num_frames // 3)))
    assert len(streamed) == len(whole) == num_frames * HOP
    assert np.abs(whole).max() > 0.01
    np.testing.assert_allclose(streamed, whole, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(num_frames=st.integers(0, 60), sizes=st.lists(st.integers(0, 25), max_size=20), empty_end=st.booleans())
def test_any_split_gives_the_same_samples(num_frames: int, sizes: list[int], empty_end: bool) -> None:
    spectra, f0 = make_frames(num_frames, seed=1)
    streamed = np.concatenate(stream(spectra, f0, sizes, empty_end=empty_end))
    np.testing.assert_array_equal(streamed, np.concatenate(stream(spectra, f0, [])))


def test_a_call_gives_all_but_the_frames_held_back() -> None:
    spectra, f0 = make_frames(40)
    first, second, rest = stream(spectra, f0, [20, 10])
    assert len(first) == (20 - HELD_BACK_FRAMES) * HOP
    assert len(second) == 10 * HOP
    assert len(rest) == (10 + HELD_BACK_FRAMES) * HOP


def test_a_tone_has_no_step_where_chunks_and_segments_join() -> None:
    """A steady 200 Hz voice in pieces: the steps between samples at the joins are no larger than inside."""
    num_frames = 120
    quiet = np.full((num_frames, NUM_BINS), -20.0, np.float32)
    spectra = Spectra(np.full_like(quiet, -4.0), np.zeros_like(quiet), quiet, quiet, np.zeros_like(quiet))
    outputs = stream(spectra, np.full(num_frames, 200.0, np.float32), [30, 30, 30])
    signal = np.concatenate(outputs)
    inner = signal[10 * HOP : -10 * HOP]
    period = SAMPLE_RATE_HZ // 200
    np.testing.assert_allclose(inner[period:], inner[:-period], atol=np.abs(inner).max() * 0.02)
    steps = np.abs(np.diff(signal))
    joins = np.cumsum([len(output) for output in outputs[:-1]]) - 1
    assert steps[joins].max() < 1.5 * np.delete(steps, joins)[10 * HOP : -10 * HOP].max()


def test_seed_decides_the_noise() -> None:
    spectra, f0 = make_frames(20)
    first, again, other = (np.concatenate(stream(spectra, f0, [7], seed=seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-4


def test_a_fork_leaves_the_original_as_it_was() -> None:
    spectra, f0 = make_frames(30)
    synthesizer = Synthesizer(3)
    before = synthesizer.push(spectra.part(0, 10), f0[:10])
    abandoned = synthesizer.fork().push(spectra.part(10, 30), f0[10:], last=True)
    after = synthesizer.push(spectra.part(10, 30), f0[10:], last=True)
    np.testing.assert_array_equal(abandoned, after)
    whole = np.concatenate(stream(spectra, f0, [], seed=3))
    np.testing.assert_array_equal(np.concatenate([before, after]), whole)


def peak_bytes(num_frames: int) -> int:
    spectra, f0 = make_frames(60)
    synthesizer = Synthesizer(0)
    tracemalloc.start()
    for _ in range(0, num_frames, 60):
        synthesizer.push(spectra, f0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_length() -> None:
    assert peak_bytes(6000) < 1.2 * peak_bytes(300)
