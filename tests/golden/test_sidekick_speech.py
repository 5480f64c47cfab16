"""The sidekick's speech on its real weights: it is understood, it streams without a trace, nobody else changes it."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

import jiwer
import numpy as np
import numpy.typing as npt
import onnx
import pytest
from hibari import Hibari, dsp

from runtime.errors import InvalidRequest, UnsupportedMedia
from runtime.payload import Payload
from runtime.programs.sidekick import code2wav, ear, talker
from runtime.programs.sidekick.code2wav import NUM_CHANNELS, REACH_FRAMES, Code2Wav, Code2WavSettings
from runtime.programs.sidekick.ear import Ear
from runtime.programs.sidekick.synthesis import HOP, SAMPLE_RATE_HZ
from runtime.programs.sidekick.talker import Talker
from runtime.settings import weights_dir
from tests.golden.float_network import float_network
from tests.speech import (
    SENTENCES,
    NoiseByFrame,
    Outcome,
    clip,
    hand_over,
    load_context,
    run_request,
    run_requests,
    snr_db,
    texts,
    work,
)

pytestmark = pytest.mark.weights

FloatArray = npt.NDArray[np.float32]

STORY = (
    "The history of the town begins with a small harbor on the northern coast. Over time a market grew around the"
    " harbor, and with it came bakers and teachers. In the middle of the century a long bridge was built across the"
    " river. Today the bridge carries two roads and a railway, and most visitors arrive that way. The old market is"
    " still open on Saturday mornings. Near the church you can find a quiet museum with paintings of ships. My"
    " grandfather worked there as a guard, and he knew a story about every picture. Many people come back every"
    " summer, and some of them never leave again."
)


@pytest.fixture(scope="module")
def mouth() -> Talker:
    return talker.load(load_context("talker", weights_dir() / "sidekick/voice"))


@pytest.fixture(scope="module")
def vocoder() -> Code2Wav:
    return code2wav.load(load_context("code2wav", weights_dir() / "sidekick/voice"))


@pytest.fixture(scope="module")
def listener() -> Ear:
    return ear.load(load_context("ear", weights_dir() / "sidekick/ear"))


def say(mouth: Talker, vocoder: Code2Wav, *deltas: str, seed: int = 1, **params: Any) -> FloatArray:
    spoken = run_request(mouth, texts(*deltas), **params)
    return run_request(vocoder, hand_over(spoken.payloads, "latents"), seed=seed).samples


def hear(listener: Ear, *clips: Payload, **params: Any) -> Outcome:
    return run_request(listener, clips, **params)


def words(text: str) -> str:
    text = text.lower().replace("dr.", "doctor")
    return re.sub(rf"[{re.escape(string.punctuation)}\s]+", " ", text).strip()


def error_rate(expected: str | Sequence[str], heard: str | Sequence[str]) -> float:
    as_list = [[text] if isinstance(text, str) else list(text) for text in (expected, heard)]
    return float(jiwer.wer(*([words(text) for text in texts_] for texts_ in as_list)))


# ---- understood ----------------------------------------------------------------------------------------


def test_what_the_voice_says_the_ear_understands(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    heard = [
        hear(listener, clip(say(mouth, vocoder, sentence)), language="en").payloads[0].meta["text"]
        for sentence in SENTENCES
    ]
    assert error_rate(SENTENCES, heard) <= 0.1


def test_a_long_story_is_heard_without_loss_or_doubling(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    samples = say(mouth, vocoder, STORY)
    outcome = hear(listener, clip(samples))
    meta = outcome.payloads[0].meta
    assert meta["duration_s"] > 32
    assert error_rate(STORY, meta["text"]) <= 0.06
    starts = [segment["start"] for segment in meta["segments"]]
    assert starts == sorted(starts)
    assert meta["language"] == "en"


def test_without_pauses_timestamps_carry_over_the_border(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    samples = say(mouth, vocoder, STORY)
    blocks = samples[: len(samples) // 240 * 240].reshape(-1, 240)
    run_on = blocks[np.sqrt((blocks**2).mean(axis=1)) > 0.004].reshape(-1)
    noisy = run_on + np.random.default_rng(0).normal(0, 0.006, len(run_on)).astype(np.float32)
    noisy = np.concatenate([noisy, noisy])
    assert len(noisy) / SAMPLE_RATE_HZ > 40
    text = hear(listener, clip(noisy)).payloads[0].meta["text"]
    assert error_rate(f"{STORY} {STORY}", text) <= 0.1


def test_the_question_of_the_day(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    stereo = np.repeat(say(mouth, vocoder, "What is the capital of France?")[:, None], 2, axis=1)
    text = hear(listener, clip(stereo, container="MP3")).payloads[0].meta["text"]
    assert words(text) == "what is the capital of france"


def test_speed_changes_the_length_and_not_the_words(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    sentence = SENTENCES[1]
    lengths = {speed: len(say(mouth, vocoder, sentence, speed=speed)) for speed in (0.25, 0.5, 1.0, 2.0, 4.0)}
    assert list(lengths.values()) == sorted(lengths.values(), reverse=True)
    assert 1.6 < lengths[0.5] / lengths[1.0] < 2.4
    slow = hear(listener, clip(say(mouth, vocoder, sentence, speed=0.6)), language="en").payloads[0].meta["text"]
    assert error_rate(sentence, slow) <= 0.1


# ---- streamed ------------------------------------------------------------------------------------------


def test_the_network_looks_no_further_than_its_context() -> None:
    graph = onnx.load(weights_dir() / "sidekick/voice/code2wav.onnx").graph
    widths = [
        attribute.ints[0]
        for node in graph.node
        if node.op_type == "Conv"
        for attribute in node.attribute
        if attribute.name == "kernel_shape"
    ]
    assert sum(width // 2 for width in widths) == REACH_FRAMES
    assert {node.op_type for node in graph.node} & {"Attention", "MatMul", "Softmax", "LSTM", "GRU"} == set()


def test_the_whole_utterance_is_the_librarys_own(mouth: Talker, vocoder: Code2Wav) -> None:
    """Both halves in one chunk, with the same noise, are the uncut model and the library's signal processing."""
    library = Hibari()
    ids = library.ids(library.phonemize(SENTENCES[0])[0])
    inputs = {"ids": np.asarray([ids], np.int64), "speed": np.ones(1, np.float32)}
    *spectra, f0 = (output[0] for output in library.sess.run(None, inputs))
    expected = dsp.synth(*spectra, f0, NoiseByFrame(1))
    latents, our_f0 = mouth._network(ids, 1.0)
    payload = Payload("latents", "", tensors={"latents": latents, "f0": our_f0})
    one_chunk = Code2Wav(vocoder._network, Code2WavSettings(first_chunk_frames=5000, steady_chunk_frames=5000))
    whole = run_request(one_chunk, hand_over([payload], "latents"), seed=1).samples
    assert len(whole) == len(expected)
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    chunked = run_request(vocoder, hand_over([payload], "latents"), seed=1).samples
    assert len(chunked) == len(expected)
    assert snr_db(expected, chunked) > 20


def test_chunks_differ_from_the_whole_by_what_int8_does(mouth: Talker, vocoder: Code2Wav) -> None:
    one_chunk = Code2Wav(vocoder._network, Code2WavSettings(first_chunk_frames=5000, steady_chunk_frames=5000))
    for sentence in SENTENCES:
        latents = hand_over(run_request(mouth, texts(sentence)).payloads, "latents")
        whole, chunked = (run_request(program, latents, seed=1).samples for program in (one_chunk, vocoder))
        assert len(whole) == len(chunked)
        assert snr_db(whole, chunked) > 20


def test_in_float_chunks_equal_the_whole(mouth: Talker) -> None:
    """So int8 scales are all that differs in the test before."""
    network = float_network(weights_dir() / "sidekick/voice/code2wav.onnx")
    latents = hand_over(run_request(mouth, texts(" ".join(SENTENCES[:4]))).payloads, "latents")
    whole, chunked = (
        run_request(Code2Wav(network, settings), latents, seed=1).samples
        for settings in (Code2WavSettings(first_chunk_frames=5000, steady_chunk_frames=5000), Code2WavSettings())
    )
    np.testing.assert_allclose(chunked, whole, atol=1e-5)


def test_no_clicks_where_chunks_and_clauses_join(mouth: Talker, vocoder: Code2Wav) -> None:
    spoken = run_request(mouth, texts("If you want to learn more, please ask me. I am happy to help you with it."))
    outcome = run_request(vocoder, hand_over(spoken.payloads, "latents"), seed=1)
    assert len(outcome.payloads) >= 5
    steps = np.abs(np.diff(outcome.samples))
    chunk_ends = np.cumsum([len(p.tensors["samples"]) for p in outcome.payloads])[:-1]
    clause_ends = np.cumsum([len(p.tensors["f0"]) * HOP for p in spoken.payloads])[:-1]
    for join in [*chunk_ends, *clause_ends]:
        nearby = np.r_[steps[join - 700 : join - 2], steps[join + 1 : join + 700]]
        assert steps[join - 1] < 1.5 * nearby.max() + 1e-4


def test_first_sound_before_the_text_is_written(mouth: Talker, vocoder: Code2Wav) -> None:
    talking, sounding = mouth.open(work("r")), vocoder.open(work("r"))
    mouth.feed(talking, texts("The capital of France is Paris. It", "")[0])
    (spoken,) = mouth.run([talking])
    vocoder.feed(sounding, spoken.payloads[0])
    (sound,) = vocoder.run([sounding])
    assert len(sound.payloads[0].tensors["samples"]) == 28 * HOP


# ---- alone or in company -------------------------------------------------------------------------------


def test_speech_is_the_same_alone_and_in_company(mouth: Talker, vocoder: Code2Wav) -> None:
    inputs = {f"r{i}": ({"speed": 1.0 + i / 10}, texts(*re.findall(r"\S+\s*", s))) for i, s in enumerate(SENTENCES[:6])}
    together = run_requests(mouth, inputs)
    latents = {name: hand_over(outcome.payloads, "latents") for name, outcome in together.items()}
    sound = run_requests(vocoder, {name: ({"seed": i}, p) for i, (name, p) in enumerate(latents.items())})
    for i, (name, (params, _)) in enumerate(inputs.items()):
        alone = say(mouth, vocoder, SENTENCES[i], seed=i, **params)
        assert sound[name].samples.tobytes() == alone.tobytes()


def test_speech_is_the_same_however_the_text_came(mouth: Talker, vocoder: Code2Wav) -> None:
    text = " ".join(SENTENCES[:3])
    assert say(mouth, vocoder, *text).tobytes() == say(mouth, vocoder, text).tobytes()


def test_seeds_repeat_and_differ(mouth: Talker, vocoder: Code2Wav) -> None:
    first, again, other = (say(mouth, vocoder, SENTENCES[0], seed=seed) for seed in (7, 7, 8))
    assert first.tobytes() == again.tobytes() != other.tobytes()


def test_hearing_is_the_same_alone_and_in_company(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    clips = [clip(say(mouth, vocoder, sentence)) for sentence in SENTENCES[:3]]
    requests: dict[str, Any] = {f"r{i}": ({"language": "en"}, [c]) for i, c in enumerate(clips)}
    requests["silent"] = ({}, [clip(np.zeros(24_000, np.float32))])
    requests["broken"] = ({}, [Payload("media", "", last=True, tensors={"data": np.zeros(9, np.uint8)})])
    together = run_requests(listener, requests)
    for name, (params, inputs) in requests.items():
        alone = run_request(listener, inputs, **params)
        assert [p.meta for p in together[name].payloads] == [p.meta for p in alone.payloads]
    assert isinstance(together["broken"].end.error, UnsupportedMedia)


# ---- odd input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1x", "A;", "?!", "hm", "x" * 300, "é", "...a", "😀", "ß", "你好", "1" * 60])
def test_tiny_and_odd_texts_give_bounded_speech(mouth: Talker, vocoder: Code2Wav, text: str) -> None:
    spoken = run_request(mouth, texts(text))
    assert spoken.end.error is None
    samples = run_request(vocoder, hand_over(spoken.payloads, "latents"), seed=1).samples
    assert len(samples) / SAMPLE_RATE_HZ < 2 + 0.9 * len(text)


def test_all_of_a_long_text_is_said(mouth: Talker, vocoder: Code2Wav) -> None:
    """The frames of a long text are those of its sentences."""
    sentences = [*SENTENCES, *SENTENCES, *SENTENCES]
    together = run_request(mouth, texts(" ".join(sentences))).end.usage["frames"]
    one_by_one = sum(run_request(mouth, texts(sentence)).end.usage["frames"] for sentence in sentences)
    assert together == pytest.approx(one_by_one, rel=0.1)


def test_a_sentence_said_again_and_again_is_heard(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    """At no more than twice what other speech of this length costs, and as often as it was said."""
    question = "What is the capital of France?"
    once = say(mouth, vocoder, question)
    repeated = np.tile(once, 20)[: 30 * SAMPLE_RATE_HZ]
    ordinary = say(mouth, vocoder, STORY)[: 30 * SAMPLE_RATE_HZ]
    outcome = hear(listener, clip(repeated))
    num_said = len(repeated) // len(once)
    assert error_rate(" ".join([question] * num_said), outcome.payloads[0].meta["text"]) <= 0.1
    assert outcome.end.reason == "stop"
    num_steps = hear(listener, clip(ordinary)).end.usage["completion_tokens"]
    assert outcome.end.usage["completion_tokens"] <= 2 * num_steps
    for segment in outcome.payloads[0].meta["segments"]:
        assert -1 < segment["avg_logprob"] < 0 < segment["no_speech_prob"] < 1
        assert listener._model.text(segment["tokens"]).strip() == segment["text"]


def test_a_word_that_sends_the_model_in_circles_is_heard(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    once = say(mouth, vocoder, "Yes.")
    outcome = hear(listener, clip(np.tile(once, 60)[: 20 * SAMPLE_RATE_HZ]))
    assert set(words(outcome.payloads[0].meta["text"]).split()) == {"yes"}
    assert outcome.end.usage["completion_tokens"] <= 250


@pytest.mark.parametrize("kind", ["silence", "hiss", "noise", "hum", "tone"])
def test_what_is_no_speech_has_no_text(listener: Ear, kind: str) -> None:
    time_s, rng = np.arange(4 * 16_000) / 16_000, np.random.default_rng(0)
    samples = {
        "silence": np.zeros_like(time_s),
        "hiss": rng.normal(0, 0.005, len(time_s)),
        "noise": rng.normal(0, 0.05, len(time_s)),
        "hum": 0.1 * np.sign(np.sin(2 * np.pi * 50 * time_s)),
        "tone": 0.3 * np.sin(2 * np.pi * 440 * time_s),
    }[kind]
    outcome = hear(listener, clip(samples, 16_000))
    assert outcome.payloads[0].meta["text"] == ""
    assert outcome.end.error is None


def test_trailing_silence_is_not_filled_with_words(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    samples = np.concatenate([say(mouth, vocoder, SENTENCES[3]), np.zeros(20 * SAMPLE_RATE_HZ, np.float32)])
    assert error_rate(SENTENCES[3], hear(listener, clip(samples)).payloads[0].meta["text"]) == 0


def test_a_prompt_teaches_names(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    samples = say(mouth, vocoder, "Hello, my name is Zorblax.")
    text = hear(listener, clip(samples), language="en", prompt="Zorblaks").payloads[0].meta["text"]
    assert "Zorblaks" in text


def test_temperature_is_used(mouth: Talker, vocoder: Code2Wav, listener: Ear) -> None:
    clean = say(mouth, vocoder, SENTENCES[5])
    samples = clean + np.random.default_rng(0).normal(0, 0.1, len(clean)).astype(np.float32)
    greedy = {hear(listener, clip(samples), language="en").payloads[0].meta["text"] for _ in range(2)}
    sampled = {hear(listener, clip(samples), language="en", temperature=1.0).payloads[0].meta["text"] for _ in range(4)}
    assert len(greedy) == 1
    assert len(sampled) > 1


def test_languages_are_the_models(listener: Ear) -> None:
    assert len(listener.facts()["languages"]) == 99
    with pytest.raises(InvalidRequest, match="language: got 'klingon'") as caught:
        listener._model.language("klingon")
    assert caught.value.param == "language"


def test_too_long_audio_is_refused_with_the_limit(listener: Ear) -> None:
    error = hear(listener, clip(np.zeros(121 * 8000, np.float32), 8000)).end.error
    assert isinstance(error, InvalidRequest)
    assert "more than 120 s" in error.message


def test_spectra_have_the_expected_shape(vocoder: Code2Wav) -> None:
    assert all(part.shape == (40, 601) for part in vocoder._network(np.zeros((NUM_CHANNELS, 40), np.float32)))
