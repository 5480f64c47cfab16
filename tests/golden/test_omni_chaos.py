"""Qwen3-Omni under abuse: clients that leave at every point while the talker is behind, and stages that are killed at
every phase of a request. One terminal for each request, nothing kept by anybody, and what comes later is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime.deployment import Deployment
from runtime.orchestrator import RequestHandle
from runtime.payload import Payload
from runtime.plan import EdgeMode, Modality, Plan
from runtime.requests import TERMINALS, AbortedRequest, Delta, Done, Event, Failed, ModalityEnd, RequestSpec
from tests.deploy import AUDIO, TEXT, ask, collect, deployed, until
from tests.golden.omni_plan import STAGES, WEIGHTS, omni_plan

START_TIMEOUT_S, ANSWER_TIMEOUT_S = 250.0, 500.0
NUM_TEXT_TOKENS, LONG_TEXT_TOKENS = 16, 200
PROMPTS = ("Say something.", "And now?", "你好，请说点什么。", "Tell me about rain, rivers and the sea. " * 3)
TOLERANCE = 1e-5

pytestmark = pytest.mark.timeout(900)  # two processes import vllm, again after each kill


@pytest.fixture(autouse=True)
def weights(omni_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / WEIGHTS).symlink_to(omni_checkpoint)
    monkeypatch.setenv("OMNICTL_WEIGHTS_DIR", str(tmp_path / "weights"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def slow_talker_plan() -> Plan:
    """The talker steps two requests at a time, so that it is behind."""
    plan = omni_plan(EdgeMode.CHUNKED, tuple((stage,) for stage in STAGES))
    stages = {stage.name: stage for stage in plan.stages}
    talker = stages["talker"]
    stages["talker"] = talker.model_copy(update={"engine_settings": {**talker.engine_settings, "max_num_seqs": 2}})
    patient = {"abort_timeout_s": 200.0, "beat_timeout_s": 200.0, "queue_timeout_s": 500.0, "max_queued": 200}
    return plan.model_copy(
        update={
            "stages": tuple(s.model_copy(update={"slots": 24, "stall_timeout_s": 200.0}) for s in stages.values()),
            "limits": plan.limits.model_copy(update=patient),
            "restarts": plan.restarts.model_copy(update={"backoff_s": 0.0, "window_s": 0.001}),
        }
    )


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Deployment]:
    async with deployed(slow_talker_plan(), folder, wait=False) as deployment:
        await until(lambda: deployment.phase in ("ready", "failed"), START_TIMEOUT_S, deployment)
        assert deployment.phase == "ready", deployment.failure
        yield deployment


def request(prompt: str, max_tokens: int = NUM_TEXT_TOKENS) -> RequestSpec:
    messages = [{"role": "user", "content": prompt}]
    inputs = {TEXT: [Payload("text", "", meta={"messages": messages})]}
    params = {"sampling": {"max_tokens": max_tokens}, "voice": "ethan"}
    return RequestSpec(task="chat", modalities=(TEXT, AUDIO), inputs=inputs, params=params)


def answer(events: list[Event]) -> tuple[str, np.ndarray]:
    """Text and samples of an answer that came to its end."""
    assert isinstance(events[-1], Done), events[-1]
    deltas = [event for event in events if isinstance(event, Delta)]
    text = "".join(d.payload.meta["text"] for d in deltas if d.modality is TEXT)
    return text, np.concatenate([d.payload.tensors["samples"] for d in deltas if d.modality is AUDIO])


def assert_same(found: tuple[str, np.ndarray], expected: tuple[str, np.ndarray]) -> None:
    assert found[0] == expected[0]
    assert found[1].shape == expected[1].shape
    assert np.abs(found[1] - expected[1]).max() <= TOLERANCE


async def until_nothing_is_kept(deployment: Deployment) -> None:
    """By the engines' own counts: no request, no block of a KV cache, no payload in anybody's memory."""
    kept = ("bound", "running", "queued", "kv_blocks_used", "payload_bytes")

    def nothing() -> bool:
        status = deployment.status()
        rows = [row[key] for row in status["stages"] for key in kept]
        return not any(rows) and status["open_requests"] == status["queued_requests"] == 0

    await until(nothing, deployment=deployment)
    assert deployment._exchange.used_bytes == 0


# ---- clients that leave -----------------------------------------------------------------------------------


async def _half_of_the_clients_leave(deployment: Deployment, num_requests: int) -> None:
    dice = random.Random(num_requests)
    expected = {prompt: answer(await ask(deployment, request(prompt))) for prompt in PROMPTS}

    async def one(number: int) -> list[Event]:
        prompt = PROMPTS[number % len(PROMPTS)]
        if number % 2 == 0:
            return await ask(deployment, request(prompt), ANSWER_TIMEOUT_S)
        handle = await deployment.submit(request(prompt, LONG_TEXT_TOKENS))
        num_events = dice.randrange(30)
        events = aiter(handle)
        read: list[Event] = []
        while len(read) < num_events:
            read.append(await anext(events))
            if isinstance(read[-1], TERMINALS):
                return read
        await handle.abort()
        return read + await collect(handle, ANSWER_TIMEOUT_S)

    found = await asyncio.gather(*(one(number) for number in range(num_requests)))
    for number, events in enumerate(found):
        assert [isinstance(e, TERMINALS) for e in events].count(True) == 1
        if number % 2 == 0:
            assert_same(answer(events), expected[PROMPTS[number % len(PROMPTS)]])
    num_aborted = sum(isinstance(events[-1], AbortedRequest) for events in found)
    assert num_aborted > num_requests // 4, "each of the others ended before its client left"
    await until_nothing_is_kept(deployment)
    assert all(row["restarts"] == 0 for row in deployment.status()["stages"])
    assert_same(answer(await ask(deployment, request(PROMPTS[0]))), expected[PROMPTS[0]])


# ---- stages that are killed -------------------------------------------------------------------------------


def pid_of(deployment: Deployment, stage: str) -> int:
    return next(int(row["pid"]) for row in deployment.status()["stages"] if row["stage"] == stage)


@contextlib.contextmanager
def stopped(deployment: Deployment, *stages: str) -> Iterator[None]:
    """Their processes stand still within the block, those that are still there."""
    pids = [pid_of(deployment, stage) for stage in stages]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def read_until(events: AsyncIterator[Event], kind: type, modality: Modality) -> None:
    async for event in events:
        if isinstance(event, kind) and event.modality is modality:  # type: ignore[attr-defined]
            return
    raise AssertionError("it ended")


async def kill_in_phase(deployment: Deployment, phase: str, stage: str, spec: RequestSpec) -> RequestHandle:
    """Who has to be behind stands still until the stage is killed."""
    with contextlib.ExitStack() as behind:
        if phase == "before the first token":
            behind.enter_context(stopped(deployment, "thinker"))
        elif phase == "only the vocoder":
            behind.enter_context(stopped(deployment, "code2wav"))
        handle = await deployment.submit(spec)
        events = aiter(handle)
        if phase != "before the first token":
            await read_until(events, Delta, TEXT)
        if phase == "the thinker":
            behind.enter_context(stopped(deployment, "thinker"))
        elif phase == "only the talker":
            behind.enter_context(stopped(deployment, "talker"))
            await read_until(events, ModalityEnd, TEXT)
        elif phase == "only the vocoder":
            request = deployment.orchestrator._requests[handle.request_id]
            await until(lambda: request.unfinished == ["code2wav"], deployment=deployment)
        os.kill(pid_of(deployment, stage), signal.SIGKILL)
        return handle


PHASES = ("before the first token", "the thinker", "only the talker", "only the vocoder")
ALL_KILLS = [(phase, stage) for phase in PHASES for stage in STAGES]
FEW_KILLS = [("the thinker", "talker"), ("only the vocoder", "code2wav")]


async def _stages_are_killed(deployment: Deployment, kills: Sequence[tuple[str, str]]) -> None:
    expected = answer(await ask(deployment, request(PROMPTS[0], LONG_TEXT_TOKENS)))
    for number, (phase, stage) in enumerate(kills, start=1):
        handle = await kill_in_phase(deployment, phase, stage, request(PROMPTS[0], LONG_TEXT_TOKENS))
        events = await collect(handle)
        assert [isinstance(e, TERMINALS) for e in events].count(True) == 1, (phase, stage)
        if isinstance(events[-1], Failed):
            assert "SIGKILL" in str(events[-1].error), (phase, stage)

        def back(restarts: int = number) -> bool:
            status = deployment.status()
            found = sum(row["restarts"] for row in status["stages"])
            return status["phase"] == "ready" and found == restarts

        await until(back, START_TIMEOUT_S, deployment)
        assert_same(answer(await ask(deployment, request(PROMPTS[0], LONG_TEXT_TOKENS))), expected)
        await until_nothing_is_kept(deployment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_requests", "kills"),
    [(40, FEW_KILLS), pytest.param(200, ALL_KILLS, marks=pytest.mark.timeout(3000))],
    ids=["40 requests", "200 requests"],
)
async def test_clients_leave_and_stages_are_killed(
    tmp_path: Path, num_requests: int, kills: Sequence[tuple[str, str]]
) -> None:
    async with serving(tmp_path) as deployment:
        await _half_of_the_clients_leave(deployment, num_requests)
        await _stages_are_killed(deployment, kills)
