"""Qwen3-Omni's talker as a model of vLLM: a mixture-of-experts decoder over codes, and the code predictor.

vLLM makes it, by the name that `as_talker` puts into the model's configuration; engine `ar` feeds it rows and calls
`complete`. Knows no requests. Imported only in a process that runs the talker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from runtime.programs.qwen3_omni.code_predictor import CodePredictor

NUM_NO_CODES = 1024
"""The last ids of the talker's vocabulary are marks, not codes: none of them but the end is ever said."""


class TalkerModel(nn.Module, SupportsMRoPE):
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "talker.model.codec_embedding.": "language_model.model.embed_tokens.",
            "talker.model.": "language_model.model.",
            "talker.codec_head.": "language_model.lm_head.",
            "talker.code_predictor.": "code_predictor.",
            "talker.": None,
            "thinker.": None,
            "code2wav.": None,
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        text = config.text_config
        self.end_token_id = int(config.codec_eos_token_id)
        self.language_model = Qwen3MoeForCausalLM(
            vllm_config=vllm_config.with_hf_config(text, architectures=["Qwen3MoeForCausalLM"]),
            prefix=maybe_prefix(prefix, "language_model"),
        )
        self.code_predictor = CodePredictor(config.code_predictor_config)
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors
        never = torch.zeros(text.vocab_size)
        never[text.vocab_size - NUM_NO_CODES :] = -torch.inf
        never[self.end_token_id] = 0
        self.register_buffer("never", never, persistent=False)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.language_model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.language_model.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.language_model.compute_logits(hidden_states) + self.never

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def complete(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, generators: Sequence[torch.Generator | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All codes of the frames whose first code was sampled, int64 [n, groups], and their embeddings [n, size]."""
        residual, total = self.code_predictor(hidden, self.embed_input_ids(token_ids), generators)
        return torch.cat([token_ids[:, None], residual], 1), total

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

    def get_mrope_input_positions(self, input_tokens: list[int], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
        """Text and audio count on in all three dimensions; images and video would not."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0


def as_talker(config: Any) -> Any:
    """vLLM's hf_overrides: the talker's part of the configuration becomes the model's. vLLM also tries it on a
    configuration of its own that has no parts.
    """
    if not hasattr(config, "talker_config"):
        return config
    from vllm import ModelRegistry

    name = TalkerModel.__name__
    ModelRegistry.register_model(name, f"{__name__}:{name}")
    talker = config.talker_config
    talker.architectures = [name]
    return talker
