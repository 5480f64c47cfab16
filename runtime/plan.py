"""The plan's schema: a recipe placed on hardware, every value final. The contract between the tool,
which makes plans, and the runtime, which serves them and never changes them.

Paths are not in a plan: `weights` names a folder below the weights root, host and port belong to the
deployment. So the plan of one recipe on one machine profile is the same bytes everywhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

SCHEMA_VERSION = 1
REQUEST_INPUT = "request"
"""Name of the input that comes from the client instead of an edge."""


class Strict(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineKind(StrEnum):
    AR = "ar"
    DIFFUSION = "diffusion"
    MODULE = "module"
    SIM = "sim"


class PayloadKind(StrEnum):
    HIDDEN_STATES = "hidden_states"
    CODEC_CODES = "codec_codes"
    KV_BLOCKS = "kv_blocks"
    LATENTS = "latents"
    TEXT = "text"
    MEDIA = "media"
    ACTION = "action"


class Modality(StrEnum):
    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"
    VIDEO = "video"
    ACTION = "action"


MODALITY_PAYLOAD = {
    Modality.TEXT: PayloadKind.TEXT,
    Modality.AUDIO: PayloadKind.MEDIA,
    Modality.IMAGE: PayloadKind.MEDIA,
    Modality.VIDEO: PayloadKind.MEDIA,
    Modality.ACTION: PayloadKind.ACTION,
}


class EdgeMode(StrEnum):
    WHOLE = "whole"
    CHUNKED = "chunked"


class ConnectorKind(StrEnum):
    INPROC = "inproc"
    SHM = "shm"
    MOONCAKE = "mooncake"


class MemoryBudget(Strict):
    """Bytes that one replica takes on each of its devices."""

    weights_bytes: int
    cache_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.activation_bytes


class StagePlan(Strict):
    name: str
    engine: EngineKind
    program: str
    weights: str | None = None
    replicas: int = Field(1, ge=1)
    slots: int = Field(8, ge=1, description="requests bound to one replica at a time")
    stall_timeout_s: float = Field(60.0, gt=0, description="a step that takes longer counts as hung")
    start_timeout_s: float = Field(180.0, gt=0, description="silence during start, reset by progress")
    memory: MemoryBudget
    engine_settings: dict[str, Any] = {}
    program_settings: dict[str, Any] = {}


class EdgePlan(Strict):
    source: str
    target: str
    payload: PayloadKind
    mode: EdgeMode
    connector: ConnectorKind
    capacity_bytes: int = Field(64 << 20, gt=0, description="bytes in flight before the producer waits")

    @property
    def name(self) -> str:
        return f"{self.source}->{self.target}"


class ReplicaPlan(Strict):
    stage: str
    index: int


class ProcessPlan(Strict):
    name: str
    replicas: tuple[ReplicaPlan, ...]
    devices: tuple[str, ...]
    num_threads: int = Field(1, ge=1, description="threads of each numeric library in the process")
    reserve_bytes: int = Field(0, description="interpreter, libraries and contexts")
    environment: dict[str, str] = {}


class TaskPlan(Strict):
    """Where a kind of request enters the graph, and which stage ends each modality of it."""

    inputs: dict[Modality, str]
    outputs: dict[Modality, str]


class VoicesPlan(Strict):
    default: str
    names: tuple[str, ...]
    aliases: dict[str, str] = {}


class Limits(Strict):
    """Bounds that hold for every request; each is named in the error of a request that breaks it."""

    max_body_bytes: PositiveInt = 32 << 20
    max_text_chars: PositiveInt = 20_000
    max_queued: NonNegativeInt = 64
    queue_timeout_s: NonNegativeFloat = 30.0
    request_timeout_s: PositiveFloat = 300.0
    abort_timeout_s: PositiveFloat = 10.0
    drain_timeout_s: PositiveFloat = 20.0
    max_unread_bytes: PositiveInt = 64 << 20
    beat_timeout_s: PositiveFloat = 30.0
    kept_traces: NonNegativeInt = 256


class RestartBudget(Strict):
    max_restarts: NonNegativeInt = 5
    window_s: PositiveFloat = 300.0
    backoff_s: NonNegativeFloat = 0.5


class Plan(Strict):
    schema_version: int = SCHEMA_VERSION
    name: str
    model_id: str
    served_names: tuple[str, ...]
    placement: str
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgePlan, ...]
    processes: tuple[ProcessPlan, ...]
    tasks: dict[str, TaskPlan]
    voices: VoicesPlan | None = None
    limits: Limits = Limits()
    restarts: RestartBudget = RestartBudget()
    provenance: dict[str, str] = {}

    def stage(self, name: str) -> StagePlan:
        return next(s for s in self.stages if s.name == name)

    def edges_from(self, stage: str) -> tuple[EdgePlan, ...]:
        return tuple(e for e in self.edges if e.source == stage)

    def edges_into(self, stage: str) -> tuple[EdgePlan, ...]:
        return tuple(e for e in self.edges if e.target == stage)

    def process_of(self, stage: str, index: int) -> ProcessPlan:
        wanted = ReplicaPlan(stage=stage, index=index)
        return next(p for p in self.processes if wanted in p.replicas)
