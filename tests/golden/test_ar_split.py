"""A stage in two halves, one that computes prompts and one that goes on from them, against the stage in one piece."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engines.ar.engine import ArEngine
from runtime.engines.ar.split import PIECE_BYTES, Blocks, Prefix, block_payloads, forwarded, summary
from runtime.errors import ConfigError, InvalidRequest, StageError
from runtime.payload import Payload
from tests.golden.ar_engines import BLOCK_SIZE, Answer, Driver, assert_nothing_left, import_vllm, make_engine
from tests.golden.ar_split import SplitEngine
from tests.golden.tiny_llama import NUM_BYTES, save_random

NUM_NEW = 24
CHUNK_TOKENS = 48
LENGTHS = (1, 2, 31, 32, 33, 34, 64, 70, 129)
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.4}


def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, NUM_BYTES, (length,), generator=generator).tolist()


PROMPTS = {f"p{length}": prompt_of(length) for length in LENGTHS}


@dataclass
class Engines:
    """tight: a second half whose cache holds less than its four requests need."""

    whole: ArEngine
    producer: ArEngine
    consumer: ArEngine
    tight: ArEngine

    @property
    def all(self) -> tuple[ArEngine, ...]:
        return (self.whole, self.producer, self.consumer, self.tight)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("random")
    save_random(folder)
    made = Engines(
        make_engine(folder),
        make_engine(folder, role="producer", max_num_batched_tokens=CHUNK_TOKENS),
        make_engine(folder, role="consumer"),
        make_engine(folder, role="consumer", num_blocks=14, max_num_seqs=4),
    )
    yield made
    for engine in made.all:
        engine.close()


@pytest.fixture
def split(engines: Engines) -> Iterator[Driver]:
    yield from _driver(engines, engines.consumer)


@pytest.fixture
def tight(engines: Engines) -> Iterator[Driver]:
    yield from _driver(engines, engines.tight)


def _driver(engines: Engines, consumer: ArEngine) -> Iterator[Driver]:
    for engine in engines.all:
        engine.core._scheduler.reset_prefix_cache()
    pair = SplitEngine(engines.producer, consumer)
    yield Driver(pair)
    assert pair.connector.health().num_payloads == 0
    for engine in engines.all:
        assert_nothing_left(engine)
        if engine.core.role:
            assert_nothing_held(engine)


def assert_nothing_held(engine: ArEngine) -> None:
    scheduler, worker = engine.core._scheduler.connector, engine.core._connector
    assert not scheduler.prefixes
    assert not scheduler._requests
    assert not scheduler._num_saved
    assert not scheduler._loads
    assert not worker.saved
    assert not engine._forwarded


def alone(engines: Engines, ids: list[int], **sampling: Any) -> Answer:
    return Driver(engines.whole).answer(ids, **sampling)


class Counts:
    """What a half has done since."""

    def __init__(self, engine: ArEngine) -> None:
        self.engine, self.before = engine, dict(engine.stats())

    def __getitem__(self, name: str) -> float:
        return self.engine.stats()[name] - self.before[name]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_alone(engines: Engines, split: Driver, sampling: dict[str, Any]) -> None:
    for ids in PROMPTS.values():
        producer, consumer = Counts(engines.producer), Counts(engines.consumer)
        answer = split.answer(ids, max_tokens=NUM_NEW, **sampling)
        assert answer.ids == alone(engines, ids, max_tokens=NUM_NEW, **sampling).ids
        assert (producer["computed_tokens"], consumer["computed_tokens"]) == (len(ids), NUM_NEW)
        assert consumer["loaded_tokens"] == len(ids) - 1
        assert answer.end is not None
        assert answer.end.reason == "length"
        expected = {"prompt_tokens": len(ids), "completion_tokens": NUM_NEW, "cached_tokens": 0}
        assert answer.end.usage == expected
        assert split.engine.ends["alone"].usage == expected | {"completion_tokens": 0}
        for engine in engines.all:
            engine.core._scheduler.reset_prefix_cache()


def test_a_fresh_seed_is_told_and_gives_the_answer_again(engines: Engines, split: Driver) -> None:
    answer = split.answer(PROMPTS["p70"], max_tokens=NUM_NEW, temperature=1.0)
    (seed,) = answer.seeds
    assert seed is not None
    assert answer.ids == alone(engines, PROMPTS["p70"], max_tokens=NUM_NEW, temperature=1.0, seed=seed).ids


def test_in_a_batch_with_neighbours_aborted_at_every_point(engines: Engines, split: Driver) -> None:
    """Before the prompt is computed, in the middle of it, on the edge, before the first token and after it."""
    pair = split.engine
    for name in ("computed in part", "on the edge", "not started", "generating"):
        split.ask(name, PROMPTS["p129"], max_tokens=NUM_NEW)
        pair.held.add(name)
    for name, ids in PROMPTS.items():
        split.ask(name, ids, max_tokens=NUM_NEW)
    split.ask("not computed", PROMPTS["p64"], max_tokens=NUM_NEW)
    pair.abort("not computed")
    split.step()
    assert engines.producer.core._scheduler.connector._num_saved, "no prompt is in the middle of its chunks"
    assert any(p.meta.get("first_block") == 0 for p in pair._waiting), "a chunk does not travel before its prompt ends"
    pair.abort("computed in part")
    while "generating" not in pair.ends:
        split.step()
    pair.abort("on the edge")
    pair.held -= {"not started", "generating"}
    for payload in pair._flowing():
        pair._waiting.remove(payload)
        engines.consumer.feed(payload.request_id, payload)
    assert engines.consumer.stats()["queued"] >= 2
    pair.abort("not started")
    while not split.answers.get("generating", Answer()).ids:
        split.step()
    pair.abort("generating")
    split.answers.pop("generating")
    answers = split.drain()
    assert set(answers) == set(PROMPTS)
    for name, ids in PROMPTS.items():
        assert answers[name].ids == alone(engines, ids, max_tokens=NUM_NEW).ids


def test_a_prefix_in_the_cache_of_either_half(engines: Engines, split: Driver) -> None:
    ids = PROMPTS["p129"]
    expected = alone(engines, ids, max_tokens=NUM_NEW).ids
    split.answer(ids, max_tokens=NUM_NEW)
    producer, consumer = Counts(engines.producer), Counts(engines.consumer)
    again = split.answer(ids, max_tokens=NUM_NEW)
    assert again.ids == expected
    assert (producer["computed_tokens"], consumer["computed_tokens"]) == (1, NUM_NEW)
    assert consumer["loaded_tokens"] == 0, "blocks were loaded over those in the cache"
    assert again.end is not None
    assert again.end.usage["cached_tokens"] == 128
    longer = split.answer([*ids[:70], *ids], max_tokens=NUM_NEW)
    assert longer.ids == alone(engines, [*ids[:70], *ids], max_tokens=NUM_NEW).ids
    assert consumer["loaded_tokens"] == 70 + 129 - 1 - 2 * BLOCK_SIZE, "the second half had two blocks of it"


def test_a_preempted_request_computes_its_prompt_again(engines: Engines, tight: Driver) -> None:
    counts = Counts(engines.tight)
    names = ("p64", "p70", "p129", "p34")
    for name in names:
        tight.ask(name, PROMPTS[name], max_tokens=2 * NUM_NEW + 20, **SAMPLED)
    answers = tight.drain()
    assert counts["preemptions"] > 0
    assert counts["loaded_tokens"] == sum(len(PROMPTS[name]) - 1 for name in names), "loaded once each"
    assert counts["computed_tokens"] > sum(len(answers[name].ids) for name in names)
    for name in names:
        assert answers[name].ids == alone(engines, PROMPTS[name], max_tokens=2 * NUM_NEW + 20, **SAMPLED).ids


def test_what_is_refused_is_refused_once(engines: Engines, split: Driver) -> None:
    split.ask("long", prompt_of(300))
    split.ask("kept", PROMPTS["p33"], max_tokens=NUM_NEW)
    answers = split.drain()
    assert answers["long"].end is not None
    assert isinstance(answers["long"].end.error, InvalidRequest)
    assert answers["kept"].ids == alone(engines, PROMPTS["p33"], max_tokens=NUM_NEW).ids


def test_a_prompt_that_is_not_the_one_that_was_computed(engines: Engines, split: Driver) -> None:
    pair = split.engine
    pair.held.add("other")
    split.ask("other", PROMPTS["p70"], max_tokens=NUM_NEW)
    while "other" not in pair.ends:
        split.step()
    first = next(payload for payload in pair._waiting if "input" in payload.meta)
    first.meta["input"]["meta"] = {"ids": PROMPTS["p64"]}
    pair.held.clear()
    end = split.drain()["other"].end
    assert end is not None
    assert isinstance(end.error, StageError)
    assert "64 tokens here and 70 where it was computed" in end.error.message


def test_layouts_are_told(engines: Engines) -> None:
    layout = engines.producer.facts()["kv_layout"]
    assert layout == engines.consumer.facts()["kv_layout"]
    assert (layout["num_layers"], layout["block_size"], layout["dtype"]) == (4, BLOCK_SIZE, "float32")
    assert not layout["has_rows"]
    assert "kv_layout" not in engines.whole.facts()


def test_a_stage_that_is_fed_with_rows_cannot_be_split(tmp_path: Path) -> None:
    from runtime.engines.ar.program import input_rows_arguments

    with pytest.raises(ConfigError, match="kv_role 'consumer': a stage that is fed with rows"):
        make_engine(tmp_path, role="consumer", **input_rows_arguments(("cpu",)))


# ---- what travels ------------------------------------------------------------------------------------------


def blocks_of(first: int, count: int, block_bytes: int = 8) -> Blocks:
    values = np.arange(first, first + count, dtype=np.uint8)[:, None].repeat(block_bytes, 1)
    return Blocks(first, {"a": values, "b": values + 100})


def test_blocks_travel_in_pieces_of_a_bounded_size() -> None:
    payloads = list(block_payloads("r", blocks_of(5, 7, block_bytes=PIECE_BYTES // 4)))
    assert [payload.meta["first_block"] for payload in payloads] == [5, 7, 9, 11]
    assert all(payload.size_bytes <= PIECE_BYTES for payload in payloads)
    (single,) = block_payloads("r", blocks_of(0, 1, block_bytes=2 * PIECE_BYTES))
    assert single.size_bytes > PIECE_BYTES, "a block is never cut"


def test_an_input_comes_out_as_it_went_in() -> None:
    original = Payload("media", "r", 3, "ear->think", meta={"index": 1}, tensors={"data": np.arange(5, dtype=np.uint8)})
    passed = forwarded(original)
    passed.epoch = 3
    assert Prefix().take(passed) == original


def test_lost_and_missing_blocks_are_noticed() -> None:
    prefix, ids = Prefix(), list(range(3 * BLOCK_SIZE + 1))
    with pytest.raises(StageError, match="did not come"):
        prefix.check(ids, BLOCK_SIZE)
    for payload in block_payloads("r", blocks_of(0, 2)):
        prefix.take(payload)
    with pytest.raises(StageError, match="block 3 of the prompt came; expected block 2"):
        prefix.take(next(block_payloads("r", blocks_of(3, 1))))
    prefix.take(summary("r", ids, 32))
    with pytest.raises(StageError, match="2 blocks of the prompt came; expected 3"):
        prefix.check(ids, BLOCK_SIZE)
    prefix.take(next(block_payloads("r", blocks_of(2, 1))))
    prefix.check(ids, BLOCK_SIZE)
    assert prefix.num_cached_tokens == 32


# ---- vLLM's inside -----------------------------------------------------------------------------------------


def test_the_connector_is_one_of_vllms() -> None:
    import_vllm()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from runtime.engines.ar.compat_kv import BlockConnector, connector_arguments

    config = connector_arguments("producer")["kv_transfer_config"]
    assert KVConnectorFactory.get_connector_class(config) is BlockConnector
    assert config.is_kv_producer
    assert not config.is_kv_consumer
    assert not BlockConnector.__abstractmethods__
    for name, ours in vars(BlockConnector).items():
        theirs = vars(KVConnectorBase_V1).get(name)
        if inspect.isfunction(theirs) and not name.startswith("__"):
            assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def test_where_vllm_calls_the_connector() -> None:
    import_vllm()
    from vllm.distributed.kv_transfer import kv_transfer_state
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

    assert "_KV_CONNECTOR_AGENT" in vars(kv_transfer_state)
    assert "return _KV_CONNECTOR_AGENT" in inspect.getsource(kv_transfer_state.get_kv_transfer_group)
    around = inspect.getsource(KVConnectorModelRunnerMixin._get_kv_connector_output)
    calls = [around.index(call) for call in ("start_load_kv(", "yield output", "wait_for_save()")]
    assert calls == sorted(calls), "loads come before the forward pass, saves after it"
    runner = inspect.getsource(GPUModelRunner.execute_model)
    assert runner.index("self._update_states(") < runner.index("self.maybe_get_kv_connector_output(")
    schedule = inspect.getsource(Scheduler.schedule)
    assert "num_external_computed_tokens > 0:\n                    # load_kv_async is False here" in schedule
    finish = inspect.getsource(Scheduler._free_request)
    assert finish.index("self._connector_finished(request)") < finish.index("self._free_blocks(request)")
