"""What transformers makes of the tiny Qwen3-Omni checkpoint: the values that staged serving must equal.

Made once a test session (tests/golden/conftest.py); greedy, float32, eager attention, one request at a time.
"""

from __future__ import annotations

import io
import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile
import torch
from PIL import Image

from tests.golden.tiny_qwen3_omni import ACCEPT_LAYER
from tests.video import video_file

NUM_TEXT_TOKENS = 20
NUM_CODEC_TOKENS = 30
REPETITION_PENALTY = 1.05
SAMPLE_RATE_HZ = 16_000
CLIP_S = 2


@dataclass(frozen=True)
class Medium:
    """A file of a prompt, made from its name: audio is noise, images and clips are of random blocks."""

    modality: str
    name: str


PARTS: dict[str, list[str | Medium]] = {
    "short": ["Hello"],
    "question": ["What is two plus two?"],
    "long": ["Tell me a story about a fox and the moon, please. " * 4],
    "chinese": ["你好, 今天天气怎么样?"],
    "audio": [Medium("audio", "noise"), "Transcribe."],
    "image": [Medium("image", "large"), "What is it?"],
    "other image": [Medium("image", "other"), "What is it?"],
    "images": ["From ", Medium("image", "small"), " to ", Medium("image", "tall"), " now"],
    "image and audio": [Medium("image", "large"), "and", Medium("audio", "noise"), "?"],
    "video": ["See ", Medium("video", "clip"), "!"],
    "watch": [Medium("video", "clip"), "Watch and listen."],
    "watch first": [Medium("video", "clip"), "then", Medium("image", "small"), "."],
    "watch last": [Medium("image", "small"), "then", Medium("video", "clip"), "."],
}
"""The last three with the sound of the clip."""
OPTIONS: dict[str, dict[str, Any]] = {
    name: {"use_audio_in_video": True} for name in ("watch", "watch first", "watch last")
}
"""Of the multimodal processor."""
VIDEO_FPS = 2.0
NUM_FRAMES, FRAME_HEIGHT, FRAME_WIDTH = 4, 32, 32
IMAGE_SIZES = {"small": (64, 96), "large": (160, 224), "other": (160, 224), "tall": (256, 64)}
"""(height, width)"""
BLOCK_PIXELS = 16
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
    positions: torch.Tensor
    """int64 [3, prompt]"""
    code0: list[int]
    """Sampled by the talker, the end included if it came."""
    codes: torch.Tensor
    """[code groups, frames]"""
    samples: torch.Tensor
    """[samples]"""


def messages_of(name: str) -> list[dict[str, Any]]:
    index = itertools.count()
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part.modality, "index": next(index)}
        for part in PARTS[name]
    ]
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]


def media_of(name: str) -> list[Medium]:
    return [part for part in PARTS[name] if isinstance(part, Medium)]


def clip() -> np.ndarray:
    """float32 [CLIP_S * SAMPLE_RATE_HZ], noise."""
    noise = np.random.default_rng(0).standard_normal(CLIP_S * SAMPLE_RATE_HZ)
    return (0.1 * noise).astype(np.float32)


def picture(name: str) -> np.ndarray:
    """uint8 [height, width, 3]"""
    return _blocks(*IMAGE_SIZES[name], seed=sum(name.encode()))


def frames() -> np.ndarray:
    """uint8 [NUM_FRAMES, height, width, 3] of the clip, whose sound is `clip`."""
    return np.stack([_blocks(FRAME_HEIGHT, FRAME_WIDTH, seed=100 + number) for number in range(NUM_FRAMES)])


def _blocks(height: int, width: int, seed: int) -> np.ndarray:
    colours = np.random.default_rng(seed).integers(0, 256, (height // BLOCK_PIXELS, width // BLOCK_PIXELS, 3), np.uint8)
    return colours.repeat(BLOCK_PIXELS, 0).repeat(BLOCK_PIXELS, 1)


def file_of(medium: Medium) -> tuple[str, np.ndarray]:
    """(format, bytes as uint8 [n]) from which the medium comes back without loss."""
    if medium.modality == "audio":
        out = io.BytesIO()
        soundfile.write(out, clip(), SAMPLE_RATE_HZ, format="WAV", subtype="FLOAT")
        found = "wav", out.getvalue()
    elif medium.modality == "image":
        out = io.BytesIO()
        Image.fromarray(picture(medium.name)).save(out, "png")
        found = "png", out.getvalue()
    else:
        found = "mkv", video_file(frames(), int(VIDEO_FPS), sound=clip())
    return found[0], np.frombuffer(found[1], np.uint8)


def make_reference(model: Any, processor: Any, name: str, **talker: Any) -> Reference:
    """WHY the configuration: the talker of transformers 5.19 looks for its audio encoder's in a place where it is not
    when there are pictures and sound.
    """
    model.talker.config.audio_config = model.thinker.config.audio_config
    inputs, end = processed(processor, name)
    return _generate(model, inputs.pop("input_ids"), end, inputs, talker)


def processed(processor: Any, name: str) -> tuple[dict[str, Any], int]:
    """What `generate` takes of a prompt, and the token that ends its answer."""
    text = processor.tokenizer.apply_chat_template(messages_of(name), add_generation_prompt=True, tokenize=False)
    media, options = media_of(name), OPTIONS.get(name, {})
    given: dict[str, list[Any]] = {
        "audio": [clip() for medium in media if medium.modality == "audio" or (options and medium.modality == "video")],
        "images": [Image.fromarray(picture(medium.name)) for medium in media if medium.modality == "image"],
        "videos": [frames() for medium in media if medium.modality == "video"],
    }
    if given["videos"]:
        options = {**options, "fps": VIDEO_FPS}
    inputs = processor(text=text, return_tensors="pt", **{k: v for k, v in given.items() if v}, **options)
    speaks = {"use_audio_in_video": options.get("use_audio_in_video", False)}
    return {**inputs, **speaks}, processor.tokenizer.convert_tokens_to_ids("<|im_end|>")


def _generate(model: Any, ids: torch.Tensor, end: int, inputs: dict[str, Any], talker: dict[str, Any]) -> Reference:
    with (
        recorded(model.thinker, "generate") as thought,
        recorded(model.thinker, "get_rope_index") as placed,
        recorded(model.talker, "generate") as spoken,
        recorded(model.code2wav, "chunked_decode") as decoded,
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
        positions=_whole_numbers(placed["result"][0][:, 0]),
        code0=spoken["result"].sequences[0].tolist(),
        codes=decoded["arguments"][0][0].clone(),
        samples=samples[0, 0].clone(),
    )


def _whole_numbers(positions: torch.Tensor) -> torch.Tensor:
    assert torch.equal(positions, positions.round())
    return positions.long()


@contextmanager
def recorded(owner: Any, name: str) -> Iterator[dict[str, Any]]:
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
