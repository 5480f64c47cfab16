"""Plans of `sim` stages for tests: a three-stage speech chain shaped like a real one, with timings of milliseconds."""

from __future__ import annotations

from typing import Any

from runtime.plan import (
    ConnectorKind,
    EdgeMode,
    EdgePlan,
    EngineKind,
    Limits,
    MemoryBudget,
    Modality,
    PayloadKind,
    Plan,
    ProcessPlan,
    ReplicaPlan,
    RestartBudget,
    StagePlan,
    TaskPlan,
    VoicesPlan,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "ear": {"first_output_s": 0.01, "num_outputs": 1},
    "think": {"first_output_s": 0.01, "interval_s": 0.005, "num_outputs": 6},
    "talk": {"first_output_s": 0.01, "interval_s": 0.005, "output_bytes": 40_000},
    "wave": {"first_output_s": 0.01, "interval_s": 0.005, "output_bytes": 19_200},
}
STAGES = tuple(SETTINGS)


def sim_stage(
    name: str, *, replicas: int = 1, slots: int = 64, stall_timeout_s: float = 60.0, **settings: Any
) -> StagePlan:
    return StagePlan(
        name=name,
        engine=EngineKind.SIM,
        program="sim",
        replicas=replicas,
        slots=slots,
        stall_timeout_s=stall_timeout_s,
        start_timeout_s=60.0,
        memory=MemoryBudget(weights_bytes=0),
        engine_settings=SETTINGS[name] | settings,
    )


def sim_plan(
    *,
    mode: EdgeMode = EdgeMode.CHUNKED,
    processes: tuple[tuple[str, ...], ...] = (("ear",), ("think",), ("talk", "wave")),
    stages: dict[str, dict[str, Any]] | None = None,
    limits: dict[str, Any] | None = None,
    restarts: dict[str, Any] | None = None,
    capacity_bytes: int = 4 << 20,
) -> Plan:
    """ear -> think -> talk -> wave. A process entry "talk.1" is the second replica of a stage."""
    replicas = {name: [p for group in processes for p in group if p.split(".")[0] == name] for name in STAGES}
    home = {entry: number for number, group in enumerate(processes) for entry in group}

    def edge(source: str, target: str, payload: PayloadKind, edge_mode: EdgeMode) -> EdgePlan:
        together = home[source] == home[target]
        return EdgePlan(
            source=source,
            target=target,
            payload=payload,
            mode=edge_mode,
            connector=ConnectorKind.INPROC if together else ConnectorKind.SHM,
            capacity_bytes=capacity_bytes,
        )

    return Plan(
        name="sim-chain",
        model_id="omnictl/sim-chain",
        served_names=("sim-chain",),
        placement="test",
        stages=tuple(sim_stage(name, replicas=len(replicas[name]), **(stages or {}).get(name, {})) for name in STAGES),
        edges=(
            edge("ear", "think", PayloadKind.TEXT, EdgeMode.WHOLE),
            edge("think", "talk", PayloadKind.TEXT, mode),
            edge("talk", "wave", PayloadKind.LATENTS, mode),
        ),
        processes=tuple(
            ProcessPlan(
                name=f"p{number}",
                replicas=tuple(
                    ReplicaPlan(stage=e.split(".")[0], index=int(e.split(".")[1]) if "." in e else 0) for e in group
                ),
                devices=("cpu",),
            )
            for number, group in enumerate(processes)
        ),
        tasks={
            "chat": TaskPlan(
                inputs={Modality.TEXT: "think", Modality.AUDIO: "ear"},
                outputs={Modality.TEXT: "think", Modality.AUDIO: "wave"},
            ),
            "speech": TaskPlan(inputs={Modality.TEXT: "talk"}, outputs={Modality.AUDIO: "wave"}),
            "transcription": TaskPlan(inputs={Modality.AUDIO: "ear"}, outputs={Modality.TEXT: "ear"}),
        },
        voices=VoicesPlan(default="tone", names=("tone",), aliases={"default": "tone", "alloy": "tone"}),
        limits=Limits(**({"drain_timeout_s": 30.0, "abort_timeout_s": 60.0} | (limits or {}))),
        restarts=RestartBudget(**({"backoff_s": 0.05} | (restarts or {}))),
    )
