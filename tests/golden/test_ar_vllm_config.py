"""Engine settings of a plan in vLLM's own configuration, and the bytes of the plan in its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.engines.ar.engine import ArEngine
from runtime.engines.ar.program import hidden_states_arguments
from runtime.engines.ar.settings import EngineSettings, engine_arguments
from runtime.engines.base import LoadContext
from runtime.errors import ConfigError
from runtime.plan import EngineKind, MemoryBudget, StagePlan
from tests.golden.ar_engines import Driver, TokenProgram, import_vllm
from tests.golden.tiny_llama import save_random

BLOCK_SIZE = 64
BLOCK_BYTES = 4 * 2 * 32 * 2 * BLOCK_SIZE
"""Layers x (key, value) x head size x bfloat16 x tokens."""
CACHE_BYTES = 7 * BLOCK_BYTES + 100
GIVEN: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 192,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 96,
    "block_size": BLOCK_SIZE,
    "enable_prefix_caching": False,
    "enforce_eager": True,
}
FOR_GPUS: dict[str, Any] = {"enforce_eager": False, "kv_cache_dtype": "fp8_e5m2", "quantization": "fp8"}
"""What this CPU cannot run; vLLM takes it into its configuration all the same."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_random(folder)
    import_vllm()
    return folder


def arguments(folder: Path, device: str, **settings: Any) -> dict[str, Any]:
    stage = StagePlan(
        name="thinker",
        engine=EngineKind.AR,
        program="any",
        slots=5,
        memory=MemoryBudget(weights_bytes=1, cache_bytes=CACHE_BYTES),
        engine_settings=settings,
    )
    return engine_arguments(LoadContext(stage, (device,), 1, folder, lambda phase: None), {})


def test_every_setting_has_its_place_in_vllms_configuration(folder: Path) -> None:
    """In a running engine; the bytes of the cache are those of the plan, down to a block that does not fit."""
    from vllm.config import CompilationMode

    from runtime.engines.ar.compat import Core

    core = Core(arguments(folder, "cpu", **GIVEN), 1)
    try:
        config = core._engine.vllm_config
        found = {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "enable_prefix_caching": config.cache_config.enable_prefix_caching,
            "enforce_eager": config.compilation_config.mode == CompilationMode.NONE,
        }
        assert found == GIVEN
        assert set(GIVEN) | set(FOR_GPUS) | {"kv_role"} == set(EngineSettings.model_fields)
        caches = core._runner.kv_caches
        assert sum(cache.nbytes for cache in caches) == CACHE_BYTES // BLOCK_BYTES * BLOCK_BYTES
        assert core.facts()["num_kv_tokens"] == CACHE_BYTES // BLOCK_BYTES * BLOCK_SIZE
        assert not config.scheduler_config.async_scheduling
        driver = Driver(ArEngine(core, TokenProgram()))
        for name in "abcd":
            driver.ask(name, range(40))
        driver.step()
        assert core.counts == (3, 1), "three at a time"
        assert core.num_computed_tokens == 96, "of 120 tokens as many as a step may have"
        assert all(len(answer.ids) == 16 for answer in driver.drain().values())
    finally:
        core.close()


def test_settings_for_gpus_reach_vllms_configuration(folder: Path) -> None:
    from vllm.config import CompilationMode
    from vllm.engine.arg_utils import EngineArgs

    from runtime.engines.ar.compat import FIXED_ARGUMENTS

    given = arguments(folder, "cuda:0", **{**GIVEN, **FOR_GPUS})
    config = EngineArgs(**{**FIXED_ARGUMENTS, **given}).create_engine_config()
    assert config.model_config.quantization == "fp8"
    assert config.quant_config.get_name() == "online", "quantized while it is loaded"
    assert config.cache_config.cache_dtype == "fp8_e5m2"
    assert config.compilation_config.mode != CompilationMode.NONE
    assert config.cache_config.kv_cache_memory_bytes == CACHE_BYTES


def test_compiled_code_is_not_shared_between_models_with_and_without_a_tap(folder: Path) -> None:
    """The tap changes what the compiled part of a model returns; vLLM finds compiled code again by this hash."""
    from vllm.engine.arg_utils import EngineArgs

    def key(**extra: Any) -> str:
        return EngineArgs(**arguments(folder, "cpu", dtype="float32"), **extra).create_engine_config().compute_hash()

    tapped = [{"additional_config": hidden_states_arguments(layer, ("cpu",))["additional_config"]} for layer in (1, 2)]
    assert len({key(), *(key(**extra) for extra in tapped)}) == 3
    assert key() == key()


def test_slots_are_the_default_of_the_batch_size(folder: Path) -> None:
    assert arguments(folder, "cpu", dtype="float32")["max_num_seqs"] == 5


def test_what_vllm_cannot_do_on_this_machine_is_not_blamed_on_the_weights() -> None:
    from runtime.engines.ar.compat import load_errors

    with pytest.raises(ConfigError, match="vLLM cannot do this here: FP8 KV cache") as caught, load_errors("/w", 1):
        raise NotImplementedError("FP8 KV cache on CPU requires x86 with AVX-512 or AMX.")
    assert "engine_settings" in str(caught.value.hint)
