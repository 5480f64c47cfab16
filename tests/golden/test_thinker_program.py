"""The sidekick's thinker without an engine: messages and transcripts in, prompt and text pieces out."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engines.ar.program import Generated
from runtime.engines.ar.sampling import Sampling
from runtime.engines.base import StageWork
from runtime.errors import InvalidRequest, StageError
from runtime.payload import Payload
from runtime.programs.sidekick.thinker import Thinker
from tests.golden.tiny_llama import byte_tokenizer

EAR = "ear->thinker"
DEFAULTS = Sampling(temperature=0.0, repetition_penalty=1.1, max_tokens=256)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def state_of(messages: Any, *transcripts: tuple[int, str], **sampling: Any) -> tuple[Thinker, Any]:
    """A thinker and a request of it that was fed. Transcripts come before the messages: the order is free."""
    thinker = Thinker(DEFAULTS)
    work = StageWork("r", 0, {"sampling": sampling, "voice": "heart"}, frozenset({"request", EAR}), frozenset({"text"}))
    state = thinker.open(work)
    for index, text in transcripts:
        thinker.feed(state, Payload("text", "r", edge=EAR, meta={"index": index, "text": text}))
    thinker.feed(state, Payload("text", "r", edge=EAR, last=True))
    thinker.feed(state, Payload("text", "r", edge="request", meta={"messages": messages}))
    thinker.feed(state, Payload("text", "r", edge="request", last=True))
    return thinker, state


def prompt_text(tokenizer: Any, messages: Any, *transcripts: tuple[int, str]) -> str:
    thinker, state = state_of(messages, *transcripts)
    return tokenizer.decode(thinker.prompt(state, tokenizer).token_ids)


def audio(index: int) -> dict[str, Any]:
    return {"type": "audio", "index": index}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_messages_become_the_chat_template(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("Hi"), text("there")]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Zoë?"},
    ]
    assert prompt_text(tokenizer, messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi\nthere<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\nZoë?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_every_clip_stands_where_it_was_said(tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": [text("before"), audio(0), text("between"), audio(1)]},
        {"role": "user", "content": [audio(2)]},
    ]
    found = prompt_text(tokenizer, messages, (2, "three"), (0, "one"), (1, "two"))
    assert "user\nbefore\none\nbetween\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>" in found


def test_requests_do_not_share_transcripts(tokenizer: Any) -> None:
    thinker, first = state_of([{"role": "user", "content": [audio(0)]}], (0, "mine"))
    second = thinker.open(StageWork("other", 0, {}, frozenset({"request"}), frozenset()))
    thinker.feed(second, Payload("text", "other", edge="request", meta={"messages": first.messages}))
    assert "mine" in tokenizer.decode(thinker.prompt(first, tokenizer).token_ids)
    with pytest.raises(StageError, match=r"messages\[0\]\.content\[0\]: no transcript of clip 0"):
        thinker.prompt(second, tokenizer)


@pytest.mark.parametrize("transcript", ["", "  \n"])
def test_a_last_message_in_which_nothing_was_understood_is_refused(tokenizer: Any, transcript: str) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "user", "content": [audio(0)]}]
    thinker, state = state_of(messages, (0, transcript))
    with pytest.raises(InvalidRequest, match=r"messages\[1\]: says nothing") as caught:
        thinker.prompt(state, tokenizer)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("messages", [None, []])
def test_no_messages(tokenizer: Any, messages: Any) -> None:
    thinker, state = state_of(messages)
    with pytest.raises(InvalidRequest, match="messages: none were given"):
        thinker.prompt(state, tokenizer)


def test_an_unknown_part_is_named(tokenizer: Any) -> None:
    thinker, state = state_of([{"role": "user", "content": [text("See:"), {"type": "image"}]}])
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\]\.type: 'image'") as caught:
        thinker.prompt(state, tokenizer)
    assert caught.value.param == "messages[0].content[1].type"


def test_tokens_are_counted_by_part(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "abc"}, {"role": "user", "content": [text("12345"), audio(0)]}]
    thinker, state = state_of(messages, (0, "é"))
    assert thinker.num_tokens_by_part(state, tokenizer) == {
        "messages[0]": 3,
        "messages[1].content[0]": 5,
        "messages[1].content[1] (audio)": 2,
    }


def test_defaults_of_the_recipe_and_what_the_client_sets(tokenizer: Any) -> None:
    thinker, state = state_of([{"role": "user", "content": "Hi"}], temperature=0.5, stop=["x"])
    assert thinker.prompt(state, tokenizer).sampling == Sampling(
        temperature=0.5, repetition_penalty=1.1, max_tokens=256, stop=("x",)
    )
    with pytest.raises(InvalidRequest, match="^top_k: "):
        state_of([], top_k=-7)


def test_text_becomes_pieces_and_a_seed_goes_along() -> None:
    thinker, state = state_of([])
    (piece,) = thinker.payloads(state, Generated("Hi", [1], None))
    assert (piece.kind, piece.request_id, piece.meta) == ("text", "r", {"text": "Hi"})
    (piece,) = thinker.payloads(state, Generated("Hi", [1], 42))
    assert piece.meta == {"text": "Hi", "seed": 42}
    assert thinker.payloads(state, Generated("", [1], 42)) == []
