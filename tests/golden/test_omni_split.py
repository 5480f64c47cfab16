"""Qwen3-Omni's thinker in two halves against transformers: the rows of the prompt reach the talker all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.engines.ar.engine import ArEngine
from tests.golden.ar_engines import assert_nothing_left
from tests.golden.ar_split import SplitEngine
from tests.golden.omni_reference import PARTS
from tests.golden.omni_stages import make_omni_engine
from tests.golden.test_omni_thinker import CHUNK_TOKENS, HIDDEN, KV_BYTES_PER_TOKEN, Case, make_thinker

if TYPE_CHECKING:
    from tests.golden.omni_reference import Reference

Halves = tuple[ArEngine, ArEngine, ArEngine, dict[str, list[int]]]


@pytest.fixture(scope="module")
def halves(omni_checkpoint: Path) -> Iterator[Halves]:
    """A first half that computes in chunks, two second ones of which the other has too little cache, tokens seen."""
    first, second = make_thinker(omni_checkpoint)[0], make_thinker(omni_checkpoint)

    def make(role: str, program: Any, **arguments: Any) -> ArEngine:
        return make_omni_engine(omni_checkpoint, program, KV_BYTES_PER_TOKEN, role=role, **arguments)

    engines = (
        make("producer", first, max_num_batched_tokens=CHUNK_TOKENS),
        make("consumer", second[0]),
        make("consumer", second[0], num_blocks=9, max_model_len=256, max_num_seqs=4),
    )
    yield *engines, second[1]
    for engine in engines:
        engine.close()


@pytest.fixture
def roomy(halves: Halves, omni_references: dict[str, Reference]) -> Iterator[Case]:
    yield from _case(halves, halves[1], omni_references)


@pytest.fixture
def tight(halves: Halves, omni_references: dict[str, Reference]) -> Iterator[Case]:
    yield from _case(halves, halves[2], omni_references)


def _case(halves: Halves, consumer: ArEngine, references: dict[str, Reference]) -> Iterator[Case]:
    for engine in halves[:3]:
        engine.core._scheduler.reset_prefix_cache()
    yield Case(SplitEngine(halves[0], consumer), halves[3], references)
    for engine in halves[:3]:
        assert_nothing_left(engine)
        assert not engine.core._tapped
        assert engine.core._runner.store.num_requests == 0


def test_in_a_batch(roomy: Case) -> None:
    """Media too: the second half decodes them again, for positions and for the event that it has to compute again."""
    loaded = roomy.engine.consumer.stats()["loaded_tokens"]
    for name in PARTS:
        roomy.ask(name, name, HIDDEN)
    streams = roomy.drain()
    for name in PARTS:
        roomy.check(streams[name], name)
    num_prompt_tokens = sum(len(roomy.references[name].prompt_ids) for name in PARTS)
    assert roomy.engine.consumer.stats()["loaded_tokens"] - loaded <= num_prompt_tokens - len(PARTS)
    assert roomy.engine.consumer.stats()["loaded_tokens"] - loaded > num_prompt_tokens / 2


def test_rows_of_a_prefix_in_either_cache(roomy: Case) -> None:
    for request_id in ("first", "second"):
        roomy.ask(request_id, "long", HIDDEN)
        roomy.check(roomy.drain()[request_id], "long", request_id)
    assert roomy.engine.ends["second"].usage["cached_tokens"] > 0


def test_preemption(tight: Case) -> None:
    """What was loaded is computed again: media and rows as well, and no row goes out twice."""
    before = tight.engine.consumer.stats()["preemptions"]
    names = ("audio", "chinese", "question", "short")
    for name in names:
        tight.ask(name, name, HIDDEN)
    streams = tight.drain()
    assert tight.engine.consumer.stats()["preemptions"] > before
    for name in names:
        tight.check(streams[name], name)
