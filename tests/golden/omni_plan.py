"""A plan that serves the tiny Qwen3-Omni checkpoint with real engines, for tests that run whole deployments."""

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
    VoicesPlan,
)
from tests.golden.omni_reference import NUM_CODEC_TOKENS, REPETITION_PENALTY

WEIGHTS = "tiny"
"""Folder below the weights root."""
CACHE_BYTES = 16 << 20
STAGES = ("thinker", "talker", "code2wav")
AR_SETTINGS = {"dtype": "float32", "max_model_len": 512}
NUM_FRAMES = NUM_CODEC_TOKENS - 1
"""transformers does not complete the last token of speech that its length ends."""


def omni_plan(
    mode: EdgeMode,
    processes: tuple[tuple[str, ...], ...],
    engine_settings: dict[str, Any] | None = None,
    cache_bytes: int = CACHE_BYTES,
    **talker: Any,
) -> Plan:
    """engine_settings, cache_bytes: of both stages that have an engine with a cache."""
    home = {stage: number for number, group in enumerate(processes) for stage in group}
    settings: dict[str, dict[str, Any]] = {
        "thinker": {"temperature": 0.0},
        "talker": {
            "temperature": 0.0,
            "repetition_penalty": REPETITION_PENALTY,
            "max_tokens": NUM_FRAMES,
            **talker,
        },
        "code2wav": {},
    }

    def edge(source: str, target: str, payload: PayloadKind) -> EdgePlan:
        connector = ConnectorKind.INPROC if home[source] == home[target] else ConnectorKind.SHM
        return EdgePlan(source=source, target=target, payload=payload, mode=mode, connector=connector)

    return Plan(
        name="tiny-omni",
        model_id="omnictl/tiny-omni",
        served_names=("tiny-omni",),
        placement="test",
        stages=tuple(_stage(name, settings[name], engine_settings or {}, cache_bytes) for name in STAGES),
        edges=(
            edge("thinker", "talker", PayloadKind.HIDDEN_STATES),
            edge("talker", "code2wav", PayloadKind.CODEC_CODES),
        ),
        processes=tuple(
            ProcessPlan(
                name="-".join(group),
                replicas=tuple(ReplicaPlan(stage=stage, index=0) for stage in group),
                devices=("cpu",),
            )
            for group in processes
        ),
        tasks={
            "chat": TaskPlan(
                inputs=dict.fromkeys((Modality.TEXT, Modality.AUDIO, Modality.IMAGE, Modality.VIDEO), "thinker"),
                outputs={Modality.TEXT: "thinker", Modality.AUDIO: "code2wav"},
            )
        },
        voices=VoicesPlan(default="ethan", names=("ethan", "chelsie", "aiden")),
    )


def _stage(name: str, program_settings: dict[str, Any], engine_settings: dict[str, Any], cache_bytes: int) -> StagePlan:
    is_ar = name != "code2wav"
    return StagePlan(
        name=name,
        engine=EngineKind.AR if is_ar else EngineKind.MODULE,
        program=f"qwen3_omni.{name}",
        weights=WEIGHTS,
        memory=MemoryBudget(weights_bytes=0, cache_bytes=cache_bytes if is_ar else 0),
        engine_settings={**AR_SETTINGS, **engine_settings} if is_ar else {},
        program_settings=program_settings,
    )
