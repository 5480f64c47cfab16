"""What the model runners rely on where a GPU captures graphs and others use its memory, as far as a CPU can tell.

Runners for CPU and GPU are the same code of vLLM's first generation here; tests/gpu holds what only a GPU can show.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engines.ar.engine import ArEngine
from runtime.errors import ConfigError
from runtime.plan import REQUEST_INPUT
from tests.golden.ar_engines import import_vllm
from tests.golden.omni_reference import messages_of
from tests.golden.omni_stages import StageDriver, context, make_omni_engine
from tests.golden.tiny_qwen3_omni import HEAD_DIM, NUM_KV_HEADS, THINKER_LAYERS, omni_tokenizer

GIB = 1 << 30
LAYER_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 4


pytestmark = pytest.mark.timeout(400)  # what the first test waits for is built for the whole session


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_vllm()


def mixed(name: str) -> tuple[type, type]:
    """A mixin and the runner of a GPU that it is put before."""
    from runtime.engines.ar import compat_gpu

    _, mixin, runner, *_ = getattr(compat_gpu, name).__mro__
    return mixin, runner


@pytest.mark.parametrize("name", ["TappedGPUModelRunner", "FedGPUModelRunner"])
def test_what_a_mixin_overrides_is_there_and_is_called_so(name: str) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    mixin, runner = mixed(name)
    assert runner is GPUModelRunner
    methods = [name for name, value in vars(mixin).items() if inspect.isfunction(value) and hasattr(runner, name)]
    assert {"load_model", "_model_forward", "sample_tokens"} <= set(methods)
    theirs, ours = (list(inspect.signature(kind._model_forward).parameters) for kind in (runner, mixin))
    assert ours[:-1] == theirs[:-1], "called by name, with more by name"


def test_the_workers_make_our_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker import gpu_worker

    from runtime.engines.ar import compat_gpu

    assert "self.model_runner: GPUModelRunner = self._make_model_runner()" in inspect.getsource(gpu_worker)
    for worker, runner in (
        (compat_gpu.TappedGPUWorker, "TappedGPUModelRunner"),
        (compat_gpu.FedGPUWorker, "FedGPUModelRunner"),
    ):
        monkeypatch.setattr(compat_gpu, runner, lambda config, device: (config, device))
        assert worker._make_model_runner(SimpleNamespace(vllm_config="config", device="cuda:0")) == ("config", "cuda:0")


def test_the_plan_decides_the_cache_of_a_gpu_that_others_use_too() -> None:
    """The worker takes the plan's bytes as they are, and starts where another stage has most of the memory."""
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.utils import request_memory

    from runtime.engines.ar.compat import FIXED_ARGUMENTS

    snapshot = SimpleNamespace(total_memory=80 * GIB, free_memory=20 * GIB, device_="cuda:0")
    cache = SimpleNamespace(gpu_memory_utilization=FIXED_ARGUMENTS["gpu_memory_utilization"], kv_cache_memory_bytes=GIB)
    assert 0 < request_memory(snapshot, cache) <= GIB
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        request_memory(snapshot, SimpleNamespace(gpu_memory_utilization=0.92))
    profiled: list[Any] = []
    worker = SimpleNamespace(
        cache_config=cache,
        model_config=SimpleNamespace(multimodal_config=None),
        model_runner=SimpleNamespace(profile_run=lambda **arguments: profiled.append(arguments)),
        init_snapshot=snapshot,
        parallel_config=SimpleNamespace(),
        randomize_dummy_inputs=False,
        vllm_config=None,
    )
    assert Worker.determine_available_memory(worker) == GIB
    assert len(profiled) == 1


def test_a_tap_needs_the_blocks_of_the_cache_to_be_those_of_the_attention() -> None:
    """Some backends of GPUs cut a large block into smaller ones."""
    from runtime.engines.ar.compat import load_errors
    from runtime.engines.ar.compat_runner import HiddenTap

    class Runner:
        def initialize_kv_cache(self, kv_cache_config: Any) -> None:
            self.input_batch = SimpleNamespace(block_table=[SimpleNamespace(block_size=64)])

    class Tapped(HiddenTap, Runner):
        dtype, device, inputs_embeds_size = torch.float32, "cpu", 8

    def config(block_size: int) -> Any:
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=block_size))
        return SimpleNamespace(num_blocks=3, kv_cache_groups=[group])

    Tapped().initialize_kv_cache(config(64))
    with pytest.raises(ConfigError, match="block_size 128: .* blocks of 64") as caught, load_errors("/w", 1):
        Tapped().initialize_kv_cache(config(128))
    assert caught.value.hint == "set the stage's engine_settings.block_size to 64"


@pytest.fixture(scope="module")
def thinker(omni_checkpoint: Path) -> Iterator[ArEngine]:
    from runtime.programs.qwen3_omni.thinker import load

    program = load(context(omni_checkpoint, "thinker", temperature=0.0, max_tokens=3))
    engine = make_omni_engine(omni_checkpoint, program, THINKER_LAYERS * LAYER_BYTES)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def talker(omni_checkpoint: Path) -> Iterator[ArEngine]:
    from runtime.programs.qwen3_omni.talker import load

    program = load(context(omni_checkpoint, "talker", temperature=0.0, max_tokens=3))
    engine = make_omni_engine(omni_checkpoint, program, THINKER_LAYERS * LAYER_BYTES)
    yield engine
    engine.close()


def forwards(engine: ArEngine) -> Iterator[dict[str, Any]]:
    """The model's keyword arguments: in a run as it is compiled and captured, then in each real step."""
    runner, seen = engine.core._runner, []
    hook = runner.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    runner._dummy_run(8)
    yield from seen
    seen.clear()
    while engine.next_step_s() is not None:
        engine.step()
    hook.remove()
    assert len(seen) >= 3
    yield from seen


def assert_captured_memory_is_used(engine: ArEngine) -> None:
    """A graph replays on the addresses that it was captured with, and on the inputs that it was captured for."""
    first, *steps = forwards(engine)
    assert first["input_ids"] is None
    for kwargs in steps:
        assert kwargs["input_ids"] is None
        for name in ("inputs_embeds", "positions"):
            assert kwargs[name].data_ptr() == first[name].data_ptr(), name


def test_a_thinker_reads_what_a_graph_has_captured(thinker: ArEngine) -> None:
    StageDriver(thinker).ask("short", "short", "text", "hidden_states")
    assert_captured_memory_is_used(thinker)


def test_a_talker_reads_what_a_graph_has_captured(talker: ArEngine) -> None:
    """Its rows are ours: they must go into vLLM's own buffer."""
    driver, size = StageDriver(talker), talker.program.config.thinker["text_config"]["hidden_size"]
    driver.open("speech", "codec_codes", inputs=frozenset({REQUEST_INPUT}))
    prompt = omni_tokenizer().apply_chat_template(messages_of("short"), add_generation_prompt=True, return_dict=False)
    ids = np.array(prompt, np.int32)
    rows = np.random.default_rng(0).standard_normal((len(ids), size)).astype(np.float32)
    positions = np.tile(np.arange(len(ids), dtype=np.int32), (3, 1))
    tensors = {"token_ids": ids, "embeddings": rows, "hidden": rows[:0], "positions": positions}
    driver.feed("speech", REQUEST_INPUT, "hidden_states", {"dtype": "float32"}, tensors)
    more = {"token_ids": ids[:4], "embeddings": rows[:4]}
    driver.feed("speech", REQUEST_INPUT, "hidden_states", {"dtype": "float32"}, more, last=True)
    assert_captured_memory_is_used(talker)


def test_the_second_generation_offers_what_the_mixins_need() -> None:
    """Where an adapter would sit: its methods, and when they are called, are in docs/decisions/106."""
    from vllm.v1.worker.gpu.model_states.interface import ModelState

    for name in ("add_request", "remove_request", "prepare_inputs_embeds", "postprocess_state", "custom_sampler"):
        assert callable(getattr(ModelState, name)), name
