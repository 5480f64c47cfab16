"""Qwen2.5-Omni's thinker as a stage against transformers: token ids, and the rows that the talker speaks from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from runtime.engines.ar.engine import ArEngine
from runtime.engines.base import StageWork
from runtime.errors import ConfigError, UnsupportedValue
from runtime.plan import REQUEST_INPUT
from tests.golden.ar_engines import BLOCK_SIZE, assert_nothing_left
from tests.golden.omni25_reference import NAMES
from tests.golden.omni_reference import NUM_TEXT_TOKENS
from tests.golden.omni_stages import StageDriver, Stream, context, make_omni_engine
from tests.golden.tiny_qwen2_5_omni import HEAD_DIM, NUM_KV_HEADS, THINKER_LAYERS, omni25_tokenizer

if TYPE_CHECKING:
    from tests.golden.omni25_reference import Reference25

FAMILY = "qwen2_5_omni"
KV_BYTES_PER_TOKEN = THINKER_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4
CHUNK_TOKENS = 96
"""Less than the long prompt has, so that it is prefilled in pieces."""
HIDDEN = "hidden_states"
SYSTEM_PROMPT = "You hear and speak."
TOLERANCE = 1e-5
"""Of the largest number: float32 with another order of additions."""


class Case(StageDriver):
    def __init__(self, engine: ArEngine, references: dict[str, Reference25]) -> None:
        super().__init__(engine)
        self.references = references

    def check(self, stream: Stream, name: str) -> None:
        """The rows tell the prompt and all tokens but the last; the text tells that one too."""
        reference = self.references[name]
        num_rows = [len(p.tensors["rows"]) for p in stream.payloads if p.kind == HIDDEN]
        assert num_rows == [len(reference.prompt_ids)] + [1] * (len(reference.text_ids) - 1)
        assert stream.joined("positions", axis=1).tolist() == reference.positions.tolist()
        found, expected = stream.joined("rows"), reference.rows.numpy()
        assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()
        text = omni25_tokenizer().decode(reference.text_ids, skip_special_tokens=True)
        assert stream.text.rstrip("\N{REPLACEMENT CHARACTER}") == text.rstrip("\N{REPLACEMENT CHARACTER}")
        assert stream.end is not None
        assert stream.end.usage["prompt_tokens"] == len(reference.prompt_ids)
        assert stream.end.usage["completion_tokens"] == len(reference.text_ids)


def make_thinker(folder: Path, **settings: Any) -> Any:
    from runtime.programs.qwen2_5_omni.thinker import load

    given = {"temperature": 0.0, "max_tokens": NUM_TEXT_TOKENS, "system_prompt": SYSTEM_PROMPT, **settings}
    return load(context(folder, "thinker", family=FAMILY, **given))


@pytest.fixture(scope="module")
def engine(omni25_checkpoint: Path) -> Iterator[ArEngine]:
    program = make_thinker(omni25_checkpoint)
    engine = make_omni_engine(
        omni25_checkpoint, program, KV_BYTES_PER_TOKEN, max_num_batched_tokens=CHUNK_TOKENS, max_num_seqs=8
    )
    yield engine
    engine.close()


@pytest.fixture
def case(engine: ArEngine, omni25_references: dict[str, Reference25]) -> Iterator[Case]:
    engine.core._scheduler.reset_prefix_cache()
    yield Case(engine, omni25_references)
    assert_nothing_left(engine)
    assert not engine.core._tapped


@pytest.mark.parametrize("name", NAMES)
def test_alone(case: Case, name: str) -> None:
    case.ask(name, name, HIDDEN, "text")
    case.step()
    is_chunked = len(case.references[name].prompt_ids) > CHUNK_TOKENS
    assert bool(case.streams) != is_chunked
    case.check(case.drain()[name], name)


def test_in_a_batch_with_aborted_neighbours(case: Case) -> None:
    for name in NAMES:
        case.ask(name, name, HIDDEN, "text")
    for doomed in ("short", "question"):
        case.ask(f"doomed {doomed}", doomed, HIDDEN, "text")
        case.step()
    assert case.engine.stats()["running"] >= 3, "requests that came together did not run together"
    for doomed in ("short", "question"):
        case.engine.abort(f"doomed {doomed}")
        case.streams.pop(f"doomed {doomed}", None)
    streams = case.drain()
    assert set(streams) == set(NAMES)
    for name, stream in streams.items():
        case.check(stream, name)


def test_prefix_cache_hit(case: Case) -> None:
    for request_id in ("first", "second"):
        case.ask(request_id, "long", HIDDEN, "text")
        stream = case.drain()[request_id]
        case.check(stream, "long")
    assert stream.end is not None
    assert stream.end.usage["cached_tokens"] == len(case.references["long"].prompt_ids) // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize(
    ("wants", "has_own", "is_added"), [(HIDDEN, False, True), (HIDDEN, True, False), ("text", False, False)]
)
def test_a_system_prompt_for_those_who_want_speech_and_have_none(
    case: Case, wants: str, has_own: bool, is_added: bool
) -> None:
    own = [{"role": "system", "content": "Be brief."}] if has_own else []
    messages = [*own, {"role": "user", "content": "Hi"}]
    case.open("r", wants, inputs=frozenset({REQUEST_INPUT}))
    case.feed("r", REQUEST_INPUT, "text", {"messages": messages}, last=True)
    end = case.drain()["r"].end
    assert end is not None
    expected = [{"role": "system", "content": SYSTEM_PROMPT}, *messages] if is_added else messages
    ids = omni25_tokenizer().apply_chat_template(expected, add_generation_prompt=True, return_dict=False)
    assert end.usage["prompt_tokens"] == len(ids)


def test_the_sound_of_a_video_at_another_rate_is_refused(case: Case) -> None:
    options = {"use_audio_in_video": True, "fps": 1}
    case.open("r", inputs=frozenset({REQUEST_INPUT}), mm_processor_kwargs=options)
    end = case.drain()["r"].end
    assert end is not None
    assert isinstance(end.error, UnsupportedValue)
    assert end.error.message == "mm_processor_kwargs.fps: 1; with use_audio_in_video this model takes 2"


def test_a_template_beside_the_tokenizer(omni25_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((omni25_checkpoint / "config.json").read_bytes())
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    thinker, tokenizer = make_thinker(tmp_path), omni25_tokenizer()
    tokenizer.chat_template = None
    state = thinker.open(StageWork("r", 0, {}, frozenset({REQUEST_INPUT}), frozenset()))
    state.messages = [{"role": "user", "content": "ab"}]
    assert tokenizer.decode(thinker.conversation_tokens(state, tokenizer)) == "ab"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system_prompt": 3}, "system_prompt: 3; expected a text"),
        ({"max_audio_s": 301}, "max_audio_s: 301; this model hears 300 s at most"),
        ({"temperatur": 1}, "did you mean 'temperature'"),
    ],
)
def test_settings_are_checked(omni25_checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_thinker(omni25_checkpoint, **settings)
