"""The schema of a recipe file: strict, frozen models. `meta` and `model` as in the public vLLM recipes, ours
under `omnictl`.

Says what a file may hold, not whether its parts fit together (`graph`) or fit a machine (`placement`).
Files are validated as strict JSON (`recipe`): no number is made from text, no text from a number.
"""

from __future__ import annotations

from datetime import date
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue, StringConstraints

from omnictl.units import MIB, parse_bytes, parse_count
from runtime.plan import EdgeMode, Limits, Modality, PayloadKind, RestartBudget, Strict, VoicesPlan

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0, le=1 << 60)]
Count = Annotated[int, BeforeValidator(parse_count), Field(ge=0, le=10**15)]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,40}$")]
ModelName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,40}$")]
"""Names of versions have dots."""
Text = Annotated[str, StringConstraints(min_length=1)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$")
]
PinnedRequirement = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*==[A-Za-z0-9_.!+-]+$")]


class TaskKind(StrEnum):
    """What a client can ask for. Each has its endpoints in the server."""

    CHAT = "chat"
    SPEECH = "speech"
    TRANSCRIPTION = "transcription"
    IMAGE = "image"
    VIDEO = "video"
    ACTION = "action"


# ---- meta and model: descriptive, for people and catalogues -------------------------------------------------


class Meta(Strict):
    title: Text
    slug: ModelName
    provider: Text
    description: Text
    date_added: date
    date_updated: date
    difficulty: Literal["beginner", "intermediate", "advanced"]
    tasks: tuple[Literal["text", "multimodal", "omni", "embedding"], ...]
    performance_headline: Text | None = None
    related_recipes: tuple[Text, ...] = ()
    hardware: dict[Name, Literal["verified", "unsupported"]] = {}
    """Hardware id -> what is known. Absent is a third state: nobody has tried."""


class Model(Strict):
    model_id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    min_vllm_version: Annotated[str, StringConstraints(pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")] | None = None
    architecture: Literal["dense", "moe"]
    parameter_count: Text
    active_parameters: Text
    context_length: int = Field(ge=0, description="tokens; 0 where the word has no meaning")


# ---- weights ------------------------------------------------------------------------------------------------


class WeightsPackage(Strict):
    """An archive that holds weights: an exact version, its checksum and its size."""

    requirement: PinnedRequirement
    sha256: Sha256
    size_bytes: int = Field(gt=0)


class WeightsFile(Strict):
    """One file of a weights folder: `parts` are patterns inside the packages, joined in this order."""

    name: RelativePath
    parts: tuple[Text, ...] = Field(min_length=1)
    sha256: Sha256 | None = None


class Weights(Strict):
    """Made from `packages`, or by a converter from nothing, or `provided` by whoever runs the model: one of the three
    (`graph` checks).
    """

    license: Text
    source: Text
    packages: tuple[WeightsPackage, ...] = ()
    files: tuple[WeightsFile, ...] = ()
    licenses: tuple[Text, ...] = Field(default=(), description="patterns of licence texts, kept beside the files")
    provided: tuple[RelativePath, ...] = Field(
        default=(), description="files that must lie in the folder; nothing here fetches them"
    )
    convert: Text | None = Field(
        default=None, description="converter that is run on what was fetched, or on an empty folder"
    )
    convert_version: int = Field(
        default=1, ge=1, description="raised when what it writes changes: folders are made anew"
    )
    converted_bytes: Bytes = Field(default=0, description="what the converter writes; disk space is checked for it")


# ---- stages -------------------------------------------------------------------------------------------------


class ArSettings(Strict):
    """Names and meanings are vLLM's; what the engine's own schema takes, with the same defaults."""

    SET_ELSEWHERE: ClassVar[dict[str, str]] = {
        "async_scheduling": "a step returns the tokens that it made",
        "compilation_config": "enforce_eager says whether the model is compiled; how is vLLM's own choice",
        "data_parallel_size": "a stage's replicas are its copies",
        "enable_chunked_prefill": "max_num_batched_tokens bounds a step; a longer prompt is computed in chunks",
        "gpu_memory_utilization": "the stage's cache budget sets the size of the KV cache",
        "kv_cache_memory_bytes": "the stage's cache budget sets the size of the KV cache",
        "pipeline_parallel_size": "a replica runs on one device; use replicas, or quantization",
        "seed": "every request has a seed of its own",
        "tensor_parallel_size": "a replica runs on one device; use replicas, or quantization",
    }
    """Settings of vLLM that would have no effect -> what decides instead. The engine refuses the same."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2, description="tokens; default: the model's context_length")
    max_num_seqs: int | None = Field(default=None, ge=1, description="default: the stage's slots")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="default: vLLM's")
    block_size: int = Field(default=32, ge=32, multiple_of=32)
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    quantization: Text | None = None
    kv_role: Literal["producer", "consumer"] | None = None


class ModuleSettings(Strict):
    """The engine has none: batching and chunking belong to the program."""


class SimFault(Strict):
    action: Literal["raise", "invalid", "crash", "exit", "segfault", "hang", "slow", "hold", "stuck", "memory"]
    at_output: int = Field(default=0, ge=0)
    seconds: float = Field(default=1.0, gt=0)
    path: str = ""
    when: dict[str, JsonValue] = {}


class SimSettings(Strict):
    first_output_s: float = Field(default=0.01, ge=0)
    interval_s: float = Field(default=0.01, ge=0)
    num_outputs: int = Field(default=8, ge=1)
    pieces_per_output: int = Field(default=1, ge=1)
    tail_outputs: int = Field(default=0, ge=0, description="made when the input is complete")
    batch_size: int = Field(default=1024, ge=1)
    step_s: float = Field(default=0.0, ge=0, description="above 0 requests advance together, in steps of this length")
    step_s_per_request: float = Field(default=0.0, ge=0)
    prompt_tokens: int = Field(default=0, ge=0)
    step_tokens: int = Field(default=8192, ge=1)
    prefill_s_per_token: float = Field(default=0.0, ge=0)
    output_bytes: int = Field(default=960, ge=0)
    load_s: float = Field(default=0.0, ge=0)
    load_silently: bool = False
    faults: tuple[SimFault, ...] = ()


class _Stage(Strict):
    weights: RelativePath | None = None
    parameters: Count = Field(default=0, description="all of them, also inactive ones")
    bytes_per_parameter: float | None = Field(
        default=None, gt=0, le=16, description="default: the size of the engine's dtype"
    )
    cache: Bytes = 0
    activation: Bytes = 0
    replicas: int = Field(default=1, ge=1, le=1024)
    slots: int = Field(default=8, ge=1)
    stall_timeout_s: float = Field(default=60.0, gt=0)
    start_timeout_s: float = Field(default=180.0, gt=0)


class ArStage(_Stage):
    engine: Literal["ar"]
    program: Text
    cache_elements_per_token: int | None = Field(default=None, gt=0, description="2 x layers x KV heads x head size")
    engine_settings: ArSettings = ArSettings()
    program_settings: dict[str, JsonValue] = {}


class ModuleStage(_Stage):
    engine: Literal["module"]
    program: Text
    engine_settings: ModuleSettings = ModuleSettings()
    program_settings: dict[str, JsonValue] = {}


class SimStage(_Stage):
    engine: Literal["sim"]
    engine_settings: SimSettings = SimSettings()


Stage = Annotated[ArStage | ModuleStage | SimStage, Field(discriminator="engine")]


# ---- graph, tasks, placements -------------------------------------------------------------------------------


class Edge(Strict):
    source: Name
    target: Name
    payload: PayloadKind
    mode: EdgeMode
    connector: Literal["auto", "inproc", "shm"] = "auto"
    capacity: Annotated[Bytes, Field(gt=0)] = 64 * MIB

    @property
    def name(self) -> str:
        return f"{self.source}->{self.target}"


class Task(Strict):
    """Where a kind of request enters the graph, and which stage ends each modality of it."""

    inputs: dict[Modality, Name] = Field(min_length=1)
    outputs: dict[Modality, Name] = Field(min_length=1)


class Process(Strict):
    """A worker process. With replicas there is one copy of it for each."""

    stages: tuple[Name, ...] = Field(min_length=1)
    gpus: int = Field(default=0, ge=0, le=1, description="1: its stages run on a GPU, each copy of it on one")
    reserve: Bytes = Field(description="interpreter, libraries and contexts")
    num_threads: int | None = Field(default=None, ge=1, description="default: an even share of the cores")
    environment: dict[str, str] = {}


class Split(Strict):
    """A stage on engine ar as two: `prefill` is the name of the one that computes its prompts."""

    prefill: Name
    replicas: int = Field(default=1, ge=1, le=1024, description="of the stage that computes prompts")


class Placement(Strict):
    """Which stages share a process, and what differs from the recipe's values where this placement is used."""

    min_gpus: int = Field(default=0, ge=0, description="not used where there are fewer, even if it would fit")
    processes: dict[Name, Process] = Field(min_length=1)
    stages: dict[Name, dict[str, JsonValue]] = {}
    splits: dict[Name, Split] = {}

    @property
    def uses_gpus(self) -> bool:
        return any(process.gpus for process in self.processes.values())


class Tiny(Strict):
    """What differs where a recipe is served with a small checkpoint that is built here, to rehearse the real one."""

    weights: dict[RelativePath, Weights] = Field(min_length=1, description="instead of the recipe's")
    context_length: int = Field(gt=0, description="tokens, instead of the model's")
    stages: dict[Name, dict[str, JsonValue]] = {}
    placements: dict[Name, Placement] = Field(min_length=1, description="instead of the recipe's")


class Omnictl(Strict):
    short_names: tuple[ModelName, ...] = Field(min_length=1)
    imports: tuple[Text, ...] = Field(default=(), description="modules that the stages need at run time")
    weights: dict[RelativePath, Weights] = {}
    stages: dict[Name, Stage] = Field(min_length=1)
    edges: tuple[Edge, ...] = ()
    tasks: dict[TaskKind, Task] = Field(min_length=1)
    voices: VoicesPlan | None = None
    limits: Limits = Limits()
    restarts: RestartBudget = RestartBudget()
    placements: dict[Name, Placement] = Field(min_length=1)
    placement: Name | None = Field(
        default=None, description="default: the first that fits, those with GPUs before the others"
    )
    tiny: Tiny | None = None


class RecipeFile(Strict):
    meta: Meta
    model: Model
    omnictl: Omnictl
