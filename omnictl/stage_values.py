"""Final values of one stage on the devices it gets: everything that a recipe leaves to be chosen, and its memory.

Pure. `placement` calls it once a stage; each derived value comes with the reason for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from omnictl.hardware import Hardware
from omnictl.recipe import Placed, Recipe
from omnictl.recipe_schema import ArStage, Stage
from omnictl.units import format_bytes, format_count
from runtime.plan import EngineKind, MemoryBudget, StagePlan

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_CACHE_FLAGS = frozenset({"avx512f", "amx_bf16", "amx_int8"})


@dataclass(slots=True)
class StageValues:
    """A planned stage, the reasons of its derived values by key, and what is wrong with it."""

    plan: StagePlan
    reasons: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def resolve_stage(recipe: Recipe, placed: Placed, name: str, on_gpu: bool, hardware: Hardware) -> StageValues:
    """Everything final for the stage on a GPU of this hardware, or on its CPU."""
    stage = placed.values.stages[name]
    reasons: dict[str, str] = {}
    settings = stage.engine_settings.model_dump(mode="json", exclude_none=True)
    if isinstance(stage, ArStage):
        _complete_ar_settings(settings, recipe, stage, name, on_gpu, hardware, reasons)
    memory = _memory(stage, settings.get("dtype"), reasons)
    plan = StagePlan(
        name=name,
        engine=EngineKind(stage.engine),
        program="sim" if stage.engine == "sim" else stage.program,
        weights=stage.weights,
        replicas=stage.replicas,
        slots=stage.slots,
        stall_timeout_s=stage.stall_timeout_s,
        start_timeout_s=stage.start_timeout_s,
        memory=memory,
        engine_settings=settings,
        program_settings={} if stage.engine == "sim" else stage.program_settings,
    )
    problems = _ar_problems(name, stage, settings, on_gpu, hardware) if isinstance(stage, ArStage) else ()
    return StageValues(plan, reasons, list(problems))


def resolve_dtype(on_gpu: bool, hardware: Hardware) -> tuple[str, str]:
    """The dtype that `auto` stands for on this hardware, and why."""
    if on_gpu:
        if all(gpu.compute_capability >= (8, 0) for gpu in hardware.gpus):
            return "bfloat16", "auto: the GPU computes bfloat16"
        return "float16", "auto: GPUs before compute capability 8.0 compute no bfloat16"
    if hardware.cpu.has_bfloat16:
        return "bfloat16", "auto: the CPU computes bfloat16"
    return "float32", "auto: the CPU has neither avx512_bf16 nor amx_bf16"


def _complete_ar_settings(
    settings: dict[str, Any],
    recipe: Recipe,
    stage: ArStage,
    name: str,
    on_gpu: bool,
    hardware: Hardware,
    reasons: dict[str, str],
) -> None:
    if settings["dtype"] == "auto":
        settings["dtype"], reasons["engine_settings.dtype"] = resolve_dtype(on_gpu, hardware)
    if "max_model_len" not in settings:
        settings["max_model_len"] = recipe.model.context_length
        reasons["engine_settings.max_model_len"] = "model.context_length"
    if "max_num_seqs" not in settings:
        settings["max_num_seqs"] = stage.slots
        reasons["engine_settings.max_num_seqs"] = f"stages.{name}.slots"


def _memory(stage: Stage, dtype: str | None, reasons: dict[str, str]) -> MemoryBudget:
    """Weights get a fifth on top for what loaders and layouts add."""
    size = stage.bytes_per_parameter
    if size is None:
        size = BYTES_OF_DTYPE.get(dtype or "", 0)
    if stage.parameters:
        unit = f"{size:g} byte{'' if size == 1 else 's'}" + (f" ({dtype})" if stage.bytes_per_parameter is None else "")
        reasons["memory.weights_bytes"] = f"{format_count(stage.parameters)} parameters x {unit} x 1.2"
    return MemoryBudget(
        weights_bytes=-(-round(stage.parameters * size) * 12 // 10),
        cache_bytes=stage.cache,
        activation_bytes=stage.activation,
    )


def _ar_problems(
    name: str, stage: ArStage, settings: dict[str, Any], on_gpu: bool, hardware: Hardware
) -> Iterator[str]:
    path = f"stages.{name}.engine_settings"
    if settings["max_num_seqs"] > stage.slots:
        yield f"{path}.max_num_seqs: {settings['max_num_seqs']} is more than the {stage.slots} slots of a replica"
    if not on_gpu and settings.get("quantization", "").startswith("fp8"):
        yield f"{path}.quantization: {settings['quantization']!r}: vLLM has no kernels for it on a CPU"
    if not on_gpu and settings["kv_cache_dtype"] != "auto" and not FP8_CACHE_FLAGS.intersection(hardware.cpu.flags):
        yield f"{path}.kv_cache_dtype: {settings['kv_cache_dtype']!r}: on a CPU it needs AVX-512 or AMX"
    least_bytes = least_cache_bytes(stage, settings)
    if least_bytes is not None and stage.cache < least_bytes:
        length, num_tokens = settings["max_model_len"], stage.cache * settings["max_model_len"] // least_bytes
        yield (
            f"stages.{name}.cache: {format_bytes(stage.cache)} holds {num_tokens} tokens; one request of max_model_len "
            f"{length} needs {format_bytes(least_bytes)}"
        )


def least_cache_bytes(stage: ArStage, settings: dict[str, Any]) -> int | None:
    """The cache that one request of full length needs; None when the recipe does not say what a token takes."""
    if stage.cache_elements_per_token is None:
        return None
    element_bytes = BYTES_OF_DTYPE[settings["dtype"]] if settings["kv_cache_dtype"] == "auto" else 1
    token_bytes = stage.cache_elements_per_token * element_bytes
    length: int = settings["max_model_len"]
    return token_bytes * length
