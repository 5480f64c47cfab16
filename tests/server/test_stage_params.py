"""Sampling of single stages: each stage gets its own, and what no stage would honour is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.errors import UnsupportedValue
from runtime.payload import Payload
from runtime.plan import EngineKind, Modality, Plan
from runtime.requests import RequestSpec
from runtime.server.chat.schema import ChatRequest
from runtime.server.chat.service import ChatService
from runtime.server.settings import MediaSettings
from tests.plans import sim_plan
from tests.server.serving import MODEL
from tests.server.told import Submitted


def plan_with_a_vocoder() -> Plan:
    """`wave` is of an engine that does not sample."""
    plan = sim_plan()
    stages = [s.model_copy(update={"engine": EngineKind.MODULE}) if s.name == "wave" else s for s in plan.stages]
    return plan.model_copy(update={"stages": tuple(stages)})


async def ask(stage_params: Any, *modalities: str, **fields: Any) -> RequestSpec:
    orchestrator = Submitted()
    service = ChatService(orchestrator, plan_with_a_vocoder(), MediaSettings())  # type: ignore[arg-type]
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stage_params": stage_params}
    await service.open(ChatRequest.model_validate({**ask, "modalities": list(modalities) or ["text"], **fields}), "r")
    (spec,) = orchestrator.specs
    return spec


async def test_each_stage_sees_its_own() -> None:
    given = {"think": {"max_tokens": 5, "top_p": None}, "talk": {"temperature": 0.5, "seed": 3}}
    spec = await ask(given, "text", "audio", temperature=0, seed=1)
    common = {"sampling": {"temperature": 0, "seed": 1}, "voice": "tone", "seed": 1}
    assert spec.params_of("think") == {**common, "stage_sampling": {"max_tokens": 5}}
    assert spec.params_of("talk") == {**common, "stage_sampling": {"temperature": 0.5, "seed": 3}}
    assert spec.params_of("wave") == common


async def test_nothing_said_is_nothing_seen() -> None:
    assert (await ask({})).params_of("think") == (await ask(None)).params_of("think") == {"sampling": {}}


@pytest.mark.parametrize(
    ("stage_params", "modalities", "message"),
    [
        ({"thnk": {}}, ["text"], r"stage_params\.thnk: no such stage; did you mean 'think'\?"),
        ({"decoder": {}}, ["text"], r"stage_params\.decoder: no such stage; stages that sample: ear, think, talk"),
        (
            {"wave": {"seed": 1}},
            ["text", "audio"],
            r"wave: this stage does not sample; stages that do: ear, think, talk",
        ),
        ({"talk": {"seed": 1}}, ["text"], r"talk: this stage has nothing to do for this request"),
        ({"ear": {"seed": 1}}, ["text", "audio"], r"ear: this stage has nothing to do for this request"),
    ],
)
async def test_what_nobody_would_honour(stage_params: Any, modalities: list[str], message: str) -> None:
    with pytest.raises(UnsupportedValue, match=message) as caught:
        await ask(stage_params, *modalities)
    assert caught.value.param == f"stage_params.{next(iter(stage_params))}"


def test_params_are_those_of_the_request_for_a_stage_that_is_not_named() -> None:
    spec = RequestSpec("chat", (Modality.TEXT,), {Modality.TEXT: [Payload("text", "")]}, {"voice": "x"})
    assert spec.params_of("think") == {"voice": "x"}
