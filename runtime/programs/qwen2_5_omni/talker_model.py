"""Qwen2.5-Omni's talker as a model of vLLM: a dense decoder over codes, whose embeddings are wider than itself.

vLLM makes it, by the name that `as_talker` puts into the model's configuration; engine `ar` feeds it rows and calls
`complete`. Knows no requests. Imported only in a process that runs the talker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, PPMissingLayer, WeightsMapper, maybe_prefix


class Layer(Qwen2DecoderLayer):
    """vLLM's own derives the size of a head from the model's size; here they are independent."""

    def __init__(self, config: Any, cache_config: Any = None, quant_config: Any = None, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.self_attn = LlamaAttention(
            config=config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=quant_config,
            bias=True,
            cache_config=cache_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = Qwen2MLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, quant_config, prefix=f"{prefix}.mlp"
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class DenseTalker(nn.Module, SupportsMRoPE):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.embed_tokens.": "embed_tokens.",
            "talker.codec_head.": "codec_head.",
            "talker.thinker_to_talker_proj.": "thinker_to_talker_proj.",
            "talker.model.": "model.",
            "thinker.": None,
            "token2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.end_token_id = int(config.tts_codec_end_token_id)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        self.thinker_to_talker_proj = nn.Linear(config.embedding_size, config.hidden_size)
        self.model = Qwen2Model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"), decoder_layer_type=Layer)
        self.model.embed_tokens = PPMissingLayer()
        self.codec_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        self.register_buffer("never", _never(config), persistent=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[n, size]: projected, but without the bias, which the row of the text that it is added to has."""
        return F.linear(self.embed_tokens(input_ids), self.thinker_to_talker_proj.weight)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(None, positions, intermediate_tensors, rows)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.codec_head, hidden_states) + self.never

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def complete(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, generators: Sequence[torch.Generator | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A frame is its one code, int64 [n, 1]; its embedding [n, size]."""
        return token_ids[:, None], self.embed_input_ids(token_ids)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    def get_mrope_input_positions(self, input_tokens: list[int], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
        """Text and audio count on in all three dimensions; images and video would not."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0


def _never(config: Any) -> torch.Tensor:
    """What is added to the logits: the talker never says its start, as in the reference, nor a mark that is neither a
    code nor an end, for which token2wav has no sound.
    """
    never = torch.zeros(config.vocab_size)
    never[config.num_codes :] = -torch.inf
    never[[config.tts_codec_end_token_id, config.tts_codec_pad_token_id]] = 0
    never[config.tts_codec_start_token_id] = -torch.inf
    return never


def as_talker(config: Any) -> Any:
    """vLLM's hf_overrides: the talker's part of the configuration becomes the model's. vLLM also tries it on a
    configuration of its own that has no parts.
    """
    if not hasattr(config, "talker_config"):
        return config
    from vllm import ModelRegistry

    name = DenseTalker.__name__
    ModelRegistry.register_model(name, f"{__name__}:{name}")
    talker = config.talker_config
    talker.architectures = [name]
    talker.num_codes = config.token2wav_config.dit_config.num_embeds + 1
    return talker
