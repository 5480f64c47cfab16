"""A tiny Qwen3-Omni with random weights in the shape of the published one: its token ids, chat template, special
tokens, voices, 16 code groups, and small towers for sound and images. Its answers are noise, its way is the real one.

Called by `runtime.convert` with an empty folder, in a process of its own. The same bytes every time; raise the recipe's
`convert_version` when they change.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from runtime.engines.torchvision_operators import declare_missing_operators

VOCABULARY = 151_643
"""Tokens of text; the special ones follow."""
VOCABULARY_ROWS = 152_064
ROLES = {872: "user", 8948: "system", 77091: "assistant"}
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)
IDS = {token: VOCABULARY + number for number, token in enumerate(SPECIAL_TOKENS)}
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
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SEED = 0
SIZE = 64
INNER = 128
SPREAD = 0.05
NUM_CODE_GROUPS = 16
NUM_CODES = 2048
CONTEXT = 8192
"""Tokens; the recipe's `tiny` section says the same."""
MAX_PIXELS = 802_816
"""Of an image: 784 tokens, so that one leaves room for others."""


def build(folder: Path) -> None:
    """Write the checkpoint with its tokenizer and the settings of its processor."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    declare_missing_operators()
    _save_model(folder)
    _save_tokenizer(folder)
    _save_processor(folder)


def _save_model(folder: Path) -> None:
    """In bfloat16, as the published one."""
    import torch
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    torch.manual_seed(SEED)
    config = Qwen3OmniMoeConfig(**_config())
    config.architectures = [Qwen3OmniMoeForConditionalGeneration.__name__]
    config.dtype = torch.bfloat16
    model = Qwen3OmniMoeForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "experts" in name:  # transformers leaves some of them as the memory was
                weight.normal_(0, SPREAD)
        # an end that is as likely as the middle of all is never among the best: answers are as long as their limits
        model.thinker.lm_head.weight[IDS["<|im_end|>"]] = 0
        model.talker.codec_head.weight[config.talker_config.codec_eos_token_id] = 0
    model.save_pretrained(folder)
    ends = {"eos_token_id": IDS["<|im_end|>"], "pad_token_id": IDS["<|endoftext|>"], "do_sample": False}
    _write(folder / "generation_config.json", ends)


def _save_tokenizer(folder: Path) -> None:
    """A byte is a token, the first 256 as in the published vocabulary. The others are words that only answers have:
    there are no merges, so no text is ever cut into them. The names of the roles are found whole.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2TokenizerFast

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [ROLES.get(number, f"Ġw{number}") for number in range(len(tokens), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(role, normalized=False) for role in ROLES.values()])
    fast = Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token=None,
        bos_token=None,
        extra_special_tokens=NAMED_TOKENS,
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def _save_processor(folder: Path) -> None:
    sizes = {"shortest_edge": 3136, "longest_edge": MAX_PIXELS}
    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": sizes}
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "n_samples": 4_800_000,
        "nb_max_frames": 30_000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "dither": 0.0,
    }
    images = {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    limits = {"min_pixels": 3136, "max_pixels": MAX_PIXELS, "processor_class": "Qwen3OmniMoeProcessor"}
    _write(folder / "preprocessor_config.json", sound | images | patches | limits)
    videos = {"video_processor_type": "Qwen2VLVideoProcessor", "processor_class": "Qwen3OmniMoeProcessor"}
    _write(folder / "video_preprocessor_config.json", videos | patches)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


# ---- the configuration: names are transformers', sizes as small as the classes allow ---------------------------


def _config() -> dict[str, Any]:
    media = {
        "audio_token_id": IDS["<|audio_pad|>"],
        "image_token_id": IDS["<|image_pad|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "audio_start_token_id": IDS["<|audio_start|>"],
        "vision_start_token_id": IDS["<|vision_start|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "initializer_range": SPREAD,
    }
    user, system, assistant = ROLES
    ends = {
        "audio_end_token_id": IDS["<|audio_end|>"],
        "vision_end_token_id": IDS["<|vision_end|>"],
        "user_token_id": user,
    }
    return {
        "thinker_config": _thinker() | media | ends,
        "talker_config": _talker() | media,
        "code2wav_config": _code2wav(),
        "enable_audio_output": True,
        "im_start_token_id": IDS["<|im_start|>"],
        "im_end_token_id": IDS["<|im_end|>"],
        "tts_pad_token_id": IDS["<tts_pad>"],
        "tts_bos_token_id": IDS["<tts_text_bos>"],
        "tts_eos_token_id": IDS["<tts_text_eod>"],
        "system_token_id": system,
        "user_token_id": user,
        "assistant_token_id": assistant,
    }


def _decoder(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "initializer_range": SPREAD,
        **more,
    }


def _experts(**more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return _decoder(
        moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-6, rope_parameters=rope, **more
    )


def _thinker() -> dict[str, Any]:
    return {
        "audio_config": {
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": SIZE,
            "d_model": SIZE,
            "output_dim": SIZE,
            "downsample_hidden_size": 16,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "initializer_range": SPREAD,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": SIZE,
            "intermediate_size": SIZE,
            "num_heads": 2,
            "out_hidden_size": SIZE,
            "num_position_embeddings": 64,
            "image_size": 128,
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": SPREAD,
        },
        "text_config": _experts(
            vocab_size=VOCABULARY_ROWS,
            num_hidden_layers=4,
            norm_topk_prob=True,
            mlp_only_layers=[],
            tie_word_embeddings=False,
            eos_token_id=IDS["<|im_end|>"],
        ),
    }


def _talker() -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    return {
        "num_code_groups": NUM_CODE_GROUPS,
        "thinker_hidden_size": SIZE,
        "accept_hidden_layer": 2,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        "spatial_merge_size": 2,
        "text_config": _experts(
            vocab_size=3072, num_hidden_layers=3, shared_expert_intermediate_size=64, norm_topk_prob=False
        ),
        "code_predictor_config": _decoder(
            vocab_size=NUM_CODES, num_hidden_layers=2, num_code_groups=NUM_CODE_GROUPS, rope_parameters=rope
        ),
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": NUM_CODES,
        "num_quantizers": NUM_CODE_GROUPS,
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 16,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "decoder_dim": SIZE,
        "max_position_embeddings": CONTEXT,
        "initializer_range": SPREAD,
    }
