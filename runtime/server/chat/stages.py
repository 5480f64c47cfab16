"""What a chat says to single stages (`stage_params`), checked against the plan. Pure; called by the chat service."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from runtime.errors import UnsupportedValue
from runtime.graph import select
from runtime.plan import EngineKind, Plan, StagePlan
from runtime.server.chat.schema import StageSampling

TASK = "chat"
SAMPLING_ENGINES = (EngineKind.AR, EngineKind.SIM)
"""A simulated stage stands for any."""


def stage_params(plan: Plan, given: Mapping[str, StageSampling], running: Collection[str]) -> dict[str, dict[str, Any]]:
    """Stage -> the sampling parameters that it gets instead of the common ones.

    running: the stages of this request. UnsupportedValue for a stage that chats do not have, that does not sample, or
    that this request does not reach.
    """
    task = plan.tasks[TASK]
    stages = select(plan, TASK, task.outputs, task.inputs).stages
    sampling = [name for name in stages if _samples(plan.stage(name))]
    for name in given:
        param, known = f"stage_params.{name}", ", ".join(sampling) or "none"
        if name not in stages:
            near = difflib.get_close_matches(name, stages, n=1)
            more = f"; did you mean {near[0]!r}?" if near else f"; stages that sample: {known}"
            raise UnsupportedValue(f"{param}: no such stage{more}", param=param)
        if name not in sampling:
            raise UnsupportedValue(f"{param}: this stage does not sample; stages that do: {known}", param=param)
        if name not in running:
            raise UnsupportedValue(f"{param}: this stage has nothing to do for this request", param=param)
    return {name: values.model_dump(exclude_unset=True) for name, values in given.items()}


def _samples(stage: StagePlan) -> bool:
    """Not the half of a split stage that only computes prompts."""
    return stage.engine in SAMPLING_ENGINES and stage.engine_settings.get("kv_role") != "producer"
