"""Engine settings of an `ar` stage: what reaches vLLM, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.engines.ar.settings import SET_ELSEWHERE, EngineSettings, engine_arguments
from runtime.engines.base import LoadContext
from runtime.errors import ConfigError, WeightsError
from runtime.plan import EngineKind, MemoryBudget, StagePlan


def context_of(
    folder: Path | None, *, cache_bytes: int = 1 << 20, slots: int = 12, device: str = "cpu", **settings: Any
) -> LoadContext:
    stage = StagePlan(
        name="think",
        engine=EngineKind.AR,
        program="any",
        slots=slots,
        memory=MemoryBudget(weights_bytes=0, cache_bytes=cache_bytes),
        engine_settings=settings,
    )
    return LoadContext(stage=stage, devices=(device,), num_threads=1, weights_dir=folder, progress=lambda phase: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_settings_and_budgets_reach_vllm(folder: Path) -> None:
    given = {
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 512,
        "block_size": 64,
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "kv_cache_dtype": "fp8",
        "quantization": "fp8",
    }
    assert set(given) | {"kv_role"} == set(EngineSettings.model_fields), "a setting without a test that it arrives"
    arguments = engine_arguments(context_of(folder, cache_bytes=123456, device="cuda:0", **given), {})
    assert arguments == {**given, "model": str(folder), "kv_cache_memory_bytes": 123456}


def test_defaults(folder: Path) -> None:
    assert engine_arguments(context_of(folder, slots=12), {}) == {
        "model": str(folder),
        "kv_cache_memory_bytes": 1 << 20,
        "dtype": "auto",
        "max_num_seqs": 12,
        "block_size": 32,
        "enable_prefix_caching": True,
        "enforce_eager": True,
        "kv_cache_dtype": "auto",
    }


def test_arguments_of_the_program_win(folder: Path) -> None:
    arguments = engine_arguments(context_of(folder), {"enable_prefix_caching": False, "worker_cls": "a.B"})
    assert arguments["enable_prefix_caching"] is False
    assert arguments["worker_cls"] == "a.B"


def test_all_problems_are_told_at_once_with_the_nearest_names(folder: Path) -> None:
    with pytest.raises(ConfigError, match="stage think: engine_settings: ") as caught:
        engine_arguments(context_of(folder, max_model_length=2048, dtype="float99", block_size=33), {})
    assert len(caught.value.problems) == 3
    assert "max_model_length: unknown setting (did you mean 'max_model_len'?)" in caught.value.problems
    assert any(problem.startswith("dtype: ") and "'float99'" in problem for problem in caught.value.problems)
    assert any(problem.startswith("block_size: ") and "33" in problem for problem in caught.value.problems)


@pytest.mark.parametrize("name", SET_ELSEWHERE)
def test_what_would_have_no_effect_is_refused_with_the_reason(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: has no effect here: {SET_ELSEWHERE[name]}"):
        engine_arguments(context_of(folder, **{name: 1}), {})


def test_fp8_is_refused_on_a_cpu_and_nothing_else_is(folder: Path) -> None:
    with pytest.raises(ConfigError, match="quantization: 'fp8': vLLM has no kernels for it on a CPU"):
        engine_arguments(context_of(folder, quantization="fp8"), {})
    assert engine_arguments(context_of(folder, quantization="awq"), {})["quantization"] == "awq"


def test_a_stage_without_a_cache_budget_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="cache budget of 0 bytes"):
        engine_arguments(context_of(folder, cache_bytes=0), {})


def test_missing_weights_are_told_before_anything_is_imported(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config\.json is missing") as caught:
        engine_arguments(context_of(tmp_path), {})
    assert caught.value.hint == "fetch the weights with `omnictl pull`"
    with pytest.raises(WeightsError, match="names no weights"):
        engine_arguments(context_of(None), {})
