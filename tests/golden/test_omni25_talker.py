"""Qwen2.5-Omni's talker as a stage against transformers: every code, however the thinker's rows come."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from runtime.engines.ar.engine import ArEngine
from runtime.errors import ConfigError, InvalidRequest, WeightsError
from runtime.payload import Tensor
from tests.golden.ar_engines import assert_nothing_left
from tests.golden.omni25_reference import NAMES, VOICE
from tests.golden.omni_reference import NUM_CODEC_TOKENS
from tests.golden.omni_stages import StageDriver, Stream, context, make_omni_engine
from tests.golden.tiny_qwen2_5_omni import HEAD_DIM, NUM_KV_HEADS, TALKER_LAYERS

if TYPE_CHECKING:
    from tests.golden.omni25_reference import Reference25

FAMILY = "qwen2_5_omni"
KV_BYTES_PER_TOKEN = TALKER_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4
CHUNK_TOKENS = 96
EDGE = "thinker->talker"
HIDDEN = "hidden_states"
CODES = "codec_codes"
SAMPLED = {"stage_sampling": {"temperature": 0.9}}


class Case(StageDriver):
    """Feeds the talker with what the thinker has in transformers."""

    def __init__(self, engine: ArEngine, references: dict[str, Reference25]) -> None:
        super().__init__(engine)
        self.references = references
        self.fed: dict[str, int] = {}

    def begin(self, name: str, request_id: str | None = None, **params: Any) -> None:
        """The prompt, and nothing of what the thinker said."""
        request_id, num_prompt = request_id or name, len(self.references[name].prompt_ids)
        self.open(request_id, CODES, inputs=frozenset({EDGE}), **{"voice": VOICE, **params})
        self.fed[request_id] = 0
        positions = self.references[name].positions.numpy().astype(np.int32)
        self._feed_rows(name, request_id, num_prompt, {"positions": positions})

    def more(self, name: str, num_rows: int, request_id: str | None = None) -> None:
        """Rows of what the thinker said, and with its last one the end."""
        request_id = request_id or name
        self._feed_rows(name, request_id, num_rows)
        if self.fed[request_id] == len(self.references[name].rows):
            self.feed(request_id, EDGE, HIDDEN, last=True)

    def _feed_rows(
        self, name: str, request_id: str, num_rows: int, more: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        rows = self.references[name].rows[self.fed[request_id] :][:num_rows]
        self.fed[request_id] += len(rows)
        if len(rows):
            self.feed(request_id, EDGE, HIDDEN, {"dtype": "float32"}, {"rows": rows.numpy(), **more})

    def whole(self, name: str, request_id: str | None = None, **params: Any) -> None:
        self.begin(name, request_id, **params)
        self.more(name, 10_000, request_id)

    def codes_of(self, name: str, **params: Any) -> list[int]:
        self.whole(name, **params)
        return self.drain()[name].joined("codes", axis=1)[0].tolist()

    def check(self, stream: Stream, name: str) -> None:
        reference = self.references[name]
        codes = stream.joined("codes", axis=1)
        assert codes.shape[0] == 1
        assert codes[0].tolist() == reference.codes
        assert stream.end is not None
        assert stream.end.error is None
        assert stream.end.reason == ("stop" if reference.ended else "length")


def make_talker(folder: Path, **settings: Any) -> Any:
    from runtime.programs.qwen2_5_omni.talker import load

    given = {"temperature": 0.0, "max_tokens": NUM_CODEC_TOKENS, **settings}
    return load(context(folder, "talker", family=FAMILY, **given))


@pytest.fixture(scope="module")
def engine(omni25_checkpoint: Path) -> Iterator[ArEngine]:
    program = make_talker(omni25_checkpoint)
    engine = make_omni_engine(
        omni25_checkpoint,
        program,
        KV_BYTES_PER_TOKEN,
        num_blocks=17,
        max_model_len=512,
        max_num_batched_tokens=CHUNK_TOKENS,
    )
    yield engine
    engine.close()


@pytest.fixture
def case(engine: ArEngine, omni25_references: dict[str, Reference25]) -> Iterator[Case]:
    yield Case(engine, omni25_references)
    assert_nothing_left(engine)
    assert not engine.core._tapped
    assert not engine.core._inputs


def test_the_reference_tells_right_from_wrong(omni25_references: dict[str, Reference25]) -> None:
    references = list(omni25_references.values())
    assert len({tuple(r.text_ids) for r in references}) == len({tuple(r.codes) for r in references}) == len(references)
    assert {r.ended for r in references} == {True, False}
    assert len({code for r in references for code in r.codes}) > 20


@pytest.mark.parametrize("name", NAMES)
def test_alone(case: Case, name: str) -> None:
    """The whole of what the thinker said at once, as a whole edge brings it."""
    case.whole(name)
    case.step()
    is_chunked = len(case.references[name].prompt_ids) > CHUNK_TOKENS
    assert bool(case.streams) != is_chunked
    case.check(case.drain()[name], name)


def test_in_a_batch_with_aborted_neighbours(case: Case) -> None:
    for name in NAMES:
        case.whole(name)
    for doomed in ("short", "question"):
        case.whole(doomed, f"doomed {doomed}")
        case.step()
    for doomed in ("short", "question"):
        case.engine.abort(f"doomed {doomed}")
        case.streams.pop(f"doomed {doomed}", None)
    streams = case.drain()
    assert set(streams) == set(NAMES)
    for name, stream in streams.items():
        case.check(stream, name)


def test_preemption(case: Case) -> None:
    """Prompts of two blocks each fill the cache, and each speech needs a third one."""
    before = case.engine.stats()["preemptions"]
    for number in range(8):
        case.whole("question", f"{number}")
    streams = case.drain()
    assert case.engine.stats()["preemptions"] > before
    assert len(streams) == 8
    for stream in streams.values():
        case.check(stream, "question")


def test_a_code_waits_for_its_row(case: Case) -> None:
    """One row at a time: each lets exactly one more code out, and in between there is nothing to do."""
    case.begin("question")
    assert case.engine.next_step_s() is None, "it began before the thinker said anything"
    case.more("question", 1)
    for number in range(1, 6):
        assert case.engine.next_step_s() == 0.0
        case.step()
        assert case.engine.next_step_s() is None, "it would step without the next row"
        assert len(case.streams["question"].payloads) == number
        case.more("question", 1)
    case.more("question", 10_000)
    case.check(case.drain()["question"], "question")


def test_a_thinker_without_a_word(case: Case) -> None:
    case.begin("short")
    case.feed("short", EDGE, HIDDEN, last=True)
    stream = case.drain()["short"]
    assert stream.payloads == []
    assert stream.end is not None
    assert stream.end.error is None


def test_seeded_sampling_alone_and_in_company(case: Case) -> None:
    alone = case.codes_of("short", seed=7, **SAMPLED)
    case.whole("short", "again", seed=7, **SAMPLED)
    for number, name in enumerate(("question", "chinese", "audio")):
        case.whole(name, f"stranger {number}", **SAMPLED)
        case.step()
    again = case.drain()["again"]
    assert again.joined("codes", axis=1)[0].tolist() == alone
    assert {p.meta["seed"] for p in again.payloads} == {7}
    assert case.codes_of("short", seed=8, **SAMPLED) != alone


def test_voices(case: Case) -> None:
    default = case.codes_of("question", voice=None)
    assert default == case.codes_of("question", voice="chelsie") != case.references["question"].codes
    case.open("bad", CODES, inputs=frozenset({EDGE}), voice="nobody")
    end = case.drain()["bad"].end
    assert end is not None
    assert isinstance(end.error, InvalidRequest)
    assert end.error.message == "voice: 'nobody'; expected one of chelsie, ethan"


def test_what_is_never_said(engine: ArEngine) -> None:
    model = engine.core._runner.model
    said = torch.isfinite(model.never).nonzero().flatten().tolist()
    config = engine.program.config
    assert said == [*range(config.dit["num_embeds"] + 1), *sorted(config.end_token_ids)]


def test_settings_and_files_are_checked(omni25_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        make_talker(omni25_checkpoint, temperatur=1)
    shutil.copy(omni25_checkpoint / "config.json", tmp_path)
    with pytest.raises(WeightsError, match=r"spk_dict\.pt is missing"):
        make_talker(tmp_path)
    (tmp_path / "spk_dict.pt").write_bytes(b"no archive")
    with pytest.raises(WeightsError, match=r"stage talker: .*spk_dict\.pt: "):
        make_talker(tmp_path)
