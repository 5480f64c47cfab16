"""Every assumption about vLLM's inside that the `ar` engine makes: these fail when a new vLLM breaks one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runtime.engines.ar import environment
from runtime.engines.ar.sampling import Sampling
from runtime.engines.ar.settings import EngineSettings
from runtime.errors import EnvironmentProblem, InvalidRequest, OmniError, Overloaded, StageError
from tests.golden.ar_engines import BLOCK_SIZE, import_vllm, make_engine
from tests.golden.tiny_llama import save_random


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_vllm()


def subclasses(root: type) -> set[type]:
    return {root}.union(*(subclasses(child) for child in root.__subclasses__()))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    from runtime.engines.ar.compat import VERSION, check_version

    check_version()
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(EnvironmentProblem, match=rf"vllm 0\.33\.1 is installed; .* {VERSION}"):
        check_version()


def test_the_environment_variables_exist() -> None:
    from vllm.envs import environment_variables

    names = [*environment.FIXED, *environment.REMOVED, "VLLM_CACHE_ROOT", "VLLM_LOGGING_LEVEL"]
    ours = {name for name in names if name.startswith("VLLM_")}
    known = set(environment_variables) | {"VLLM_CPU_KVCACHE_SPACE"}  # read by the CPU platform without a declaration
    assert ours <= known
    assert "VLLM_CPU_KVCACHE_SPACE" in Path(_source_of("vllm.platforms.cpu")).read_text()


def _source_of(module: str) -> str:
    import importlib

    return str(importlib.import_module(module).__file__)


def test_the_cache_size_of_the_plan_beats_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    save_random(tmp_path)
    engine = make_engine(tmp_path, num_blocks=10)
    try:
        assert engine.core.facts()["num_kv_tokens"] == 10 * BLOCK_SIZE
    finally:
        engine.close()


def test_settings_and_fixed_arguments_are_vllms() -> None:
    from vllm.engine.arg_utils import EngineArgs

    from runtime.engines.ar.compat import FIXED_ARGUMENTS

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    settings = set(EngineSettings.model_fields) - {"kv_role"}
    assert settings | set(FIXED_ARGUMENTS) | {"model", "kv_cache_memory_bytes", "kv_transfer_config"} <= known


def test_every_sampling_field_reaches_vllm() -> None:
    from runtime.engines.ar.compat import _sampling_params

    values: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 33,
        "stop": ("a", "bc"),
        "seed": 2**63 - 1,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
    }
    assert set(values) == {field.name for field in dataclasses.fields(Sampling)}
    params = _sampling_params(Sampling(**values))
    for name, value in values.items():
        assert getattr(params, name) == (list(value) if name == "stop" else value), name
    assert params.skip_clone


def test_every_error_of_vllm_is_translated() -> None:
    from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMError, VLLMServerError
    from vllm.v1.engine.exceptions import EngineDeadError

    from runtime.engines.ar.compat import translated

    expected = {VLLMClientError: InvalidRequest, GracefulHTTPError: Overloaded, VLLMServerError: StageError}
    kinds = subclasses(VLLMError) - {VLLMError, EngineDeadError}
    assert len(kinds) >= 12
    for kind in kinds:
        (ours,) = {ours for theirs, ours in expected.items() if issubclass(kind, theirs)}
        error = kind.__new__(kind)
        Exception.__init__(error, "what went wrong")
        error.message = "what went wrong"
        error.parameter, error.value = "temperature", 3
        with pytest.raises(OmniError, match="what went wrong") as caught, translated():
            raise error
        assert type(caught.value) is ours
    with pytest.raises(EngineDeadError), translated():
        raise EngineDeadError


def test_the_parameter_at_fault_is_named() -> None:
    from vllm.exceptions import VLLMValidationError

    from runtime.engines.ar.compat import translated

    with pytest.raises(InvalidRequest) as caught, translated():
        raise VLLMValidationError("too hot", parameter="temperature", value=3)
    assert caught.value.param == "temperature"


def test_ends_are_called_as_we_call_them() -> None:
    from vllm.v1.engine import FINISH_REASON_STRINGS

    assert {"stop", "length", "error"} <= set(FINISH_REASON_STRINGS)


def test_models_are_looked_at_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing cached, and without starting a process."""
    from vllm.model_executor.models import registry

    from runtime.engines.ar.compat import _inspect_models_in_process

    def refuse(*command: Any, **_: Any) -> None:
        raise AssertionError(f"a process was started: {command}")

    _inspect_models_in_process()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", refuse)
    model = registry._LazyRegisteredModel("vllm.model_executor.models.llama", "LlamaForCausalLM")
    monkeypatch.setattr(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda self, module_hash: None)
    assert model.inspect_model_cls().is_text_generation_model
    assert registry._run_in_subprocess(os.getpid) == os.getpid()


def test_a_tokenizer_is_not_copied_though_it_would_be(tmp_path: Path) -> None:
    import copy
    import inspect

    from vllm.tokenizers import hf

    save_random(tmp_path)
    engine = make_engine(tmp_path, num_blocks=10)
    assert copy.deepcopy(engine.core.tokenizer) is engine.core.tokenizer
    engine.close()
    assert "copy.deepcopy(og_tokenizer)" in inspect.getsource(hf.maybe_make_thread_pool)


def test_all_process_groups_share_one_thread(tmp_path: Path) -> None:
    save_random(tmp_path)
    engine = make_engine(tmp_path, num_blocks=10)
    threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert threads.count("gloo_tcp_loop") == 1
    engine.close()


def test_the_scheduler_preempts_where_we_count() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from runtime.engines.ar.compat import StageScheduler

    assert issubclass(StageScheduler, Scheduler)
    assert StageScheduler._preempt_request is not Scheduler._preempt_request
    assert "_preempt_request" in Path(_source_of("vllm.v1.core.sched.scheduler")).read_text()


def test_the_core_runs_in_this_process_and_is_freed(tmp_path: Path) -> None:
    import torch.distributed

    save_random(tmp_path)
    engine = make_engine(tmp_path)
    assert type(engine.core._engine.engine_core).__name__ == "InprocClient"
    assert type(engine.core._scheduler).__name__ == "StageScheduler"
    assert torch.distributed.is_initialized()
    engine.close()
    assert not torch.distributed.is_initialized()
