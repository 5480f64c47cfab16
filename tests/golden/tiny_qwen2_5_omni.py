"""A tiny Qwen2.5-Omni checkpoint with random weights, made from transformers' own classes: thinker, talker, token2wav,
voices, tokenizer and processor, shaped like the real one.

Weights are spread out so that the most likely token is well ahead of the second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.golden.tiny_qwen3_omni import CHAT_TEMPLATE, omni_tokenizer, save_processor

if TYPE_CHECKING:
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, Qwen2TokenizerFast

RENAMED = {
    "<|audio_start|>": "<|audio_bos|>",
    "<|audio_end|>": "<|audio_eos|>",
    "<|audio_pad|>": "<|AUDIO|>",
    "<|vision_start|>": "<|vision_bos|>",
    "<|vision_end|>": "<|vision_eos|>",
    "<|image_pad|>": "<|IMAGE|>",
    "<|video_pad|>": "<|VIDEO|>",
}
"""What Qwen3-Omni calls its marks -> what this model does."""
SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", *RENAMED.values()),
    *("<tts_pad>", "<tts_text_eod>", "<tts_bos_chelsie>", "<tts_bos_ethan>"),
)
NAMED_TOKENS = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
THINKER_VOCAB = 384
THINKER_HIDDEN = 128
THINKER_LAYERS = 3
HEAD_DIM = 32
NUM_KV_HEADS = 2
CODEBOOK = 96
CODEC_PAD, CODEC_START, CODEC_END, CODEC_MASK = (CODEBOOK + number for number in (3, 4, 5, 7))
TALKER_VOCAB = CODEBOOK + 16
TALKER_HIDDEN = 80
"""Not the thinker's, and not what the heads make together: 4 x 32."""
TALKER_LAYERS = 3
MEL_BANDS = 16
SPEAKER_SIZE = 12
BLOCK_FRAMES = 8
SPREAD = 0.08
END_WEIGHT = 0.8
"""Of the ends in the talker's head: some speeches end by themselves, others by their length."""
VOCODER_GAIN = 0.7
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
_DIT_ROPE = {"rope_type": "default", "rope_theta": 1e4}


def renamed(template: str) -> str:
    for old, new in RENAMED.items():
        template = template.replace(old, new)
    return template


def omni25_tokenizer() -> Qwen2TokenizerFast:
    return omni_tokenizer(SPECIAL_TOKENS, NAMED_TOKENS, renamed(CHAT_TEMPLATE))


def save_omni25(folder: Path) -> Qwen2_5OmniForConditionalGeneration:
    """Write the checkpoint and give the model."""
    from transformers import Qwen2_5OmniForConditionalGeneration

    tokenizer = omni25_tokenizer()
    torch.manual_seed(0)
    model = Qwen2_5OmniForConditionalGeneration(_config(tokenizer)).float().eval()
    _spread_out(model)
    model.save_pretrained(folder)
    torch.save(_speakers(tokenizer), folder / "spk_dict.pt")
    tokenizer.save_pretrained(folder)
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    generation = {"eos_token_id": end, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_processor(folder, "Qwen2_5OmniProcessor", patch_size=14, chat_template=renamed(CHAT_TEMPLATE))
    return model


def _spread_out(model: Qwen2_5OmniForConditionalGeneration) -> None:
    """A fresh norm is all ones, and a fresh vocoder nearly silent: neither would find a mistake. Of the talker's marks
    only those that end it are ever said, as in a model that was trained.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "norm1.weight", "norm2.weight")) or "layernorm" in name:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
            if "lm_head" in name or "codec_head" in name or "embed_tokens" in name:
                weight.mul_(4.0)
            if "bigvgan" in name and weight.dim() == 3:
                weight.normal_(0, VOCODER_GAIN / weight[0].numel() ** 0.5, generator=generator)
        model.talker.codec_head.weight[[CODEC_PAD, CODEC_END]] *= END_WEIGHT
        marks = model.talker.codec_head.weight[CODEBOOK + 1 :]
        marks[[mark not in (CODEC_PAD, CODEC_END) for mark in range(CODEBOOK + 1, TALKER_VOCAB)]] = 0


def _speakers(tokenizer: Qwen2TokenizerFast) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: {
            "bos_token": tokenizer.convert_tokens_to_ids(f"<tts_bos_{name.lower()}>"),
            "cond": torch.randn(1, SPEAKER_SIZE, generator=generator),
            "ref_mel": torch.randn(1, 30, MEL_BANDS, generator=generator),
        }
        for name in ("Chelsie", "Ethan")
    }


def _config(tokenizer: Qwen2TokenizerFast) -> Qwen2_5OmniConfig:
    from transformers import Qwen2_5OmniConfig

    def ids(**names: str) -> dict[str, int]:
        return {field: tokenizer.convert_tokens_to_ids(token) for field, token in names.items()}

    media = {
        **ids(audio_token_index="<|AUDIO|>", image_token_index="<|IMAGE|>", video_token_index="<|VIDEO|>"),
        **ids(audio_start_token_id="<|audio_bos|>", audio_end_token_id="<|audio_eos|>"),
        **ids(vision_start_token_id="<|vision_bos|>", vision_end_token_id="<|vision_eos|>"),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "initializer_range": SPREAD,
    }
    texts = ids(tts_text_end_token_id="<tts_text_eod>", tts_text_pad_token_id="<tts_pad>")
    config = Qwen2_5OmniConfig(
        thinker_config=_thinker(tokenizer) | media | ids(user_token_id="user"),
        talker_config=_talker() | media | texts | {"tts_text_start_token_id": 0},
        token2wav_config={"dit_config": _dit(), "bigvgan_config": _vocoder()},
        enable_audio_output=True,
    )
    config.architectures = ["Qwen2_5OmniForConditionalGeneration"]
    return config


def _decoder(**changes: Any) -> dict[str, Any]:
    return {
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": NUM_KV_HEADS,
        "max_position_embeddings": 4096,
        "rope_parameters": dict(_ROPE),
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
            "n_window": 50,
            "initializer_range": SPREAD,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": THINKER_HIDDEN,
            "fullatt_block_indexes": [1],
            "initializer_range": SPREAD,
        },
        "text_config": _decoder(
            vocab_size=THINKER_VOCAB,
            hidden_size=THINKER_HIDDEN,
            num_hidden_layers=THINKER_LAYERS,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        ),
    }


def _talker() -> dict[str, Any]:
    return _decoder(
        vocab_size=TALKER_VOCAB,
        embedding_size=THINKER_HIDDEN,
        hidden_size=TALKER_HIDDEN,
        num_hidden_layers=TALKER_LAYERS,
        head_dim=HEAD_DIM,
        tts_codec_pad_token_id=CODEC_PAD,
        tts_codec_start_token_id=CODEC_START,
        tts_codec_end_token_id=CODEC_END,
        tts_codec_mask_token_id=CODEC_MASK,
        spatial_merge_size=2,
    )


def _dit() -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": HEAD_DIM,
        "emb_dim": 32,
        "block_size": BLOCK_FRAMES,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 3],
        "num_embeds": CODEBOOK,
        "mel_dim": MEL_BANDS,
        "rope_parameters": dict(_DIT_ROPE),
        "max_position_embeddings": 2048,
        "enc_emb_dim": SPEAKER_SIZE,
        "enc_dim": 16,
        "enc_channels": [16, 16, 16, 32],
        "enc_kernel_sizes": [5, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 1],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
        "initializer_range": SPREAD,
    }


def _vocoder() -> dict[str, Any]:
    return {
        "mel_dim": MEL_BANDS,
        "upsample_initial_channel": 32,
        "resblock_kernel_sizes": [3, 5],
        "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
        "upsample_rates": [5, 3],
        "upsample_kernel_sizes": [11, 7],
        "initializer_range": SPREAD,
    }
