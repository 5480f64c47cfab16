"""The engine settings of a plan that an `ar` stage honours, and what they become for vLLM. Pure: imports no vLLM."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from runtime.engines.base import LoadContext
from runtime.errors import ConfigError, WeightsError
from runtime.plan import Strict

SET_ELSEWHERE = {
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
"""Settings of vLLM that would have no effect here -> what decides instead."""


class EngineSettings(Strict):
    """Names and meanings are vLLM's. Defaults differ where a stage of a chain wants something else than a server."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: int | None = Field(None, ge=2)
    max_num_seqs: int | None = Field(None, ge=1, description="default: the stage's slots")
    max_num_batched_tokens: int | None = Field(None, ge=1)
    block_size: int = Field(32, ge=32, multiple_of=32, description="small, so that short prompts share their beginning")
    enable_prefix_caching: bool = True
    enforce_eager: bool = Field(True, description="compiling gains a tenth on a CPU and takes minutes of every start")
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    quantization: str | None = None
    kv_role: Literal["producer", "consumer"] | None = Field(
        None, description="which half of a split stage this is: computes prompts, or goes on from them"
    )


def engine_arguments(context: LoadContext, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs for a stage.

    ConfigError naming every setting that is not honoured; WeightsError when the plan names no weights or they are
    not there.
    """
    stage = context.stage
    settings = _read(stage.engine_settings, f"stage {stage.name}: engine_settings")
    if stage.memory.cache_bytes <= 0:
        raise ConfigError(
            f"stage {stage.name}: cache budget of {stage.memory.cache_bytes} bytes; an ar stage needs room for its KV "
            "cache",
            hint="give the stage a `cache` in the recipe, such as 192 MiB",
        )
    if (settings.quantization or "").startswith("fp8") and set(context.devices) == {"cpu"}:
        raise ConfigError(
            f"stage {stage.name}: engine_settings: quantization: {settings.quantization!r}: vLLM has no kernels for it "
            "on a CPU",
            hint="leave it out, or place the stage on a GPU",
        )
    given = {name: value for name, value in settings.model_dump(exclude={"kv_role"}).items() if value is not None}
    return {
        "max_num_seqs": stage.slots,
        **given,
        "model": str(_weights(context)),
        "kv_cache_memory_bytes": stage.memory.cache_bytes,
        **extra,
    }


def _weights(context: LoadContext) -> Path:
    folder = context.weights_dir
    if folder is None:
        raise WeightsError(f"stage {context.stage.name}: the plan names no weights")
    if not (folder / "config.json").is_file():
        raise WeightsError(
            f"stage {context.stage.name}: {folder} holds no model: config.json is missing",
            hint="fetch the weights with `omnictl pull`",
        )
    return folder


def _read(given: Mapping[str, Any], where: str) -> EngineSettings:
    try:
        return EngineSettings(**given)
    except ValidationError as exc:
        problems = tuple(_problem(str(error["loc"][0]), error) for error in exc.errors())
    raise ConfigError(
        f"{where}: {'; '.join(problems)}",
        hint=f"known settings: {', '.join(sorted(EngineSettings.model_fields))}",
        problems=problems,
    )


def _problem(name: str, error: Any) -> str:
    if error["type"] != "extra_forbidden":
        return f"{name}: {error['msg']}, got {error['input']!r}"
    if name in SET_ELSEWHERE:
        return f"{name}: has no effect here: {SET_ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, EngineSettings.model_fields, n=1)
    return f"{name}: unknown setting" + (f" (did you mean {near[0]!r}?)" if near else "")
