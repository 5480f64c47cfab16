"""Qwen3-Omni's thinker in two halves against transformers: the rows of the prompt reach the talker all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.engines.ar.engine import ArEngine
from runtime.plan import ConnectorKind, EdgeMode, EdgePlan, PayloadKind, Plan, ProcessPlan, ReplicaPlan
from tests.deploy import ask, deployed
from tests.golden.ar_engines import assert_nothing_left
from tests.golden.ar_split import SplitEngine
from tests.golden.omni_plan import WEIGHTS, omni_plan
from tests.golden.omni_reference import PARTS
from tests.golden.omni_stages import make_omni_engine
from tests.golden.test_omni_chain import ANSWER_TIMEOUT_S, TWO, check, count, ready, request
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
    """Media too: the second half decodes them again, for positions and for what a preempted request computes."""
    loaded = roomy.engine.consumer.stats()["loaded_tokens"]
    for name in PARTS:
        roomy.ask(name, name, HIDDEN)
    streams = roomy.drain()
    for name in PARTS:
        roomy.check(streams[name], name)
    num_prompt_tokens = sum(len(roomy.references[name].prompt_ids) for name in PARTS)
    loaded = roomy.engine.consumer.stats()["loaded_tokens"] - loaded
    assert num_prompt_tokens / 2 < loaded <= num_prompt_tokens - len(PARTS)


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


def split_plan() -> Plan:
    """prefill -> thinker -> talker -> code2wav, the halves of the thinker in processes of their own."""
    plan = omni_plan(EdgeMode.CHUNKED, TWO)
    whole = plan.stage("thinker")
    first, second = (
        whole.model_copy(update={"name": name, "engine_settings": {**whole.engine_settings, "kv_role": role}})
        for name, role in (("prefill", "producer"), ("thinker", "consumer"))
    )
    edge = EdgePlan(
        source="prefill",
        target="thinker",
        payload=PayloadKind.KV_BLOCKS,
        mode=EdgeMode.CHUNKED,
        connector=ConnectorKind.SHM,
    )
    process = ProcessPlan(name="prefill", replicas=(ReplicaPlan(stage="prefill", index=0),), devices=("cpu",))
    chat = plan.tasks["chat"]
    return plan.model_copy(
        update={
            "stages": (first, second, *plan.stages[1:]),
            "edges": (edge, *plan.edges),
            "processes": (process, *plan.processes),
            "tasks": {"chat": chat.model_copy(update={"inputs": dict.fromkeys(chat.inputs, "prefill")})},
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # three processes import vllm
async def test_the_chain(
    tmp_path: Path,
    omni_checkpoint: Path,
    omni_references: dict[str, Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From text and media to the waveform: the talker gets the rows of a prompt that its thinker has not computed."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / WEIGHTS).symlink_to(omni_checkpoint)
    monkeypatch.setenv("OMNICTL_WEIGHTS_DIR", str(tmp_path / "weights"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    async with deployed(split_plan(), tmp_path, wait=False) as deployment:
        await ready(deployment)
        for name in ("short", "long", "audio", "image", "watch"):
            check(await ask(deployment, request(name), ANSWER_TIMEOUT_S), omni_references[name])
        assert count(deployment, "prefill", "computed_tokens") > 0
