"""Qwen3-Omni as a deployment: three stages in worker processes of their own, equal to transformers from end to end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from runtime.deployment import Deployment
from runtime.payload import Payload
from runtime.plan import EdgeMode, Modality
from runtime.requests import AbortedRequest, Delta, Done, Event, Failed, ModalityEnd, RequestSpec
from tests.deploy import AUDIO, TEXT, ask, deployed, until
from tests.golden.omni_plan import NUM_FRAMES, WEIGHTS, omni_plan
from tests.golden.omni_reference import NUM_TEXT_TOKENS, OPTIONS, PARTS, messages_of
from tests.golden.omni_stages import media_payloads
from tests.golden.tiny_qwen3_omni import omni_tokenizer

if TYPE_CHECKING:
    from tests.golden.omni_reference import Reference

START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 240.0
TOLERANCE = 1e-5
CHUNK_TOKENS = 64
TIGHT_CACHE_BYTES = 18 * 32 * 2048
"""18 blocks of the thinker; the longest prompt takes 12."""
ONE = (("thinker", "talker", "code2wav"),)
THREE = (("thinker",), ("talker",), ("code2wav",))
TWO = (("thinker",), ("talker", "code2wav"))

pytestmark = pytest.mark.timeout(900)  # two processes import vllm, on a machine that may be busy


@pytest.fixture(autouse=True)
def weights(omni_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / WEIGHTS).symlink_to(omni_checkpoint)
    monkeypatch.setenv("OMNICTL_WEIGHTS_DIR", str(tmp_path / "weights"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def request(name: str, modalities: tuple[Modality, ...] = (TEXT, AUDIO), **sampling: Any) -> RequestSpec:
    inputs = {TEXT: [Payload("text", "", meta={"messages": messages_of(name)})]}
    for payload in media_payloads(name):
        inputs.setdefault(Modality(payload.meta["modality"]), []).append(payload)
    params = {
        "sampling": {"max_tokens": NUM_TEXT_TOKENS, **sampling},
        "voice": "ethan",
        "mm_processor_kwargs": OPTIONS.get(name, {}),
    }
    return RequestSpec(task="chat", modalities=modalities, inputs=inputs, params=params)


def text_of(events: list[Event]) -> str:
    return "".join(e.payload.meta["text"] for e in events if isinstance(e, Delta) and e.modality is TEXT)


def samples_of(events: list[Event]) -> np.ndarray:
    return np.concatenate(
        [e.payload.tensors["samples"] for e in events if isinstance(e, Delta) and e.modality is AUDIO]
    )


def check(events: list[Event], reference: Reference) -> None:
    """Text token by token (as text), the waveform sample by sample."""
    done = events[-1]
    assert isinstance(done, Done), done
    expected_text = omni_tokenizer().decode(reference.text_ids, skip_special_tokens=True)
    assert text_of(events).rstrip("\N{REPLACEMENT CHARACTER}") == expected_text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert done.usage["thinker"]["completion_tokens"] == len(reference.text_ids)
    assert done.usage["code2wav"]["frames"] == reference.codes.shape[1] <= NUM_FRAMES
    samples = samples_of(events)
    assert samples.shape == reference.samples.shape
    assert np.abs(samples - reference.samples.numpy()).max() <= TOLERANCE


async def ready(deployment: Deployment) -> None:
    await until(lambda: deployment.phase in ("ready", "failed"), START_TIMEOUT_S, deployment)
    assert deployment.phase == "ready", deployment.failure


def requests_of(deployment: Deployment) -> dict[str, int]:
    return {row["stage"]: row["requests"] for row in deployment.status()["stages"]}


def count(deployment: Deployment, stage: str, event: str) -> float:
    samples = [sample for metric in deployment.metrics.collect() for sample in metric.samples]
    found = [s.value for s in samples if (s.labels.get("stage"), s.labels.get("event")) == (stage, event)]
    return sum(found)


@pytest.mark.parametrize(
    ("mode", "processes"), [(EdgeMode.CHUNKED, THREE), pytest.param(EdgeMode.WHOLE, TWO, marks=pytest.mark.slow)]
)
async def test_the_chain(
    tmp_path: Path, omni_references: dict[str, Reference], mode: EdgeMode, processes: tuple[tuple[str, ...], ...]
) -> None:
    async with deployed(omni_plan(mode, processes), tmp_path, wait=False) as deployment:
        await ready(deployment)
        await _text_only_leaves_speech_alone(deployment)
        for name in ("short", "long", "chinese", "audio", "image", "watch"):
            check(await ask(deployment, request(name), ANSWER_TIMEOUT_S), omni_references[name])
        await _all_together(deployment, omni_references)
        await _audio_starts_where_it_should(deployment, mode)
        await _aborted_and_refused(deployment, omni_references)


@pytest.mark.slow
@pytest.mark.parametrize("max_num_seqs", [1, 2, 8])
@pytest.mark.parametrize("processes", [ONE, THREE])
@pytest.mark.parametrize("mode", EdgeMode)
async def test_every_way_to_run_it(
    tmp_path: Path,
    omni_references: dict[str, Reference],
    mode: EdgeMode,
    processes: tuple[tuple[str, ...], ...],
    max_num_seqs: int,
) -> None:
    """Prompts in chunks; where requests run beside each other, more of them than the cache of either engine holds."""
    settings = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": CHUNK_TOKENS}
    plan = omni_plan(mode, processes, settings, cache_bytes=TIGHT_CACHE_BYTES)
    async with deployed(plan, tmp_path, wait=False) as deployment:
        await ready(deployment)
        await _all_together(deployment, omni_references)
        for name in ("long", "image", "watch"):
            for _ in range(2):
                events = await ask(deployment, request(name), ANSWER_TIMEOUT_S)
                check(events, omni_references[name])
            done = events[-1]
            assert isinstance(done, Done)
            assert done.usage["thinker"]["cached_tokens"] > 0
        if max_num_seqs == 8:
            await until(lambda: count(deployment, "thinker", "preemptions") > 0, deployment=deployment)


async def _all_together(deployment: Deployment, references: dict[str, Reference]) -> None:
    together = await asyncio.gather(*(ask(deployment, request(name), ANSWER_TIMEOUT_S) for name in PARTS))
    for name, events in zip(PARTS, together, strict=True):
        check(events, references[name])


async def _text_only_leaves_speech_alone(deployment: Deployment) -> None:
    warm = {"thinker": 5, "talker": 1, "code2wav": 1}
    await until(lambda: requests_of(deployment) == warm, deployment=deployment)
    events = await ask(deployment, request("short", (TEXT,)), ANSWER_TIMEOUT_S)
    assert isinstance(events[-1], Done)
    assert set(events[-1].usage) == {"thinker"}
    assert text_of(events)
    await until(lambda: requests_of(deployment) == warm | {"thinker": 6}, deployment=deployment)


async def _audio_starts_where_it_should(deployment: Deployment, mode: EdgeMode) -> None:
    """Of a long answer: whole, never before its text has ended. Chunked, test_omni_http.py shows it, with a thinker
    that stands still."""
    if mode is EdgeMode.CHUNKED:
        return
    events = await ask(deployment, request("question", max_tokens=200), ANSWER_TIMEOUT_S)
    assert isinstance(events[-1], Done)
    assert events[-1].usage["thinker"]["completion_tokens"] > 100
    first_audio = next(i for i, e in enumerate(events) if isinstance(e, Delta) and e.modality is AUDIO)
    text_end = next(i for i, e in enumerate(events) if isinstance(e, ModalityEnd) and e.modality is TEXT)
    assert first_audio > text_end


async def _aborted_and_refused(deployment: Deployment, references: dict[str, Reference]) -> None:
    """What goes wrong with some leaves the others as they are, and nothing behind."""
    doomed = [await deployment.submit(request("long", max_tokens=200)) for _ in range(3)]
    kept = asyncio.create_task(ask(deployment, request("audio"), ANSWER_TIMEOUT_S))
    bad = request("audio")
    bad.inputs[AUDIO][0].tensors["data"] = np.zeros(100, np.uint8)
    refusing = asyncio.create_task(ask(deployment, bad, ANSWER_TIMEOUT_S))
    for report in await asyncio.gather(*(handle.abort() for handle in doomed)):
        assert not report.missing
    for handle in doomed:
        assert isinstance([event async for event in handle][-1], AbortedRequest)
    refused = await refusing
    assert isinstance(refused[-1], Failed)
    assert refused[-1].error.code == "unsupported_media_type"
    check(await kept, references["audio"])
    assert deployment.orchestrator.num_open == 0
    await until(lambda: not any(row["running"] or row["queued"] for row in deployment.status()["stages"]))
