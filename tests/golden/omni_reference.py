"""What transformers makes of the tiny Qwen3-Omni checkpoint: the values that staged serving must equal.

Made once a test session (tests/golden/conftest.py); greedy, float32, eager attention, one request at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.golden.tiny_qwen3_omni import ACCEPT_LAYER, omni_tokenizer

NUM_TEXT_TOKENS = 20
NUM_CODEC_TOKENS = 30
REPETITION_PENALTY = 1.05
SAMPLE_RATE_HZ = 16_000
CLIP_S = 2
PARTS: dict[str, list[Any]] = {
    "short": ["Hello"],
    "question": ["What is two plus two?"],
    "long": ["Tell me a story about a fox and the moon, please. " * 4],
    "chinese": ["你好, 今天天气怎么样?"],
    "audio": [{"type": "audio", "index": 0}, "Transcribe."],
}
SYSTEM = "You speak."


@dataclass(frozen=True)
class Reference:
    """Of one prompt. `prompt_ids` has media already expanded; `last_text_id` is never fed back, so it has no row."""

    prompt_ids: list[int]
    text_ids: list[int]
    embeddings: torch.Tensor
    """[prompt + text - 1, thinker hidden]"""
    hidden: torch.Tensor
    """[prompt + text - 1, thinker hidden] at the layer that the talker accepts."""
    code0: list[int]
    """Sampled by the talker, the end included if it came."""
    codes: torch.Tensor
    """[code groups, frames]"""
    samples: torch.Tensor
    """[samples]"""


def messages_of(name: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in PARTS[name]]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]


def clip() -> np.ndarray:
    """float32 [CLIP_S * SAMPLE_RATE_HZ], noise."""
    noise = np.random.default_rng(0).standard_normal(CLIP_S * SAMPLE_RATE_HZ)
    return (0.1 * noise).astype(np.float32)


def make_reference(model: Any, extractor: Any, name: str, **talker: Any) -> Reference:
    tokenizer = omni_tokenizer()
    inputs, text = {}, tokenizer.apply_chat_template(messages_of(name), add_generation_prompt=True, tokenize=False)
    if name == "audio":
        features = extractor(
            [clip()],
            sampling_rate=SAMPLE_RATE_HZ,
            return_attention_mask=True,
            padding=True,
            truncation=False,
            return_tensors="pt",
        )
        num_tokens = _num_audio_tokens(features["attention_mask"])
        text = text.replace("<|audio_pad|>", "<|audio_pad|>" * num_tokens)
        inputs = {
            "input_features": features["input_features"],
            "feature_attention_mask": features["attention_mask"],
        }
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    return _generate(model, ids, tokenizer.convert_tokens_to_ids("<|im_end|>"), inputs, talker)


def _num_audio_tokens(mask: torch.Tensor) -> int:
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    return int(modeling._get_feat_extract_output_lengths(mask.sum(-1))[0])


def _generate(model: Any, ids: torch.Tensor, end: int, inputs: dict[str, Any], talker: dict[str, Any]) -> Reference:
    with (
        _recorded(model.thinker, "generate") as thought,
        _recorded(model.talker, "generate") as spoken,
        _recorded(model.code2wav, "chunked_decode") as decoded,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Passing `repetition_penalty` with `inputs_embeds`")  # that is what we want
        _, samples = model.generate(
            input_ids=ids,
            speaker="Ethan",
            return_audio=True,
            thinker_max_new_tokens=NUM_TEXT_TOKENS,
            thinker_do_sample=False,
            thinker_eos_token_id=end,
            talker_max_new_tokens=NUM_CODEC_TOKENS,
            talker_do_sample=False,
            talker_repetition_penalty=REPETITION_PENALTY,
            **inputs,
            **talker,
        )
    steps = thought["result"].hidden_states
    return Reference(
        prompt_ids=ids[0].tolist(),
        text_ids=thought["result"].sequences[0, ids.shape[1] :].tolist(),
        embeddings=torch.cat([step[0] for step in steps], 1)[0].clone(),
        hidden=torch.cat([step[ACCEPT_LAYER] for step in steps], 1)[0].clone(),
        code0=spoken["result"].sequences[0].tolist(),
        codes=decoded["arguments"][0][0].clone(),
        samples=samples[0, 0].clone(),
    )


@contextmanager
def _recorded(owner: Any, name: str) -> Iterator[dict[str, Any]]:
    """What the last call of a method got and gave."""
    original, record = getattr(owner, name), {}

    def call(*arguments: Any, **named: Any) -> Any:
        record["arguments"], record["result"] = arguments, original(*arguments, **named)
        return record["result"]

    setattr(owner, name, call)
    try:
        yield record
    finally:
        delattr(owner, name)
