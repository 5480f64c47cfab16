"""What transformers makes of the tiny Qwen2.5-Omni checkpoint: the values that staged serving must equal.

Made once a test session (tests/golden/conftest.py); greedy, float32, eager attention, one request at a time, the noise
of the waveform from one seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.golden.omni_reference import NUM_CODEC_TOKENS, NUM_TEXT_TOKENS, REPETITION_PENALTY, processed, recorded
from tests.golden.tiny_qwen2_5_omni import CODEC_END, CODEC_PAD

NAMES = ("short", "question", "long", "chinese", "audio", "image", "video", "watch")
NOISE_SEED = 0
"""Of speech that nobody sampled."""
VOICE = "Ethan"


@dataclass(frozen=True)
class Reference25:
    """Of one prompt. `prompt_ids` has media already expanded; `last_text_id` is never fed back, so it has no row."""

    prompt_ids: list[int]
    text_ids: list[int]
    positions: torch.Tensor
    """[3, prompt]"""
    rows: torch.Tensor
    """[prompt + text - 1, thinker hidden]: the last hidden state plus, but for media, the embedding."""
    code_ids: list[int]
    """Sampled by the talker, the end included if it came."""
    codes: list[int]
    """Those that are codes."""
    samples: torch.Tensor
    """[samples]"""

    @property
    def ended(self) -> bool:
        return len(self.codes) < len(self.code_ids)


def make_reference25(model: Any, processor: Any, name: str) -> Reference25:
    """WHY the prefix: the talker of transformers 5.19 is handed the pictures, too, and refuses them."""
    inputs, end = processed(processor, name)
    inputs = {f"thinker_{key}" if key.startswith("pixel_values") else key: value for key, value in inputs.items()}
    ids = inputs["input_ids"]
    with (
        recorded(model.thinker, "generate") as thought,
        recorded(model.thinker, "get_rope_index") as placed,
        recorded(model.talker, "generate") as spoken,
        _masked(model.talker),
        _seeded(model.token2wav),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Passing `repetition_penalty` with `inputs_embeds`")  # that is what we want
        _, samples = model.generate(
            speaker=VOICE,
            thinker_max_new_tokens=NUM_TEXT_TOKENS,
            thinker_do_sample=False,
            thinker_eos_token_id=end,
            talker_max_new_tokens=NUM_CODEC_TOKENS,
            talker_do_sample=False,
            talker_eos_token_id=[CODEC_PAD, CODEC_END],
            talker_repetition_penalty=REPETITION_PENALTY,
            **inputs,
        )
    num_prompt = ids.shape[1]
    steps = thought["result"].hidden_states
    embeddings = torch.cat([step[0] for step in steps], 1)[0].clone()
    config = model.config.thinker_config
    media = torch.tensor([config.audio_token_index, config.image_token_index, config.video_token_index])
    embeddings[:num_prompt][torch.isin(ids[0], media)] = 0
    code_ids = spoken["result"][0, num_prompt + 2 :].tolist()
    return Reference25(
        prompt_ids=ids[0].tolist(),
        text_ids=thought["result"].sequences[0, num_prompt:].tolist(),
        positions=placed["result"][0][:, 0].long(),
        rows=torch.cat([step[-1] for step in steps], 1)[0] + embeddings,
        code_ids=code_ids,
        codes=[code for code in code_ids if code not in (CODEC_PAD, CODEC_END)],
        samples=samples.clone(),
    )


@contextmanager
def _masked(talker: Any) -> Iterator[None]:
    """WHY: transformers 5.19 drops a mask that masks nothing before it calls the talker, which without a mask leaves
    out the marks that begin speech, and the positions of media. In a padded batch, and in older versions, it has both.
    """

    def keep(module: Any, arguments: Any, named: dict[str, Any]) -> Any:
        if named.get("attention_mask") is None:
            given = named["input_ids"] if named.get("inputs_embeds") is None else named["inputs_embeds"]
            num_past = named["past_key_values"].get_seq_length()
            named["attention_mask"] = torch.ones(len(given), num_past + given.shape[1], dtype=torch.long)
        return arguments, named

    hook = talker.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _seeded(token2wav: Any) -> Iterator[None]:
    hook = token2wav.register_forward_pre_hook(lambda *_: torch.manual_seed(NOISE_SEED) and None)
    try:
        yield
    finally:
        hook.remove()
