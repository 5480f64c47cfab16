"""The ear with a scripted recognizer: clips, limits, silence, windows, batches; and how windows are put together."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ConfigError, InvalidRequest, OmniError, StageError, UnsupportedMedia
from runtime.payload import Payload
from runtime.programs.media.audio import SAMPLE_RATE_HZ, AudioDecoder
from runtime.programs.sidekick.ear import Ear, EarSettings, load
from runtime.programs.sidekick.transcript import (
    Heard,
    TimedTokens,
    Window,
    complete_parts,
    first_round,
    is_repetitive,
    is_speech,
    next_window,
    split_tokens,
    without_loop,
)
from tests.speech import Outcome, load_context, run_request, run_requests, work

FloatArray = npt.NDArray[np.float32]
FIRST_TIMESTAMP = 1000
SECOND = 50
"""Timestamp tokens in a second."""


class ScriptedModel:
    """Says for each window which tone it heard: the token is the pitch in steps of 100 Hz, with its bounds."""

    first_timestamp = FIRST_TIMESTAMP
    languages = ("en", "fr")

    def __init__(self, **heard: Any) -> None:
        self.heard = heard
        self.calls: list[tuple[str, list[int], float, int]] = []

    def encode(self, features: FloatArray) -> FloatArray:
        return features

    def detect_language(self, encoded: FloatArray) -> str:
        return "fr"

    def prompt_tokens(self, text: str) -> list[int]:
        return [len(text)] if text else []

    def transcribe(
        self, encoded: FloatArray, language: str, prompt: Sequence[int], temperature: float, sound_s: float
    ) -> Heard:
        num_frames = encoded.shape[1]
        assert 0 < sound_s <= num_frames / 100
        self.calls.append((language, list(prompt), temperature, num_frames))
        loudest = int(np.argmax(encoded.mean(axis=1)))
        if loudest == self.heard.get("fails_on"):
            raise RuntimeError("this sound kills the model")
        tokens = [FIRST_TIMESTAMP, loudest, FIRST_TIMESTAMP + 10]
        return Heard(
            tokens,
            self.heard.get("no_speech_prob", 0.0),
            self.heard.get("average_log_prob", -0.3),
            cut_off=self.heard.get("cut_off", False),
            num_steps=len(tokens),
        )

    def text(self, tokens: Sequence[int]) -> str:
        return "".join(f" band{token}" for token in tokens if token < FIRST_TIMESTAMP)

    def language(self, code: Any) -> str:
        if code not in self.languages:
            raise InvalidRequest(f"language: got {code!r}", param="language")
        return str(code)


_decoder = AudioDecoder("ear")


def make_ear(model: ScriptedModel | None = None, **program_settings: Any) -> Ear:
    return Ear(model or ScriptedModel(), _decoder, EarSettings(**program_settings))


def tone(frequency_hz: float, duration_s: float = 0.5) -> FloatArray:
    time_s = np.arange(int(SAMPLE_RATE_HZ * duration_s)) / SAMPLE_RATE_HZ
    return (0.3 * np.sin(2 * np.pi * frequency_hz * time_s)).astype(np.float32)


def clip(samples: FloatArray | bytes, index: int = 0, *, last: bool = True, audio_format: str = "") -> Payload:
    data = samples
    if not isinstance(data, bytes):
        out = io.BytesIO()
        soundfile.write(out, samples, SAMPLE_RATE_HZ, format="WAV")
        data = out.getvalue()
    meta = {"index": index, "format": audio_format}
    return Payload("media", "", meta=meta, last=last, tensors={"data": np.frombuffer(data, np.uint8)})


def hear(*clips: Payload, ear: Ear | None = None, **params: Any) -> Outcome:
    return run_request(ear or make_ear(), clips, **params)


def heard_texts(outcome: Outcome) -> list[str]:
    return [payload.meta["text"] for payload in outcome.payloads]


# ---- clips ---------------------------------------------------------------------------------------------


def test_a_clip_gives_its_text_with_times() -> None:
    outcome = hear(clip(np.concatenate([np.zeros(16_000, np.float32), tone(440, 1.0)])), language="en")
    (payload,) = outcome.payloads
    assert payload.kind == "text"
    assert payload.meta["text"].startswith("band")
    assert (payload.meta["index"], payload.meta["language"], payload.meta["duration_s"]) == (0, "en", 2.0)
    (segment,) = payload.meta["segments"]
    assert (segment["start"], segment["end"], segment["text"]) == (0.9, 1.1, payload.meta["text"])
    assert (segment["avg_logprob"], segment["no_speech_prob"]) == (-0.3, 0.0)
    assert payload.meta["text"] == f"band{segment['tokens'][0]}"
    assert outcome.end.usage == {"audio_s": 2.0, "completion_tokens": 3.0}
    assert outcome.end.reason == "stop"


def test_every_clip_is_heard_in_its_order() -> None:
    pitches_hz = [300, 1500, 5000]
    outcome = hear(*(clip(tone(hz), i, last=i == 2) for i, hz in enumerate(pitches_hz)))
    assert [p.meta["index"] for p in outcome.payloads] == [0, 1, 2]
    alone = [heard_texts(hear(clip(tone(hz))))[0] for hz in pitches_hz]
    assert heard_texts(outcome) == alone
    assert len(set(alone)) == 3


def test_clips_of_other_lengths_heard_together_or_alone() -> None:
    requests = {
        "none": ({}, [Payload("media", "", last=True)]),
        "short": ({}, [clip(tone(300, 0.1))]),
        "odd": ({"language": "en"}, [clip(tone(700, 0.37), 0, last=False), clip(tone(2000, 2.0), 1)]),
        "silent": ({}, [clip(np.zeros(5000, np.float32))]),
        "broken": ({}, [clip(b"no sound")]),
    }
    together = run_requests(make_ear(), requests)
    for name, (params, clips) in requests.items():
        alone = run_request(make_ear(), clips, **params)
        assert [p.meta for p in together[name].payloads] == [p.meta for p in alone.payloads]
        assert str(together[name].end.error) == str(alone.end.error)
    assert together["none"].payloads == []
    assert isinstance(together["broken"].end.error, UnsupportedMedia)


def test_parameters_reach_the_model() -> None:
    model = ScriptedModel()
    hear(clip(tone(440)), ear=make_ear(model), language="en", prompt="some names", temperature=0.5)
    assert model.calls == [("en", [10], 0.5, 1000)]


def test_without_a_language_it_is_detected() -> None:
    assert hear(clip(tone(440))).payloads[0].meta["language"] == "fr"


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("language", "xx"),
        ("language", 5),
        ("prompt", ["a"]),
        ("temperature", -0.1),
        ("temperature", 1.5),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
    ],
)
def test_parameters_that_are_none_are_refused(param: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make_ear().open(work("r", **{param: value}))
    assert caught.value.param == param


# ---- bad and odd audio ---------------------------------------------------------------------------------


def error_of(outcome: Outcome) -> OmniError:
    assert outcome.end.error is not None
    return outcome.end.error


@pytest.mark.parametrize("data", [b"", b"RIFF", b"this is no sound"])
def test_a_broken_clip_is_refused_and_named(data: bytes) -> None:
    error = error_of(hear(clip(tone(440), 0, last=False), clip(data, 1)))
    assert isinstance(error, UnsupportedMedia)
    assert error.message.startswith("audio clip 1: the audio cannot be decoded")


def test_a_broken_clip_is_named_as_the_client_calls_it() -> None:
    payload = clip(b"this is no sound")
    named = msgspec.structs.replace(payload, meta={**payload.meta, "name": "file"})
    assert error_of(hear(named)).message.startswith("file: the audio cannot be decoded")


def test_a_named_format_must_be_known() -> None:
    assert isinstance(error_of(hear(clip(tone(440), audio_format="midi"))), UnsupportedMedia)
    assert hear(clip(tone(440), audio_format="wav")).end.error is None


def test_too_long_audio_is_refused_with_the_limit() -> None:
    ear = make_ear(max_audio_s=2.0)
    error = error_of(hear(clip(tone(440, 2.1)), ear=ear))
    assert type(error) is InvalidRequest
    assert error.message == "audio clip 0: the request has more than 2 s of audio"
    assert hear(clip(tone(440, 2.0)), ear=ear).end.error is None


def test_the_limit_is_for_all_clips_of_a_request() -> None:
    ear = make_ear(max_audio_s=2.0)
    error = error_of(hear(clip(tone(440, 1.5), 0, last=False), clip(tone(440, 0.6), 1), ear=ear))
    assert "audio clip 1" in error.message


@pytest.mark.parametrize("samples", [np.zeros(16_000, np.float32), np.full(16_000, 5e-4, np.float32)])
def test_silence_is_no_text_and_costs_no_model(samples: FloatArray) -> None:
    model = ScriptedModel()
    outcome = hear(clip(samples), ear=make_ear(model))
    assert heard_texts(outcome) == [""]
    assert outcome.payloads[0].meta["segments"] == []
    assert model.calls == []
    assert outcome.end.usage == {"audio_s": 1.0, "completion_tokens": 0.0}


def test_noise_that_makes_the_model_speak_is_no_text(caplog: pytest.LogCaptureFixture) -> None:
    ear = make_ear(ScriptedModel(no_speech_prob=0.7, average_log_prob=-1.7))
    with caplog.at_level(logging.INFO):
        assert heard_texts(hear(clip(tone(440), 2), ear=ear)) == [""]
    assert "clip 2: 0.0 to 0.5 s disbelieved: no_speech_prob 0.70, avg_logprob -1.70, 3 tokens" in caplog.text
    assert ear.counters()["disbelieved_windows"] == 1
    assert ear.counters()["windows"] == 1


def test_a_model_that_does_not_stop_ends_with_reason_length() -> None:
    assert hear(clip(tone(440)), ear=make_ear(ScriptedModel(cut_off=True))).end.reason == "length"


def test_a_sound_that_kills_the_model_fails_its_request_only() -> None:
    victim = int(heard_texts(hear(clip(tone(2000))))[0].removeprefix("band"))
    ear = make_ear(ScriptedModel(fails_on=victim))
    ear.max_batch = 4
    requests = {name: ({}, [clip(tone(hz))]) for name, hz in [("good", 300), ("bad", 2000), ("other", 5000)]}
    outcomes = run_requests(ear, requests)
    assert isinstance(outcomes["bad"].end.error, StageError)
    for name, hz in [("good", 300), ("other", 5000)]:
        assert heard_texts(outcomes[name]) == heard_texts(hear(clip(tone(hz))))
    assert heard_texts(hear(clip(tone(300)), ear=ear)) == heard_texts(outcomes["good"])


def test_bytes_that_are_none_fail_the_request() -> None:
    payload = Payload("media", "", last=True, tensors={"data": np.zeros(10, np.float32)})
    assert isinstance(error_of(hear(payload)), StageError)


# ---- windows -------------------------------------------------------------------------------------------


def test_a_long_clip_takes_a_window_a_step_and_lets_others_through() -> None:
    ear = make_ear()
    states = [ear.open(work(name)) for name in ("long", "short")]
    ear.feed(states[0], clip(tone(440, 70.0)))
    ear.feed(states[1], clip(tone(440, 1.0)))
    assert ear.run([states[0]])[0].end is None  # type: ignore[union-attr]
    assert ear.run([states[1]])[0].end is not None  # type: ignore[union-attr]


def test_windows_without_sound_are_passed_over() -> None:
    model = ScriptedModel()
    silence = np.zeros(SAMPLE_RATE_HZ * 45, np.float32)
    outcome = hear(clip(np.concatenate([tone(440, 2.0), silence, tone(440, 2.0)])), ear=make_ear(model))
    starts = [segment["start"] for segment in outcome.payloads[0].meta["segments"]]
    assert starts[0] == 0.0
    assert 2.0 < starts[1] < 47.1
    assert len(model.calls) == 2


def test_the_spectrogram_is_as_long_as_the_sound_needs() -> None:
    model = ScriptedModel()
    for duration_s in (1.0, 7.0, 12.3, 29.5):
        hear(clip(tone(440, duration_s)), ear=make_ear(model))
    assert [num_frames for *_, num_frames in model.calls] == [1000, 1000, 1600, 3000]
    hear(clip(tone(440, 1.0)), ear=make_ear(model, min_window_s=30))
    assert model.calls[-1][-1] == 3000


def speech_like(pauses_s: list[float], duration_s: float) -> FloatArray:
    """A tone with silence of 0.4 s around the given moments."""
    samples = tone(440, duration_s)
    for moment_s in pauses_s:
        samples[int((moment_s - 0.2) * SAMPLE_RATE_HZ) : int((moment_s + 0.2) * SAMPLE_RATE_HZ)] = 0
    return samples


def test_a_window_is_cut_in_its_last_pause() -> None:
    samples = speech_like([5.0, 22.0, 27.0, 35.0], 60.0)
    window = next_window(samples, 0, len(samples))
    assert window.whole
    assert 26.8 < window.stop / SAMPLE_RATE_HZ < 27.2


def test_without_a_pause_a_window_is_as_long_as_it_can_be() -> None:
    samples = speech_like([5.0], 60.0)
    assert next_window(samples, 0, len(samples)) == Window(0, 30 * SAMPLE_RATE_HZ, whole=False)


@settings(max_examples=30, deadline=None)
@given(start_s=st.floats(0, 50), duration_s=st.floats(1, 90), pauses_s=st.lists(st.floats(1, 80), max_size=6))
def test_windows_cover_the_clip_without_gap_or_overlap(
    start_s: float, duration_s: float, pauses_s: list[float]
) -> None:
    samples = speech_like(pauses_s, duration_s)
    position = min(int(start_s * SAMPLE_RATE_HZ), len(samples) - 1)
    while position < len(samples):
        window = next_window(samples, position, len(samples))
        assert window.start == position
        assert 0 < window.stop - window.start <= 30 * SAMPLE_RATE_HZ
        position = window.stop
    assert position == len(samples)


# ---- what tokens say -----------------------------------------------------------------------------------


def at(time_s: float) -> int:
    return FIRST_TIMESTAMP + round(time_s * SECOND)


def said(tokens: Sequence[int], cut_off: bool = False) -> Heard:
    return Heard(tokens, 0.0, -0.3, cut_off)


def test_timestamps_bound_the_parts() -> None:
    tokens = [at(0.5), 1, 2, at(2), at(2.5), 3, at(4)]
    assert split_tokens(tokens, FIRST_TIMESTAMP, 10.0) == (
        [TimedTokens(0.5, 2.0, (1, 2)), TimedTokens(2.5, 4.0, (3,))],
        None,
    )


@pytest.mark.parametrize("text", [[], [3, 4]])
def test_a_part_without_its_end_is_open(text: list[int]) -> None:
    tokens = [at(0), 1, at(2), at(2.5), *text]
    assert split_tokens(tokens, FIRST_TIMESTAMP, 10.0) == (
        [TimedTokens(0.0, 2.0, (1,))],
        TimedTokens(2.5, 10.0, tuple(text)),
    )


@pytest.mark.parametrize(
    ("tokens", "kept", "next_s"),
    [
        ([at(0), 1, at(9), at(9), 2, 3], [(1,)], 9.0),
        ([at(0), 1, at(9), at(9)], [(1,)], 9.0),
        ([at(0), 1, at(9)], [(1,)], 30.0),
        ([at(0), 1, at(29.8), at(29.8)], [(1,)], 30.0),
        ([at(0), 1, at(0.4), at(0.4), 2], [(1,), (2,)], 30.0),
        ([at(0), 1, 2], [(1, 2)], 30.0),
        ([1, 2], [(1, 2)], 30.0),
        ([at(0)], [], 30.0),
        ([], [], 30.0),
    ],
)
def test_an_unfinished_part_is_heard_again_in_the_next_window(
    tokens: list[int], kept: list[tuple[int, ...]], next_s: float
) -> None:
    window = Window(SAMPLE_RATE_HZ, 31 * SAMPLE_RATE_HZ, whole=False)
    parts, position = complete_parts(said(tokens), FIRST_TIMESTAMP, window)
    assert [part.tokens for part in parts] == kept
    assert position == SAMPLE_RATE_HZ + next_s * SAMPLE_RATE_HZ


def test_in_a_window_that_ends_in_a_pause_the_last_part_is_kept() -> None:
    window = Window(0, 20 * SAMPLE_RATE_HZ, whole=True)
    parts, position = complete_parts(said([at(0), 1, at(9), at(9), 2]), FIRST_TIMESTAMP, window)
    assert parts == [TimedTokens(0.0, 9.0, (1,)), TimedTokens(9.0, 20.0, (2,))]
    assert position == window.stop


def test_what_began_and_was_not_written_down_is_heard_again_even_there() -> None:
    window = Window(0, 20 * SAMPLE_RATE_HZ, whole=True)
    parts, position = complete_parts(said([at(0), 1, at(9), at(9)]), FIRST_TIMESTAMP, window)
    assert parts == [TimedTokens(0.0, 9.0, (1,))]
    assert position == 9 * SAMPLE_RATE_HZ


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 20) | st.integers(FIRST_TIMESTAMP, FIRST_TIMESTAMP + 1500), max_size=40))
def test_any_tokens_make_progress_and_lose_no_text_of_a_whole_window(tokens: list[int]) -> None:
    for whole in (True, False):
        window = Window(0, 30 * SAMPLE_RATE_HZ, whole=whole)
        parts, position = complete_parts(said(tokens), FIRST_TIMESTAMP, window)
        assert SAMPLE_RATE_HZ <= position <= window.stop
        assert all(0 <= part.start_s <= part.end_s <= 30 for part in parts)
        if whole and first_round(tokens) == len(tokens):
            assert [t for part in parts for t in part.tokens] == [t for t in tokens if t < FIRST_TIMESTAMP]


QUESTION = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("tokens", "num_first"),
    [
        ([], 0),
        (QUESTION, 7),
        (QUESTION * 3, 21),
        (QUESTION * 4, 7),
        (QUESTION * 4 + [1, 2], 7),
        ([8, 9] + QUESTION * 5 + [10, 11, 12], 9),
        ([8] + [9, 10] * 12, 3),
        ([9] * 23, 23),
        ([9] * 24, 1),
        (list(range(200)), 200),
        (QUESTION * 4 + [8] + [9, 10, 11] * 20, 32),
    ],
)
def test_where_a_loop_begins(tokens: list[int], num_first: int) -> None:
    assert first_round(tokens) == num_first


def test_who_repeats_himself_at_the_pace_of_speech_is_believed() -> None:
    spoken = TimedTokens(0.0, 17.0, tuple(QUESTION * 9))
    assert without_loop(spoken) == spoken
    assert without_loop(TimedTokens(0.0, 5.0, spoken.tokens)) == TimedTokens(0.0, 5.0, tuple(QUESTION))
    assert without_loop(spoken, cut_off=True).tokens == tuple(QUESTION)


@pytest.mark.parametrize(("start_s", "kept", "next_s"), [(0, [QUESTION], 20), (12, [], 12)])
def test_a_loop_without_end_is_heard_again_or_cut_to_its_first_round(
    start_s: int, kept: list[list[int]], next_s: int
) -> None:
    before = [at(0), 50, at(start_s)] if start_s else []
    window = Window(0, 20 * SAMPLE_RATE_HZ, whole=True)
    parts, position = complete_parts(
        said([*before, at(start_s), *QUESTION * 30], cut_off=True), FIRST_TIMESTAMP, window
    )
    assert [list(part.tokens) for part in parts] == [[50]] * bool(start_s) + kept
    assert position == next_s * SAMPLE_RATE_HZ


def test_what_is_believed() -> None:
    sure, unsure = Heard((), 0.9, -0.3), Heard((), 0.7, -1.7)
    loop = "I am not sure if I can get a new one. " * 12
    assert is_repetitive(loop)
    assert not is_repetitive("Yes, yes, yes. It is an ordinary sentence that says nothing twice.")
    assert is_speech(sure, "some words")
    assert not is_speech(unsure, "some words")
    assert not is_speech(sure, loop)
    assert is_speech(Heard((), 0.1, -1.7), "some words")


def test_settings_of_the_stage_are_strict() -> None:
    with pytest.raises(ConfigError, match="compute_type"):
        load(load_context("ear", compute_type="int4"))
    with pytest.raises(ConfigError, match="did you mean 'max_audio_s'"):
        load(load_context("ear", max_audio=3))
