"""Qwen2.5-Omni's thinker as a model of vLLM: vLLM's own, but for the places of a video's tokens and those of its sound.

vLLM makes it, by the name that `as_thinker` puts into the model's configuration. Imported only in a process that runs
the thinker.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling
from vllm.model_executor.models.qwen2_5_omni_thinker import Qwen2_5OmniThinkerForConditionalGeneration

from runtime.programs.qwen3_omni.thinker_model import merge_by_modality


class PlacedThinker(Qwen2_5OmniThinkerForConditionalGeneration):
    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: Sequence[Any]
    ) -> tuple[torch.Tensor, int]:
        """WHY: vLLM places a video with its sound one token too early, and its marks apart. transformers' own then.
        SCOPE: vLLM 0.32, use_audio_in_video.
        """
        features = sorted(mm_features, key=lambda feature: feature.mm_position.offset)
        if not any(bool(sound) for sound in _values(features, "use_audio_in_video")):
            positions, delta = super().get_mrope_input_positions(input_tokens, mm_features)
            return positions, delta
        kind = modeling.Qwen2_5OmniPreTrainedModelForConditionalGeneration
        model = SimpleNamespace(
            config=self.config,
            spatial_merge_size=self.config.vision_config.spatial_merge_size,
            get_llm_pos_ids_for_vision=partial(kind.get_llm_pos_ids_for_vision, None),
            get_chunked_index=partial(kind.get_chunked_index, None),
        )
        images, videos = (_values(features, f"{modality}_grid_thw") for modality in ("image", "video"))
        positions, deltas = kind.get_rope_index(
            model,
            torch.tensor([input_tokens]),
            torch.stack(images) if images else None,
            torch.stack(videos),
            use_audio_in_video=True,
            audio_seqlens=torch.stack(_values(features, "audio_feature_lengths")).flatten(),
            second_per_grids=torch.stack(_values(features, "second_per_grid_ts")).flatten(),
        )
        return positions[:, 0], int(deltas[0])


def _values(features: Sequence[Any], name: str) -> list[torch.Tensor]:
    """In the order of the prompt, of those that have it."""
    return [feature.data[name].data for feature in features if feature.data.get(name)]


def as_thinker(config: Any) -> Any:
    """vLLM's hf_overrides. vLLM also tries it on a configuration of its own that has no parts."""
    merge_by_modality()
    if hasattr(config, "thinker_config"):
        from vllm import ModelRegistry

        name = PlacedThinker.__name__
        ModelRegistry.register_model(name, f"{__name__}:{name}")
        config.architectures = [name]
    return config
