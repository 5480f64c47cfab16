"""A plan that serves a tiny chat model in two halves, for tests that run whole deployments."""

from __future__ import annotations

from typing import Any

from runtime.plan import (
    ConnectorKind,
    EdgeMode,
    EdgePlan,
    EngineKind,
    MemoryBudget,
    Modality,
    PayloadKind,
    Plan,
    ProcessPlan,
    ReplicaPlan,
    StagePlan,
    TaskPlan,
)

WEIGHTS = "tiny"
"""Folder below the weights root."""
CACHE_BYTES = 8 << 20
ENGINE_SETTINGS = {"dtype": "float32", "max_model_len": 512}
PROGRAM_SETTINGS = {"temperature": 0.0}


def split_plan(mode: EdgeMode = EdgeMode.CHUNKED, *, one_process: bool = False, **thinker: Any) -> Plan:
    """prefill -> thinker. thinker: engine settings of the second half that differ."""
    groups = (("prefill", "thinker"),) if one_process else (("prefill",), ("thinker",))
    edge = EdgePlan(
        source="prefill",
        target="thinker",
        payload=PayloadKind.KV_BLOCKS,
        mode=mode,
        connector=ConnectorKind.INPROC if one_process else ConnectorKind.SHM,
    )
    return Plan(
        name="split",
        model_id="omnictl/split",
        served_names=("split",),
        placement="test",
        stages=(
            stage("prefill", kv_role="producer", max_num_batched_tokens=64),
            stage("thinker", kv_role="consumer", **thinker),
        ),
        edges=(edge,),
        processes=tuple(
            ProcessPlan(
                name="-".join(group), replicas=tuple(ReplicaPlan(stage=s, index=0) for s in group), devices=("cpu",)
            )
            for group in groups
        ),
        tasks={"chat": TaskPlan(inputs={Modality.TEXT: "prefill"}, outputs={Modality.TEXT: "thinker"})},
    )


def stage(name: str, **settings: Any) -> StagePlan:
    return StagePlan(
        name=name,
        engine=EngineKind.AR,
        program="sidekick.thinker",
        weights=WEIGHTS,
        memory=MemoryBudget(weights_bytes=0, cache_bytes=CACHE_BYTES),
        engine_settings=ENGINE_SETTINGS | settings,
        program_settings=PROGRAM_SETTINGS,
    )
