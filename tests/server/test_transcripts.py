"""What an ear says of a clip, in the formats of the wire."""

from __future__ import annotations

import pytest
from openai.types.audio import TranscriptionVerbose

from runtime.server.transcriptions.schema import Transcript, verbose_transcript
from runtime.server.transcriptions.subtitles import to_srt, to_vtt

SEGMENTS = [
    {"start": 0.0, "end": 1.2, "text": " Hello there."},
    {"start": 3599.9996, "end": 3661.25, "text": " Bye.", "avg_logprob": -0.5, "no_speech_prob": 0.1, "tokens": [1, 2]},
]


@pytest.fixture
def transcript() -> Transcript:
    heard = Transcript()
    heard.add({"text": " Hello there.", "index": 0, "language": "en", "duration_s": 3662.0, "segments": SEGMENTS[:1]})
    heard.add({"text": " Bye.", "language": "en", "segments": SEGMENTS[1:]})
    return heard


def test_verbose_json_is_what_the_sdk_expects(transcript: Transcript) -> None:
    found = verbose_transcript(transcript, 3662.0, 0.2)
    parsed = TranscriptionVerbose.model_validate(found)
    assert (parsed.text, parsed.language, parsed.duration) == ("Hello there. Bye.", "en", 3662.0)
    assert parsed.segments is not None
    assert [s.id for s in parsed.segments] == [0, 1]
    assert [s.avg_logprob for s in parsed.segments] == [0.0, -0.5]
    assert [s.no_speech_prob for s in parsed.segments] == [0.0, 0.1]
    assert parsed.segments[1].tokens == [1, 2]
    assert parsed.segments[0].temperature == 0.2
    assert parsed.segments[0].compression_ratio > 0
    assert parsed.usage is not None
    assert parsed.usage.seconds == 3662.0


def test_subrip() -> None:
    assert to_srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:01,200\nHello there.\n\n2\n01:00:00,000 --> 01:01:01,250\nBye.\n"
    )


def test_webvtt() -> None:
    assert to_vtt(SEGMENTS) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.200\nHello there.\n\n01:00:00.000 --> 01:01:01.250\nBye.\n"
    )


def test_nothing_heard() -> None:
    silent = Transcript()
    assert (silent.text, to_srt([]), to_vtt([])) == ("", "", "WEBVTT\n")
    assert TranscriptionVerbose.model_validate(verbose_transcript(silent, 0.0, 0.0)).segments == []
