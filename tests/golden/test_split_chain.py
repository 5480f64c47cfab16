"""A stage in two halves as a deployment: equal to the stage in one piece, whatever happens to its neighbours."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.deployment import Deployment
from runtime.engines.ar.engine import ArEngine, load
from runtime.engines.base import LoadContext
from runtime.errors import StageDied
from runtime.payload import Payload
from runtime.plan import REQUEST_INPUT, EdgeMode
from runtime.requests import AbortedRequest, Delta, Done, Event, Failed, RequestSpec
from tests.deploy import TEXT, ask, deployed, until
from tests.golden.ar_engines import Driver, import_vllm
from tests.golden.split_plan import WEIGHTS, split_plan, stage
from tests.golden.tiny_llama import save_random

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 240.0
SETTLE_TIMEOUT_S = 60.0
NUM_NEW = 24
CONTENTS = ("a", "Hello there.", "What is two plus two? " * 5, "Tell me of the fox and the moon. " * 12)
SAMPLED = {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.2}

pytestmark = pytest.mark.timeout(900)  # two processes and this one import vllm


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    save_random(folder / WEIGHTS)
    return folder


@pytest.fixture(autouse=True)
def settings(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICTL_WEIGHTS_DIR", str(weights))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def whole(weights: Path) -> Iterator[ArEngine]:
    """The stage in one piece, in this process."""
    import_vllm()
    engine = load(LoadContext(stage("thinker"), ("cpu",), 1, weights / WEIGHTS, lambda phase: None))
    yield engine
    engine.close()


def messages(content: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def request(content: str, **sampling: Any) -> RequestSpec:
    params = {"sampling": {"max_tokens": NUM_NEW, **sampling}}
    return RequestSpec(
        task="chat",
        modalities=(TEXT,),
        inputs={TEXT: [Payload("text", "", meta={"messages": messages(content)})]},
        params=params,
    )


def expected(whole: ArEngine, content: str, **sampling: Any) -> str:
    driver = Driver(whole)
    driver.open("alone", REQUEST_INPUT, max_tokens=NUM_NEW, **sampling)
    driver.feed("alone", messages=messages(content))
    return driver.drain()["alone"].text


def text_of(events: list[Event]) -> str:
    assert isinstance(events[-1], Done), events[-1]
    return "".join(e.payload.meta["text"] for e in events if isinstance(e, Delta))


def counts(deployment: Deployment, name: str) -> dict[str, float]:
    stats = deployment.orchestrator.pools.replica(name, 0).stats
    return dict(stats.counters) if stats is not None else {}


async def ready(deployment: Deployment) -> None:
    await until(lambda: deployment.phase in ("ready", "failed"), START_TIMEOUT_S, deployment)
    assert deployment.phase == "ready", deployment.failure


@pytest.mark.parametrize(
    ("mode", "one_process"),
    [
        (EdgeMode.CHUNKED, False),
        pytest.param(EdgeMode.WHOLE, False, marks=pytest.mark.slow),
        pytest.param(EdgeMode.CHUNKED, True, marks=pytest.mark.slow),
    ],
)
async def test_the_halves(tmp_path: Path, whole: ArEngine, mode: EdgeMode, one_process: bool) -> None:
    async with deployed(split_plan(mode, one_process=one_process), tmp_path, wait=False) as deployment:
        await ready(deployment)
        await _each_half_does_its_part(deployment, whole)
        await _together_with_aborted_neighbours(deployment, whole)
        if not one_process:
            await _the_first_half_dies(deployment)


async def _each_half_does_its_part(deployment: Deployment, whole: ArEngine) -> None:
    num_prompt = num_new = 0
    for content in CONTENTS:
        for sampling in ({}, SAMPLED):
            events = await ask(deployment, request(content, **sampling), ANSWER_TIMEOUT_S)
            assert text_of(events) == expected(whole, content, **sampling)
            usage = events[-1].usage
            assert usage["prefill"]["prompt_tokens"] == usage["thinker"]["prompt_tokens"]
            assert usage["prefill"]["completion_tokens"] == 0
            num_prompt += int(usage["thinker"]["prompt_tokens"])
            num_new += int(usage["thinker"]["completion_tokens"])
    await until(lambda: counts(deployment, "thinker").get("generated_tokens", 0) >= num_new, deployment=deployment)
    thinker = counts(deployment, "thinker")
    assert thinker["computed_tokens"] == thinker["generated_tokens"], "the second half computed some of a prompt"
    assert thinker["loaded_tokens"] > 0
    # every prompt came twice, the second time from the cache
    await _until_counted(deployment, "prefill", "computed_tokens", num_prompt / 2)


async def _until_counted(deployment: Deployment, name: str, event: str, least: float) -> None:
    """Counts come with the beats."""
    await until(lambda: counts(deployment, name).get(event, 0) >= least, SETTLE_TIMEOUT_S, deployment)


async def _together_with_aborted_neighbours(deployment: Deployment, whole: ArEngine) -> None:
    doomed = [await deployment.submit(request(CONTENTS[3] + str(n), max_tokens=60)) for n in range(3)]
    kept = [asyncio.create_task(ask(deployment, request(c, **SAMPLED), ANSWER_TIMEOUT_S)) for c in CONTENTS]
    reports = await asyncio.gather(doomed[0].abort(), doomed[2].abort())
    async for event in doomed[1]:
        if isinstance(event, Delta):
            break
    for report in (*reports, await doomed[1].abort()):
        assert not report.missing
    assert isinstance([event async for event in doomed[2]][-1], AbortedRequest)
    for content, task in zip(CONTENTS, kept, strict=True):
        assert text_of(await task) == expected(whole, content, **SAMPLED)
    await _nothing_left(deployment)


async def _the_first_half_dies(deployment: Deployment) -> None:
    """With a request in it: one terminal, nothing left in the second half."""
    (pid,) = {row["pid"] for row in deployment.status()["stages"] if row["stage"] == "prefill"}
    os.kill(pid, signal.SIGSTOP)
    handle = await deployment.submit(request(CONTENTS[2]))
    os.kill(pid, signal.SIGKILL)
    events = [event async for event in handle]
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, StageDied)
    assert not any(isinstance(event, Done | Failed | AbortedRequest) for event in events[:-1])
    await _nothing_left(deployment)


async def _nothing_left(deployment: Deployment) -> None:
    await until(lambda: deployment.orchestrator.num_open == 0, deployment=deployment)
    await until(
        lambda: not any(r["running"] or r["queued"] for r in deployment.status()["stages"]), deployment=deployment
    )


@pytest.mark.slow
async def test_halves_that_do_not_fit_are_refused_at_start(tmp_path: Path) -> None:
    async with deployed(split_plan(block_size=64), tmp_path, wait=False) as deployment:
        await until(lambda: deployment.phase in ("ready", "failed"), START_TIMEOUT_S, deployment)
        assert deployment.phase == "failed"
        assert "block_size is 32 where prompts are computed and 64" in str(deployment.failure)
