"""The converted weights against what they were made from: the voice bit for bit, the thinker's tokens and template."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnictl.recipe import load_recipe
from omnictl.weights import find_problems
from runtime.settings import weights_dir

pytestmark = pytest.mark.weights
TEXTS = (
    "Speech is produced frame by frame, and this longer sentence keeps the decoder busy for a while.",
    "Paris.",
    "The answer is 42!",
)


@pytest.fixture(scope="module")
def root() -> Path:
    problems = find_problems(load_recipe("sidekick"), root=weights_dir())
    assert problems == {}, f"{problems}: fetch the weights with `omnictl pull sidekick`"
    return weights_dir()


@cache
def session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def whole_voice() -> Path:
    """The uncut model, from the voice's own package; the same bytes that the recipe's weights are cut from."""
    path = Path(str(files("hibari"))) / "assets" / "hibari.onnx"
    wanted = next(f for f in load_recipe("sidekick").omnictl.weights["sidekick/voice"].files if f.name == "heart.onnx")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wanted.sha256
    return path


@cache
def phoneme_ids(text: str) -> np.ndarray:
    from hibari import Hibari

    voice = Hibari()
    return np.array([voice.ids(voice.phonemize(text)[0])])


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("speed", [1.0, 0.7])
def test_the_two_halves_of_the_voice_are_the_whole(root: Path, text: str, speed: float) -> None:
    inputs = {"ids": phoneme_ids(text), "speed": np.full(1, speed, np.float32)}
    whole = session(whole_voice())
    expected = dict(zip([output.name for output in whole.get_outputs()], whole.run(None, inputs), strict=True))

    latents, f0 = session(root / "sidekick/voice/talker.onnx").run(["latents", "f0"], inputs)
    code2wav = session(root / "sidekick/voice/code2wav.onnx")
    names = [output.name for output in code2wav.get_outputs()]
    found = dict(zip(names, code2wav.run(None, {"latents": latents}), strict=True)) | {"f0": f0}

    assert latents.shape[:2] == (1, 130)
    assert latents.shape[2] == f0.shape[1]
    assert set(found) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(found[name], values), f"{name} differs by {np.abs(found[name] - values).max()}"


def test_the_halves_say_what_they_take_and_give(root: Path) -> None:
    talker, code2wav = (session(root / "sidekick/voice" / f"{name}.onnx") for name in ("talker", "code2wav"))
    assert [i.name for i in talker.get_inputs()] == ["ids", "speed"]
    assert [o.name for o in talker.get_outputs()] == ["latents", "f0"]
    assert [i.name for i in code2wav.get_inputs()] == ["latents"]
    assert [o.name for o in code2wav.get_outputs()] == ["lh", "theta", "ln", "lr", "phi"]


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> Any:
    from runtime.engines.torchvision_operators import declare_missing_operators

    declare_missing_operators()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(root / "sidekick/thinker")


@pytest.mark.parametrize("text", ["Paris", "naïve café, 東京 🙂", "  two  spaces\n\ttab", "<b>markup</b> & {braces}"])
def test_the_tokenizer_loses_nothing(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_is_the_models_own(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert prompt == turns + "<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_thinker_is_a_plain_checkpoint_of_16_bit_floats(root: Path) -> None:
    from safetensors import safe_open
    from transformers import AutoConfig

    folder = root / "sidekick/thinker"
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures == ["LlamaForCausalLM"]
    assert not hasattr(config, "quantization_config")
    assert config.eos_token_id == 2
    with safe_open(folder / "model.safetensors", "pt") as weights:
        kinds = {weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    assert kinds == {"BF16"}
    assert not (folder / "model.gguf").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_thinker_answers_in_either_precision(root: Path, tokenizer: Any, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root / "sidekick/thinker", dtype=getattr(torch, dtype))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = prompt["input_ids"] if hasattr(prompt, "keys") else prompt
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])
