"""Chat with the official SDK in strict mode: text and speech, whole and streamed."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionChunk

from tests.gate import Gate
from tests.server.conftest import EAR_REFUSES, THINK_IS_HELD
from tests.server.listening import MAX_CODEC_DELAY, SIM_SAMPLES, kind_of, num_samples
from tests.server.serving import MODEL

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
TEXT = "word0 word1 word2 word3 word4 word5 "
FORMATS = ["wav", "mp3", "flac", "opus", "aac", "pcm16"]


def speaking(audio_format: str, modalities: list[str] | None = None) -> dict[str, Any]:
    audio = {"voice": "alloy", "format": audio_format}
    return {**ASK, "modalities": modalities or ["text", "audio"], "audio": audio}


def stream(openai: OpenAI, ask: dict[str, Any]) -> list[ChatCompletionChunk]:
    return list(openai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))


def joined(chunks: list[ChatCompletionChunk]) -> dict[str, Any]:
    """The message that the deltas add up to: every text is the sum of its parts."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            _add(message, choice.delta.model_dump(exclude_none=True))
    return message


def _add(to: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if isinstance(value, dict):
            _add(to.setdefault(name, {}), value)
        else:
            to[name] = to[name] + value if name in to else value


def test_a_whole_answer_in_text(openai: OpenAI) -> None:
    reply = openai.chat.completions.with_raw_response.create(**ASK)
    answer = reply.parse()
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.audio is None
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.id == f"chatcmpl-{reply.headers['x-request-id']}"


def test_a_streamed_answer_in_text(openai: OpenAI) -> None:
    chunks = stream(openai, ASK)
    assert [c.choices[0].delta.content for c in chunks[:6]] == [f"word{number} " for number in range(6)]
    assert [c.choices[0].delta.role for c in chunks[:-1]] == ["assistant"] + [None] * (len(chunks) - 2)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert len({c.id for c in chunks}) == 1


@pytest.mark.parametrize("modalities", [["text"], ["text", "audio"], ["audio", "text"], ["audio"]])
def test_a_stream_adds_up_to_the_whole_answer(openai: OpenAI, modalities: list[str]) -> None:
    """F111: the usage is the same too, and comes once, at the end."""
    ask = speaking("pcm16", modalities) if "audio" in modalities else ASK
    whole = openai.chat.completions.create(**ask)
    chunks = stream(openai, ask)
    message, expected = joined(chunks), whole.choices[0].message
    assert message.get("content") == expected.content
    assert (expected.content is None) == (modalities == ["audio"])
    if expected.audio is not None:
        assert message["audio"]["transcript"] == expected.audio.transcript == TEXT
        assert base64.b64decode(message["audio"]["data"]) == base64.b64decode(expected.audio.data)
        assert message["audio"]["id"].startswith("audio-")
        assert message["audio"]["expires_at"] > 0
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (1, 6, 7)


def test_without_the_option_a_stream_has_no_usage(http: httpx.Client) -> None:
    body = http.post("/v1/chat/completions", json={**ASK, "stream": True}).text
    assert "usage" not in body
    assert body.endswith("data: [DONE]\n\n")


def test_audio_comes_while_the_text_is_made(openai: OpenAI, gate: Gate) -> None:
    """The thinker stands still in the middle of its text until the client has heard something."""
    kinds = []
    for chunk in openai.chat.completions.create(**speaking("pcm16"), stream=True, seed=THINK_IS_HELD):
        delta = chunk.choices[0].delta
        if delta.audio and delta.audio.data and "audio" not in kinds:
            gate.open()
        kinds += ["text"] * bool(delta.content) + ["audio"] * bool(delta.audio and delta.audio.data)
    assert kinds.count("text") == 6
    assert kinds[: kinds.index("audio")].count("text") <= 3, "the others were made after the gate was opened"


@pytest.mark.parametrize("audio_format", FORMATS)
def test_each_audio_format_is_what_it_says(openai: OpenAI, audio_format: str) -> None:
    """F099: whole and streamed; F101: a streamed file has one header."""
    expected = audio_format.removesuffix("16")
    whole = openai.chat.completions.create(**speaking(audio_format)).choices[0].message.audio
    assert whole is not None
    for data in (whole.data, joined(stream(openai, speaking(audio_format)))["audio"]["data"]):
        audio = base64.b64decode(data, validate=True)
        assert kind_of(audio) == expected
        exact = expected in ("wav", "flac", "pcm")
        assert SIM_SAMPLES <= num_samples(audio) <= SIM_SAMPLES + (0 if exact else MAX_CODEC_DELAY)
        assert audio.count(b"RIFF") == (expected == "wav")


def test_each_audio_delta_decodes_alone(openai: OpenAI) -> None:
    chunks = stream(openai, speaking("wav"))
    pieces = [c.choices[0].delta.audio.data for c in chunks if c.choices and c.choices[0].delta.audio]
    decoded = [base64.b64decode(piece, validate=True) for piece in pieces if piece]
    assert len(decoded) > 3
    assert sum(map(len, decoded)) == 44 + 2 * SIM_SAMPLES
    assert all(len(piece) % 2 == 0 for piece in decoded), "no sample is cut in two"


def test_voice_and_format_have_defaults(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(**ASK, modalities=["text", "audio"])
    audio = answer.choices[0].message.audio
    assert audio is not None
    assert kind_of(base64.b64decode(audio.data)) == "wav"


@pytest.mark.parametrize("audio_format", ["wav", "mp3"])
def test_a_spoken_question_goes_through_the_ear(openai: OpenAI, audio_format: str) -> None:
    data = base64.b64encode(b"x" * 90_000).decode()
    clip = {"type": "input_audio", "input_audio": {"data": data, "format": audio_format}}
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "what is this?"}, clip]}]
    heard = openai.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
    assert heard == TEXT + "word6 ", "the simulated thinker says one word more for what the ear gave it"
    with pytest.raises(BadRequestError, match="stage ear"):
        openai.chat.completions.create(model=MODEL, messages=messages, seed=EAR_REFUSES)


def test_a_conversation_with_all_roles(openai: OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": []},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "now?"}]},
    ]
    assert openai.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == TEXT


ASKS_FOR_NOTHING = {
    "n": 1,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "logprobs": False,
    "top_logprobs": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "store": False,
    "metadata": {},
    "service_tier": "auto",
    "stream_options": None,
    "audio": None,
    "temperature": None,
    "stop": None,
}


@pytest.mark.parametrize("field", ASKS_FOR_NOTHING)
def test_values_that_ask_for_nothing_are_accepted(http: httpx.Client, field: str) -> None:
    reply = http.post("/v1/chat/completions", json={**ASK, field: ASKS_FOR_NOTHING[field]})
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2),
        ("top_p", 0.1),
        ("top_k", -1),
        ("min_p", 0),
        ("seed", 2**63 - 1),
        ("stop", "x"),
        ("stop", ["a", "b", "c", "d"]),
        ("presence_penalty", -2),
        ("frequency_penalty", 2.0),
        ("repetition_penalty", 1.1),
        ("max_tokens", 1),
        ("max_completion_tokens", 5),
        ("audio", None),
    ],
)
def test_the_ends_of_every_range_are_accepted(http: httpx.Client, field: str, value: Any) -> None:
    reply = http.post("/v1/chat/completions", json={**ASK, field: value})
    assert reply.status_code == 200, reply.text
