"""A tiny Qwen3-Omni checkpoint with random weights, made from transformers' own classes: thinker, talker with its code
predictor, code2wav, tokenizer and processor, shaped like the real one.

Weights are spread out so that the most likely token is well ahead of the second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from runtime.engines.torchvision_operators import declare_missing_operators

declare_missing_operators()  # transformers, imported below where it is needed, imports torchvision

if TYPE_CHECKING:
    from transformers import Qwen2TokenizerFast, Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

ROLES = ("user", "system", "assistant")
"""One token each: the model finds the turns of a conversation by them."""
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
)
NAMED_TOKENS = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKER_VOCAB = 384
THINKER_HIDDEN = 64
THINKER_LAYERS = 4
HEAD_DIM = 32
NUM_KV_HEADS = 2
ACCEPT_LAYER = 3
"""Behind the layers to which the vision encoder adds, as in the real model."""
NUM_CODE_GROUPS = 4
CODEBOOK = 64
NUM_SUPPRESSED = 1024
"""The reference never picks the last 1024 ids of the talker, save the end: they hold what is not a code."""
TALKER_VOCAB = CODEBOOK + NUM_SUPPRESSED
TALKER_HIDDEN = 128
TALKER_LAYERS = 3
CODEC_END = CODEBOOK + 6
SPEAKERS = {"ethan": CODEBOOK + 100, "chelsie": CODEBOOK + 101, "aiden": CODEBOOK + 102}
SLIDING_WINDOW = 16
SPREAD = 0.08
EXPERT_SPREAD = 0.25
"""So large that answers follow the prompt instead of falling into a loop."""
_THINKER_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_PREDICTOR_ROPE = {"rope_type": "default", "rope_theta": 1e6}


def omni_tokenizer(
    special_tokens: Sequence[str] = SPECIAL_TOKENS,
    named_tokens: Mapping[str, str] = NAMED_TOKENS,
    chat_template: str = CHAT_TEMPLATE,
) -> Qwen2TokenizerFast:
    """A token a byte, a token a role."""
    from transformers import Qwen2TokenizerFast

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    vocab = {symbol: byte for byte, symbol in symbols.items()}
    merges: list[tuple[str, str]] = []
    for role in ROLES:
        for end in range(2, len(role) + 1):
            if role[:end] not in vocab:
                vocab[role[:end]] = len(vocab)
                merges.append((role[: end - 1], role[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special_tokens])
    fast = Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        bos_token=None,
        extra_special_tokens=dict(named_tokens),
        model_max_length=32768,
    )
    fast.chat_template = chat_template
    return fast


def save_omni(folder: Path) -> Qwen3OmniMoeForConditionalGeneration:
    """Write the checkpoint and give the model."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    tokenizer = omni_tokenizer()
    torch.manual_seed(0)
    model = Qwen3OmniMoeForConditionalGeneration(_config(tokenizer)).float().eval()
    _spread_out(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    _write(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad, "do_sample": False})
    save_processor(folder, "Qwen3OmniMoeProcessor", patch_size=16)
    return model


def _spread_out(model: Qwen3OmniMoeForConditionalGeneration) -> None:
    """Some classes leave experts uninitialized, and a fresh norm is all ones: neither would find a mistake."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "experts" in name:
                weight.normal_(0, EXPERT_SPREAD, generator=generator)
            if name.endswith("norm.weight") or "layernorm" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            if "lm_head" in name or "codec_head" in name or ("embed" in name and weight.dim() == 2):
                weight.mul_(4.0)


def _config(tokenizer: Qwen2TokenizerFast) -> Qwen3OmniMoeConfig:
    from transformers import Qwen3OmniMoeConfig

    def ids(**names: str) -> dict[str, int]:
        return {field: tokenizer.convert_tokens_to_ids(token) for field, token in names.items()}

    media = {
        **ids(audio_token_id="<|audio_pad|>", image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
        **ids(audio_start_token_id="<|audio_start|>", vision_start_token_id="<|vision_start|>"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "initializer_range": SPREAD,
    }
    ends = ids(audio_end_token_id="<|audio_end|>", vision_end_token_id="<|vision_end|>", user_token_id="user")
    config = Qwen3OmniMoeConfig(
        thinker_config=_thinker(tokenizer) | media | ends,
        talker_config=_talker() | media,
        code2wav_config=_code2wav(),
        enable_audio_output=True,
        **ids(im_start_token_id="<|im_start|>", im_end_token_id="<|im_end|>", tts_pad_token_id="<tts_pad>"),
        **ids(tts_bos_token_id="<tts_text_bos>", tts_eos_token_id="<tts_text_eod>"),
        **ids(system_token_id="system", user_token_id="user", assistant_token_id="assistant"),
    )
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    return config


def _moe(**changes: Any) -> dict[str, Any]:
    return {
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": _THINKER_ROPE,
        "initializer_range": SPREAD,
        **changes,
    }


def _thinker(tokenizer: Qwen2TokenizerFast) -> dict[str, Any]:
    return {
        "audio_config": {
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 64,
            "output_dim": THINKER_HIDDEN,
            "downsample_hidden_size": 16,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "initializer_range": SPREAD,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": THINKER_HIDDEN,
            "num_position_embeddings": 64,
            "image_size": 128,
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": SPREAD,
        },
        "text_config": _moe(
            vocab_size=THINKER_VOCAB,
            hidden_size=THINKER_HIDDEN,
            num_hidden_layers=THINKER_LAYERS,
            norm_topk_prob=True,
            mlp_only_layers=[],
            tie_word_embeddings=False,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        ),
    }


def _talker() -> dict[str, Any]:
    return {
        "num_code_groups": NUM_CODE_GROUPS,
        "thinker_hidden_size": THINKER_HIDDEN,
        "accept_hidden_layer": ACCEPT_LAYER,
        "codec_pad_id": CODEBOOK + 4,
        "codec_bos_id": CODEBOOK + 5,
        "codec_eos_token_id": CODEC_END,
        "codec_nothink_id": CODEBOOK + 11,
        "codec_think_bos_id": CODEBOOK + 12,
        "codec_think_eos_id": CODEBOOK + 13,
        "speaker_id": SPEAKERS,
        "spatial_merge_size": 2,
        "text_config": _moe(
            vocab_size=TALKER_VOCAB,
            hidden_size=TALKER_HIDDEN,
            num_hidden_layers=TALKER_LAYERS,
            shared_expert_intermediate_size=64,
            norm_topk_prob=False,
        ),
        "code_predictor_config": {
            "vocab_size": CODEBOOK,
            "hidden_size": TALKER_HIDDEN,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM,
            "num_code_groups": NUM_CODE_GROUPS,
            "rope_parameters": _PREDICTOR_ROPE,
            "initializer_range": SPREAD,
        },
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": CODEBOOK,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "sliding_window": SLIDING_WINDOW,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_quantizers": NUM_CODE_GROUPS,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "decoder_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": SPREAD,
    }


def save_processor(folder: Path, processor_class: str, patch_size: int, chat_template: str = CHAT_TEMPLATE) -> None:
    sizes = {"shortest_edge": 3136, "longest_edge": 12845056}
    patches = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2, "size": sizes}
    whisper = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 4800000,
        "nb_max_frames": 30000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "dither": 0.0,
    }
    images = {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    limits = {"min_pixels": 3136, "max_pixels": 12845056, "processor_class": processor_class}
    _write(folder / "preprocessor_config.json", whisper | images | patches | limits)
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", "processor_class": processor_class}
    _write(folder / "video_preprocessor_config.json", videos | patches)
    (folder / "chat_template.jinja").write_text(chat_template)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1))
