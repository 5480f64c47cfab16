"""Loading an `ar` stage from a plan: in a thread as the worker does it, and every way in which it can fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.engines.ar.engine import ArEngine, load
from runtime.engines.base import LoadContext
from runtime.errors import ConfigError, OmniError, WeightsError
from runtime.plan import EngineKind, MemoryBudget, StagePlan
from tests.golden.ar_engines import (
    BLOCK_SIZE,
    KV_BYTES_PER_TOKEN,
    LATER_INPUT,
    Driver,
    assert_nothing_left,
    import_vllm,
    make_engine,
)
from tests.golden.tiny_llama import byte_tokenizer, save_random

CACHE_BYTES = 64 * BLOCK_SIZE * KV_BYTES_PER_TOKEN


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_vllm()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_random(tmp_path)
    return tmp_path


def load_stage(
    folder: Path,
    *,
    cache_bytes: int = CACHE_BYTES,
    program_settings: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda phase: None,
    **settings: Any,
) -> ArEngine:
    stage = StagePlan(
        name="thinker",
        engine=EngineKind.AR,
        program="sidekick.thinker",
        weights="tiny",
        memory=MemoryBudget(weights_bytes=1, cache_bytes=cache_bytes),
        engine_settings={"dtype": "float32", "max_model_len": 256, **settings},
        program_settings={"temperature": 0.0, "max_tokens": 12, **(program_settings or {})},
    )
    return load(LoadContext(stage=stage, devices=("cpu",), num_threads=1, weights_dir=folder, progress=progress))


def test_a_stage_is_loaded_and_served_in_a_thread_that_is_not_the_main_one(checkpoint: Path) -> None:
    phases: list[str] = []
    found: dict[str, Any] = {}

    def serve() -> None:
        engine = load_stage(checkpoint, progress=phases.append)
        found["facts"] = engine.facts()
        driver = Driver(engine)
        driver.open("spoken", "request", LATER_INPUT)
        parts = [{"type": "text", "text": "Both:"}, {"type": "audio", "index": 1}, {"type": "audio", "index": 0}]
        driver.feed("spoken", messages=[{"role": "user", "content": parts}])
        driver.feed("spoken", edge=LATER_INPUT, last=False, index=0, text="first clip")
        driver.feed("spoken", edge=LATER_INPUT, index=1, text="second clip")
        driver.open("written")
        driver.feed("written", messages=[{"role": "user", "content": "Both:\nsecond clip\nfirst clip"}])
        found["answers"] = driver.drain()
        assert_nothing_left(engine)
        engine.close()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(100)
    assert not thread.is_alive()
    assert phases == ["importing vllm", "loading the model"]
    assert found["facts"] == {
        "vllm_version": "0.32.0",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "num_kv_tokens": 64 * BLOCK_SIZE,
        "num_kv_blocks": 63,
        "attention_backend": "CPU_ATTN",
    }
    spoken, written = found["answers"]["spoken"], found["answers"]["written"]
    assert spoken.text == written.text == _transformers_answer(checkpoint, "Both:\nsecond clip\nfirst clip", 12)
    assert spoken.end.usage["completion_tokens"] == 12
    assert spoken.end.usage["prompt_tokens"] == written.end.usage["prompt_tokens"]


def _transformers_answer(folder: Path, text: str, max_new_tokens: int) -> str:
    from transformers import LlamaForCausalLM

    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = torch.tensor([ids])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False
    )
    text = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _zero(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(100_000))


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _break_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")


def _remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _more_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))


def _wider_layers(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))


@pytest.mark.parametrize(
    "damage",
    [_cut, _zero, _break_config, _break_tokenizer, _remove_tokenizer, _more_layers, _wider_layers],
    ids=lambda damage: damage.__name__.strip("_"),
)
def test_damaged_weights(checkpoint: Path, damage: Callable[[Path], None]) -> None:
    damage(checkpoint)
    error = _load_error(WeightsError, checkpoint)
    assert str(checkpoint) in error.message
    assert error.hint == "fetch the weights again with `omnictl pull`"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"cache_bytes": 3 * BLOCK_SIZE * KV_BYTES_PER_TOKEN},
            f"cache budget of {3 * BLOCK_SIZE * KV_BYTES_PER_TOKEN}",
        ),
        ({"cache_bytes": 1 << 50}, f"cache budget of {1 << 50} bytes"),
        ({"max_model_len": 1_000_000}, "max_model_len"),
        ({"quantization": "none-such"}, "quantization"),
        ({"kv_cache_dtype": "none-such"}, "Input should be"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens"),
        ({"program_settings": {"temprature": 1}}, "temprature"),
        ({"program_settings": {"temperature": 5}}, "temperature"),
    ],
    ids=str,
)
def test_settings_that_cannot_work(checkpoint: Path, settings: dict[str, Any], message: str) -> None:
    error = _load_error(ConfigError, checkpoint, **settings)
    assert message in error.message
    assert len(error.message) < 700


def _load_error(kind: type[OmniError], folder: Path, **settings: Any) -> OmniError:
    with pytest.raises(kind, match="^stage thinker: ") as caught:
        load_stage(folder, **settings)
    return caught.value


def test_a_broken_forward_comes_out_of_step(checkpoint: Path) -> None:
    """It is fatal: the stage's process ends and is replaced."""
    engine = make_engine(checkpoint)
    driver = Driver(engine)

    def fail(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    driver.ask("running", [1, 2, 3])
    driver.step()
    engine.core._core.model_executor.driver_worker.worker.model_runner.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        driver.step()
    engine.close()
