"""Qwen2.5-Omni as a deployment: worker processes of its own, equal to transformers from end to end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from runtime.plan import EdgeMode, Plan
from runtime.requests import AbortedRequest, Done, Event
from tests.deploy import ask, deployed, until
from tests.golden.omni25_reference import NAMES
from tests.golden.omni_plan import WEIGHTS, omni_plan
from tests.golden.omni_reference import NUM_CODEC_TOKENS
from tests.golden.test_omni_chain import ANSWER_TIMEOUT_S, TOLERANCE, ready, request, samples_of, text_of
from tests.golden.tiny_qwen2_5_omni import omni25_tokenizer

if TYPE_CHECKING:
    from tests.golden.omni25_reference import Reference25

TWO = (("thinker", "talker"), ("code2wav",))
THREE = (("thinker",), ("talker",), ("code2wav",))

pytestmark = pytest.mark.timeout(300)  # a process imports vllm


def plan(mode: EdgeMode, processes: tuple[tuple[str, ...], ...]) -> Plan:
    """Qwen3-Omni's with other programs: the edge into the last stage is whole, whatever the other is."""
    text = omni_plan(mode, processes, max_tokens=NUM_CODEC_TOKENS).model_dump_json()
    made = Plan.model_validate_json(text.replace("code2wav", "token2wav").replace("qwen3_omni", "qwen2_5_omni"))
    first, last = made.edges
    return made.model_copy(update={"edges": (first, last.model_copy(update={"mode": EdgeMode.WHOLE}))})


@pytest.fixture(autouse=True)
def weights(omni25_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / WEIGHTS).symlink_to(omni25_checkpoint)
    monkeypatch.setenv("OMNICTL_WEIGHTS_DIR", str(tmp_path / "weights"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def check(events: list[Event], reference: Reference25) -> None:
    done = events[-1]
    assert isinstance(done, Done), done
    expected = omni25_tokenizer().decode(reference.text_ids, skip_special_tokens=True)
    assert text_of(events).rstrip("\N{REPLACEMENT CHARACTER}") == expected.rstrip("\N{REPLACEMENT CHARACTER}")
    assert done.usage["thinker"]["completion_tokens"] == len(reference.text_ids)
    assert done.usage["token2wav"]["frames"] == len(reference.codes)
    samples = samples_of(events)
    assert samples.shape == reference.samples.shape
    assert np.abs(samples - reference.samples.numpy()).max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "processes"), [(EdgeMode.CHUNKED, TWO), (EdgeMode.WHOLE, THREE)])
async def test_the_chain(
    tmp_path: Path, omni25_references: dict[str, Reference25], mode: EdgeMode, processes: tuple[tuple[str, ...], ...]
) -> None:
    async with deployed(plan(mode, processes), tmp_path, wait=False) as deployment:
        await ready(deployment)
        check(await ask(deployment, request("audio"), ANSWER_TIMEOUT_S), omni25_references["audio"])
        doomed = [await deployment.submit(request("long", max_tokens=200)) for _ in range(2)]
        together = asyncio.gather(*(ask(deployment, request(name), ANSWER_TIMEOUT_S) for name in NAMES))
        for handle in doomed:
            assert not (await handle.abort()).missing
            assert isinstance([event async for event in handle][-1], AbortedRequest)
        for name, events in zip(NAMES, await together, strict=True):
            check(events, omni25_references[name])
        assert deployment.orchestrator.num_open == 0
        await until(lambda: not any(row["running"] or row["queued"] for row in deployment.status()["stages"]))
