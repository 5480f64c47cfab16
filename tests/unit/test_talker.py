"""The talker program with a stand-in network: pieces, pauses, caps, parameters; the pronunciation is the real one."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hibari.g2p import G2P
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.errors import ConfigError, InvalidRequest, StageError, WeightsError
from runtime.payload import Payload
from runtime.programs.sidekick.code2wav import NUM_CHANNELS
from runtime.programs.sidekick.talker import (
    ENERGY_CHANNEL,
    MAX_PHONEMES,
    FloatArray,
    Talker,
    TalkerSettings,
    load,
    pronounced_somehow,
)
from tests.speech import Outcome, load_context, run_request, run_requests, texts, work

LEAD, FRAMES_PER_ID, TRAIL = 25, 4, 37
VOCABULARY = {symbol: number for number, symbol in enumerate(string.printable + "ˈˌːəɪʊɛæɑɔɹðŋʃʒʤʧɡᵊTOIAYWQθɜɐʌ", 1)}
TEXT = "Hello there, my friend. This is Dr. Smith, and it is 3.14 past 10:30; well... Good bye"

_g2p = G2P()


def speak_frames(ids: Sequence[int], speed: float) -> tuple[FloatArray, FloatArray]:
    """Silence, four frames a phoneme that carry its id, silence: as many frames as the real network makes."""
    lead, each, trail = (max(1, round(n / speed)) for n in (LEAD, FRAMES_PER_ID, TRAIL))
    sound = np.repeat(np.asarray(ids, np.float32), each)
    latents = np.zeros((NUM_CHANNELS, lead + len(sound) + trail), np.float32)
    latents[ENERGY_CHANNEL] = -1.9
    latents[ENERGY_CHANNEL, lead : lead + len(sound)] = 1.0
    latents[0, lead : lead + len(sound)] = sound
    return latents, latents[0].copy()


def make_talker(network: Any = speak_frames, **program_settings: Any) -> Talker:
    return Talker(network, _g2p, VOCABULARY, TalkerSettings(**program_settings))


def speak(*deltas: str, program: Talker | None = None, **params: Any) -> Outcome:
    return run_request(program or make_talker(), texts(*deltas), **params)


def clauses(outcome: Outcome) -> list[str]:
    return [payload.meta["text"] for payload in outcome.payloads]


def frames(outcome: Outcome) -> list[int]:
    return [len(payload.tensors["f0"]) for payload in outcome.payloads]


def test_clauses_come_as_latents() -> None:
    outcome = speak("Hello there, my friend. Good", " bye. ")
    assert clauses(outcome) == ["Hello there, my friend.", "Good bye."]
    assert [p.meta["segment"] for p in outcome.payloads] == [0, 1]
    assert all(p.meta["segment_last"] and p.kind == "latents" for p in outcome.payloads)
    assert all(
        p.tensors["latents"].shape == (NUM_CHANNELS, n) for p, n in zip(outcome.payloads, frames(outcome), strict=True)
    )
    assert outcome.end.reason == "stop"
    assert outcome.end.usage == {"text_chars": 34.0, "frames": float(sum(frames(outcome)))}


def test_the_first_clause_comes_before_the_text_is_complete() -> None:
    program = make_talker()
    state = program.open(work("r"))
    program.feed(state, texts("Hello there, my friend. And", "")[0])
    assert program.ready(state)
    (result,) = program.run([state])
    assert result.payloads[0].meta["text"] == "Hello there, my friend."
    assert result.end is None
    assert not program.ready(state)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, len(TEXT)), max_size=12))
def test_same_output_however_the_text_was_split(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(TEXT)]
    deltas = [TEXT[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    split, whole = speak(*deltas), speak(TEXT)
    assert clauses(split) == clauses(whole)
    assert split.end == whole.end
    for ours, theirs in zip(split.payloads, whole.payloads, strict=True):
        np.testing.assert_array_equal(ours.tensors["latents"], theirs.tensors["latents"])


def test_together_or_alone_each_request_says_the_same() -> None:
    requests = {
        "a": ({"speed": 1.0}, texts(*TEXT.split(" "))),
        "b": ({"speed": 2.0}, texts(TEXT)),
        "c": ({}, texts("Short.")),
        "d": ({}, texts("")),
        "e": ({"speed": 0.5}, texts("Other words, other speed. Done.")),
    }
    together = run_requests(make_talker(), requests)
    for name, (params, inputs) in requests.items():
        alone = run_request(make_talker(), inputs, **params)
        assert clauses(together[name]) == clauses(alone)
        for ours, theirs in zip(together[name].payloads, alone.payloads, strict=True):
            np.testing.assert_array_equal(ours.tensors["latents"], theirs.tensors["latents"])


def test_no_frame_of_sound_is_lost() -> None:
    """For texts of 1, 5 and 200 words: each phoneme of each clause has its frames."""
    for num_words in (1, 5, 200):
        text = "word " * num_words
        outcome = speak(text)
        sounds = sum(int((p.tensors["latents"][ENERGY_CHANNEL] > 0).sum()) for p in outcome.payloads)
        phonemes = sum(2 + sum(c in VOCABULARY for c in _g2p(p.meta["text"])) for p in outcome.payloads)
        assert sounds == FRAMES_PER_ID * phonemes
        assert outcome.end.reason == "stop"


@pytest.mark.parametrize("text", ["", "  \n ", "...", "😀", "---", "你好", "!?", "\x00"])
def test_nothing_speakable_gives_no_sound_and_no_error(text: str) -> None:
    outcome = speak(text)
    assert outcome.payloads == []
    assert (outcome.end.error, outcome.end.reason) == (None, "stop")
    assert outcome.end.usage == {"text_chars": float(len(text)), "frames": 0.0}


def test_an_unspeakable_piece_does_not_end_the_request() -> None:
    assert clauses(speak("First sentence here. 你好。 Second one.")) == ["First sentence here.", "Second one."]


def silence_after(outcome: Outcome, number: int) -> float:
    """Seconds from the end of a clause's sound to the beginning of the next one's."""
    energies = [payload.tensors["latents"][ENERGY_CHANNEL] for payload in outcome.payloads[number : number + 2]]
    loud = [np.flatnonzero(energy > 0) for energy in energies]
    return (len(energies[0]) - 1 - loud[0][-1] + loud[1][0]) / 80


def test_pauses_follow_the_marks() -> None:
    clause = silence_after(speak("This is a first part, and this is another one"), 0)
    sentence = silence_after(speak("This is a first sentence. This is another one"), 0)
    line = silence_after(speak("This is a line\nThis is another one"), 0)
    run_on = silence_after(speak("just words without any mark " * 8), 0)
    assert run_on < clause < sentence == line
    assert 0.2 < clause < 0.4 < sentence < 0.6
    assert silence_after(speak("This is a first sentence. This is another one", speed=2.0), 0) < 0.6 * sentence


def test_sound_begins_early() -> None:
    energy = speak("Hello there.").payloads[0].tensors["latents"][ENERGY_CHANNEL]
    assert np.flatnonzero(energy > 0)[0] == 4


def test_words_with_too_many_phonemes_are_said_in_parts() -> None:
    calls: list[int] = []

    def network(ids: Sequence[int], speed: float) -> tuple[FloatArray, FloatArray]:
        calls.append(len(ids))
        return speak_frames(ids, speed)

    numbers = " ".join(["987654321"] * 8)
    outcome = speak(numbers, program=make_talker(network))
    assert max(calls) <= MAX_PHONEMES + 2
    assert len(calls) > 1
    sounds = sum(int((p.tensors["latents"][ENERGY_CHANNEL] > 0).sum()) for p in outcome.payloads)
    phonemes = sum(c in VOCABULARY for c in _g2p(numbers) if c != " ")
    assert sounds >= FRAMES_PER_ID * phonemes
    assert [p.meta["segment"] for p in outcome.payloads] == list(range(len(calls)))


def test_a_text_that_the_library_fails_on_is_said_as_far_as_possible() -> None:
    def fragile(text: str) -> str:
        if "1,000,000" in text:
            raise IndexError("list index out of range")
        return text

    say = pronounced_somehow(fragile)
    assert say("plain words") == "plain words"
    assert say("it is 1,000,000 here") == "it is 1 , 0 0 0 , 0 0 0 here"
    with pytest.raises(IndexError):
        _g2p("1" + ",000" * 12)
    huge = pronounced_somehow(_g2p)("it is 1" + ",000" * 12 + " here")
    assert huge.startswith(_g2p("it is"))
    assert huge.count(_g2p("zero").strip()) >= 36


def test_runaway_frames_are_cut_and_reported() -> None:
    """A network that never stops talking: the sound is bounded by the text's length, and the end says so."""

    def endless(ids: Sequence[int], speed: float) -> tuple[FloatArray, FloatArray]:
        latents = np.ones((NUM_CHANNELS, 50_000), np.float32)
        return latents, latents[0].copy()

    outcome = speak("1x", program=make_talker(endless))
    assert sum(frames(outcome)) < 5 * 80
    assert outcome.end.reason == "length"
    assert outcome.payloads[0].meta["reason"] == "length"
    assert speak("1x", program=make_talker(endless, max_frames_per_phoneme=1000)).end.usage["frames"] > 4000


def test_slow_speech_is_not_cut() -> None:
    outcome = speak("Slow and expressive words, all of them", speed=0.25)
    assert outcome.end.reason == "stop"
    assert sum(frames(outcome)) > 3 * sum(frames(speak("Slow and expressive words, all of them")))


@pytest.mark.parametrize("speed", [0.25, 0.5, 1, 4.0, None])
def test_speeds_that_are_honoured(speed: float | None) -> None:
    assert speak("Some words.", speed=speed).end.error is None


@pytest.mark.parametrize("speed", [0, 0.2, 4.1, -1, float("nan"), float("inf"), "fast", True])
def test_other_speeds_are_refused(speed: Any) -> None:
    error = speak("Some words.", speed=speed).end.error
    assert isinstance(error, InvalidRequest)
    assert error.param == "speed"
    assert "0.25 to 4.0" in error.message


@pytest.mark.parametrize("voice", ["alloy", "", "Heart", 7, ["heart"]])
def test_unknown_voice_is_refused(voice: Any) -> None:
    error = speak("Some words.", voice=voice).end.error
    assert isinstance(error, InvalidRequest)
    assert error.param == "voice"
    assert "heart" in error.message


def test_known_voice_is_taken() -> None:
    assert speak("Some words.", voice="heart").end.error is None
    assert make_talker().facts()["voices"] == ["heart"]


def test_a_failing_request_leaves_its_batch_whole() -> None:
    def fragile(ids: Sequence[int], speed: float) -> tuple[FloatArray, FloatArray]:
        if speed == 3.0:
            raise RuntimeError("this speed kills the network")
        return speak_frames(ids, speed)

    requests = {"good": ({}, texts(TEXT)), "bad": ({"speed": 3.0}, texts(TEXT))}
    outcomes = run_requests(make_talker(fragile), requests)
    assert isinstance(outcomes["bad"].end.error, StageError)
    assert clauses(outcomes["good"]) == clauses(speak(TEXT))
    assert outcomes["good"].end == speak(TEXT).end


def test_text_that_is_none_fails_the_request() -> None:
    outcome = run_request(make_talker(), [Payload("text", "", meta={"text": 5}, last=True)])
    assert isinstance(outcome.end.error, StageError)


@pytest.mark.parametrize(
    ("program_settings", "message"),
    [
        ({"max_char": [80]}, "did you mean 'max_chars'"),
        ({"max_chars": [0]}, "max_chars"),
        ({"max_batch": 0}, "max_batch"),
    ],
)
def test_settings_of_the_stage_are_strict(program_settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(load_context("talker", **program_settings))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"talker\.onnx is missing"):
        load(load_context("talker", tmp_path))
    (tmp_path / "talker.onnx").write_bytes(b"half a file")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(WeightsError, match=r"talker\.onnx cannot be loaded") as caught:
        load(load_context("talker", tmp_path))
    assert "omnictl pull" in str(caught.value.hint)
