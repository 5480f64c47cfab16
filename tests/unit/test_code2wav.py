"""The vocoder program with a small stand-in network of the same reach: chunks, segments, batches, bad input."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from runtime.engines.module import ModuleEngine
from runtime.errors import ConfigError, InvalidRequest, StageError
from runtime.payload import Payload
from runtime.programs.sidekick.code2wav import NUM_CHANNELS, REACH_FRAMES, Code2Wav, Code2WavSettings, load
from runtime.programs.sidekick.synthesis import HOP, NUM_BINS, FloatArray, Spectra, Synthesizer
from tests.speech import Outcome, hand_over, load_context, run_request, run_requests, work

SMALL = Code2WavSettings(first_chunk_frames=32, steady_chunk_frames=40)


def convolve(latents: FloatArray, width: int = 7, layers: int = 9) -> Spectra:
    """Nine random convolutions of width 7 over time, zero beyond the ends, then a random map to five spectra."""
    rng = np.random.default_rng(0)
    frames = latents[:8].astype(np.float64)
    for _ in range(layers):
        kernel = rng.standard_normal((width, 8, 8)) / 7
        padded = np.pad(frames, ((0, 0), (width // 2, width // 2)))
        frames = np.tanh(sum(kernel[k] @ padded[:, k : k + frames.shape[1]] for k in range(width)))
    maps = rng.standard_normal((5, NUM_BINS, 8)) / 4
    return Spectra(*((frames.T @ m.T - 2).astype(np.float32) for m in maps))


def latents_payload(num_frames: int, seed: int = 0, **meta: Any) -> Payload:
    rng = np.random.default_rng(seed)
    latents = rng.standard_normal((NUM_CHANNELS, num_frames)).astype(np.float32)
    f0 = np.where(rng.random(num_frames) < 0.8, 180.0, 0.0).astype(np.float32)
    return Payload("latents", "", meta=meta, tensors={"latents": latents, "f0": f0})


def split(payload: Payload, *sizes: int) -> list[Payload]:
    """The same segment in several payloads."""
    pieces, start, total = [], 0, len(payload.tensors["f0"])
    for size in [*sizes, total]:
        stop = min(total, start + size)
        tensors = {name: tensor[..., start:stop] for name, tensor in payload.tensors.items()}
        pieces.append(Payload("latents", "", meta={"segment_last": stop == total}, tensors=tensors))
        start = stop
    return pieces


def whole_utterance(*segments: Payload, seed: int) -> FloatArray:
    """Each segment through the network at once, all frames through the signal processing at once."""
    spectra = [convolve(segment.tensors["latents"]) for segment in segments]
    joined = Spectra(*(np.concatenate(parts) for parts in zip(*spectra, strict=True)))
    f0 = np.concatenate([segment.tensors["f0"] for segment in segments])
    return np.clip(Synthesizer(seed).push(joined, f0, last=True), -1, 1)


def speak(*segments: Payload, settings: Code2WavSettings = SMALL, seed: int = 1) -> Outcome:
    return run_request(Code2Wav(convolve, settings), hand_over(segments, "latents"), seed=seed)


@pytest.mark.parametrize(("first", "steady"), [(32, 32), (32, 120), (50, 400)])
def test_chunks_equal_the_whole_utterance(first: int, steady: int) -> None:
    segment = latents_payload(300)
    settings = Code2WavSettings(first_chunk_frames=first, steady_chunk_frames=steady)
    outcome = speak(segment, settings=settings)
    assert len(outcome.payloads) >= (2 if steady == 400 else 3)
    np.testing.assert_allclose(outcome.samples, whole_utterance(segment, seed=1), atol=1e-5)


def test_a_smaller_context_than_the_reach_would_differ_and_is_refused() -> None:
    segment = latents_payload(200)
    settings = Code2WavSettings(context_frames=4)
    with pytest.raises(ConfigError, match="context_frames 4 is smaller than the network's reach of 27"):
        Code2Wav(convolve, settings)
    reckless = Code2Wav(convolve, settings, reach_frames=0)
    samples = run_request(reckless, hand_over([segment], "latents"), seed=1).samples
    assert np.abs(samples - whole_utterance(segment, seed=1)).max() > 1e-3
    assert REACH_FRAMES == 9 * (7 // 2)


def test_segments_share_one_signal_processing() -> None:
    segments = [latents_payload(n, seed=n) for n in (90, 1, 40, 75)]
    outcome = speak(*segments)
    np.testing.assert_allclose(outcome.samples, whole_utterance(*segments, seed=1), atol=1e-5)
    assert outcome.end.reason == "stop"
    assert outcome.end.usage == {"audio_s": 206 / 80, "frames": 206.0}
    assert outcome.payloads[0].meta == {"sample_rate_hz": 24000, "seed": 1}


def test_a_segment_in_pieces_gives_the_same_samples() -> None:
    segment = latents_payload(260)
    whole = speak(segment)
    for sizes in [(1, 2, 3), (100, 100), (32, 32, 32), (59,), (260,)]:
        pieces = speak(*split(segment, *sizes))
        np.testing.assert_array_equal(pieces.samples, whole.samples)


def test_sound_comes_before_the_segment_is_complete() -> None:
    program = Code2Wav(convolve, SMALL)
    state = program.open(work("r", seed=1))
    for piece in split(latents_payload(200), *[10] * 20):
        program.feed(state, piece)
        if program.ready(state):
            break
    assert state.segments[0].num_frames == 60
    (result,) = program.run([state])
    assert len(result.payloads[0].tensors["samples"]) == 28 * HOP
    assert result.end is None


def test_no_frames_no_sound() -> None:
    for inputs in ([], [latents_payload(0)], [latents_payload(0), latents_payload(0)]):
        outcome = speak(*inputs)
        assert outcome.payloads == []
        assert outcome.end.error is None
        assert outcome.end.reason == "stop"


def test_together_or_alone_each_request_gets_the_same_bytes() -> None:
    requests = {
        name: ({"seed": seed}, hand_over([latents_payload(n, seed=n) for n in lengths], "latents"))
        for name, seed, lengths in [
            ("a", 1, [150, 80]),
            ("b", 2, [150, 80]),
            ("c", 1, [33]),
            ("d", 4, []),
            ("e", 5, [400]),
        ]
    }
    together = run_requests(Code2Wav(convolve, SMALL), requests)
    for name, (params, inputs) in requests.items():
        alone = run_request(Code2Wav(convolve, SMALL), inputs, **params)
        np.testing.assert_array_equal(together[name].samples, alone.samples)
    assert np.abs(together["a"].samples - together["b"].samples).max() > 1e-4


def test_a_failing_request_leaves_its_batch_whole() -> None:
    """The network fails on one request's frames, after another one of the batch has been decoded: that one is run
    again and must not notice.
    """

    def fragile(latents: FloatArray) -> Spectra:
        if latents[0, 0] == 777:
            raise RuntimeError("these frames kill the network")
        return convolve(latents)

    good, bad = latents_payload(150), latents_payload(150, seed=9)
    bad.tensors["latents"][0] = 777
    requests = {name: ({"seed": 1}, hand_over([p], "latents")) for name, p in [("good", good), ("bad", bad)]}
    outcomes = run_requests(Code2Wav(fragile, SMALL), requests)
    assert isinstance(outcomes["bad"].end.error, StageError)
    np.testing.assert_array_equal(outcomes["good"].samples, speak(good).samples)


def damaged(**tensors: Any) -> Payload:
    return Payload("latents", "", tensors=tensors)


@pytest.mark.parametrize(
    "payload",
    [
        damaged(latents=np.zeros((NUM_CHANNELS, 3), np.float32)),
        damaged(latents=np.zeros((NUM_CHANNELS, 3), np.float32), f0=np.zeros(4, np.float32)),
        damaged(latents=np.zeros((7, 3), np.float32), f0=np.zeros(3, np.float32)),
        damaged(latents=np.zeros((NUM_CHANNELS, 3)), f0=np.zeros(3)),
        damaged(latents=np.full((NUM_CHANNELS, 3), np.nan, np.float32), f0=np.zeros(3, np.float32)),
    ],
)
def test_damaged_frames_fail_their_request(payload: Payload) -> None:
    assert isinstance(speak(payload).end.error, StageError)


def test_spectra_that_are_no_numbers_fail_the_request() -> None:
    def broken(latents: FloatArray) -> Spectra:
        return Spectra(*(np.full_like(part, np.nan) for part in convolve(latents)))

    outcome = run_request(Code2Wav(broken, SMALL), hand_over([latents_payload(50)], "latents"))
    assert "no numbers" in str(outcome.end.error)


def test_seed_is_used_reported_and_fresh_when_absent() -> None:
    segment = latents_payload(60)
    unseeded = [run_request(Code2Wav(convolve, SMALL), hand_over([segment], "latents")) for _ in range(3)]
    seeds = [outcome.payloads[0].meta["seed"] for outcome in unseeded]
    assert len(set(seeds)) == 3
    np.testing.assert_array_equal(speak(segment, seed=seeds[0]).samples, unseeded[0].samples)
    assert np.abs(unseeded[0].samples - unseeded[1].samples).max() > 1e-4


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "7", True])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(InvalidRequest, match="seed") as caught:
        Code2Wav(convolve, SMALL).open(work("r", seed=seed))
    assert caught.value.param == "seed"


def test_cut_speech_ends_with_reason_length() -> None:
    assert speak(latents_payload(40), latents_payload(40, reason="length"), latents_payload(40)).end.reason == "length"


def peak_bytes(num_frames: int) -> int:
    def flat(latents: FloatArray) -> Spectra:
        return Spectra(*(np.full((latents.shape[1], NUM_BINS), -3, np.float32) for _ in Spectra._fields))

    engine = ModuleEngine(Code2Wav(flat, Code2WavSettings()))
    engine.submit(work("r"))
    payload = latents_payload(num_frames)
    tracemalloc.start()
    engine.feed("r", payload)
    engine.feed("r", Payload("latents", "r", last=True))
    while not any(output.end for output in engine.step()):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_long_input_takes_no_more_memory_than_a_short_one() -> None:
    assert peak_bytes(10_000) < 1.2 * peak_bytes(500)


def test_counts_and_facts() -> None:
    program = Code2Wav(convolve, SMALL)
    run_request(program, hand_over([latents_payload(100)], "latents"))
    counters = program.counters()
    assert counters["frames"] == 100
    assert counters["audio_s"] == pytest.approx(100 / 80)
    assert counters["chunks"] == 3
    assert counters["compute_s"] > 0
    assert program.facts()["sample_rate_hz"] == 24000


def test_settings_of_the_stage_are_strict() -> None:
    with pytest.raises(ConfigError, match="first_chunk_frame: unknown key .did you mean 'first_chunk_frames'"):
        load(load_context("code2wav", first_chunk_frame=3))
