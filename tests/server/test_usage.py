"""Usage from the counts that real stages report (F111: text of one stage alone, details that add up to the total)."""

from __future__ import annotations

from runtime.server.usage import chat_usage, heard_s, speech_usage
from tests.plans import sim_plan

PLAN = sim_plan()
STAGES = {
    "ear": {"audio_s": 2.5, "completion_tokens": 7.0},
    "think": {"prompt_tokens": 40.0, "completion_tokens": 12.0, "cached_tokens": 16.0},
    "talk": {"text_chars": 55.0, "frames": 300.0},
    "wave": {"audio_s": 3.75, "frames": 300.0},
}


def test_chat_counts_the_text_of_the_thinker_alone_and_the_frames_of_audio() -> None:
    assert chat_usage(PLAN, STAGES) == {
        "prompt_tokens": 40,
        "completion_tokens": 312,
        "total_tokens": 352,
        "prompt_tokens_details": {"cached_tokens": 16, "text_tokens": 40},
        "completion_tokens_details": {"audio_tokens": 300, "text_tokens": 12},
    }


def test_what_was_heard_and_seen_is_no_text() -> None:
    usage = chat_usage(PLAN, {"think": STAGES["think"] | {"media_tokens": 30.0}})
    assert usage["prompt_tokens"] == 40
    assert usage["prompt_tokens_details"]["text_tokens"] == 10


def test_a_text_answer_has_no_audio_tokens() -> None:
    usage = chat_usage(PLAN, {"think": STAGES["think"]})
    assert (usage["completion_tokens"], usage["total_tokens"]) == (12, 52)
    assert usage["completion_tokens_details"] == {"audio_tokens": 0, "text_tokens": 12}


def test_speech_counts_characters_and_frames() -> None:
    assert speech_usage(PLAN, STAGES) == {"input_tokens": 55, "output_tokens": 300, "total_tokens": 355}


def test_a_transcription_counts_seconds() -> None:
    assert heard_s(PLAN, STAGES) == 2.5
    assert heard_s(PLAN, {}) == 0.0
