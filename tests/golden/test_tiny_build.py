"""The tiny build of Qwen3-Omni: the same bytes each time, the published token ids, a tokenizer that loses no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from omnictl.download import file_sha256
from runtime.programs.qwen3_omni import tiny

TEXTS = (
    "Hello, world!",
    "a user, a system and an assistant",
    "Grüße aus Köln \N{ROCKET} 你好\n\ttabs  and spaces ",
    " w300 w5000",
    "\x00\x7f\u200b",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.build(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_two_builds_are_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    tiny.build(tmp_path)
    one, other = ({path.name: file_sha256(path) for path in sorted(place.iterdir())} for place in (folder, tmp_path))
    assert one == other


def test_ids_are_those_of_the_published_model(folder: Path, tokenizer: Any) -> None:
    ids = {"<|im_start|>": 151644, "<|im_end|>": 151645, "<|audio_pad|>": 151675, "<tts_pad>": 151671}
    ids |= {"user": 872, "system": 8948, "assistant": 77091, "!": 0, "A": 32, "\n": 198}
    for text, number in ids.items():
        assert tokenizer.encode(text, add_special_tokens=False) == [number], text
    config = json.loads((folder / "config.json").read_text())
    assert config["talker_config"]["codec_eos_token_id"] == 2150
    assert config["talker_config"]["num_code_groups"] == config["code2wav_config"]["num_quantizers"] == 16


def test_the_end_is_never_among_the_best(folder: Path) -> None:
    """Of text and of codes: its logit is 0, and half of the others are greater."""
    with safe_open(folder / "model.safetensors", "pt") as weights:
        for name, end in (("thinker.lm_head.weight", 151645), ("talker.codec_head.weight", 2150)):
            matrix = weights.get_tensor(name)
            assert not matrix[end].any()
            assert matrix[end - 1].any()


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_as_it_was(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert all(number < 256 or number in tiny.ROLES for number in ids), "words are only for answers"


def test_a_conversation_has_its_marks(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "Listen:"}, {"type": "audio"}, {"type": "image"}, {"type": "video"}]
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nListen:<|audio_start|><|audio_pad|><|audio_end|>"
        "<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_no_weight_is_left_as_the_memory_was(folder: Path) -> None:
    """What transformers does not initialize may hold anything."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            assert tensors.get_tensor(name).float().abs().max() < 10, name
