"""Qwen3-Omni's vocoder: frames of codes to a waveform, and how far back each sample hears. transformers' own network.

Causal but for one thing: each upsampling needs the frame behind the last one to be complete, so the last few samples
of what is known so far are not made. Knows no requests. Called by code2wav.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from runtime.engines.torchvision_operators import declare_missing_operators

KERNEL = 7
DILATIONS = (1, 3, 9)
"""Of the residual units of a decoder block."""

Codes = npt.NDArray[np.int32]
Samples = npt.NDArray[np.float32]


def decoder_reach(config: Mapping[str, Any]) -> int:
    """Frames before its own that a sample hears through the convolutions."""
    reach = KERNEL - 1
    for rate in reversed(config["upsample_rates"]):
        reach = math.ceil((reach + (KERNEL - 1) * sum(DILATIONS)) / rate)
    reach += KERNEL - 1
    for ratio in reversed(config["upsampling_ratios"]):
        reach = math.ceil((reach + KERNEL - 1) / ratio)
    return reach


def attention_reach(config: Mapping[str, Any]) -> int:
    """Frames before its own that a frame sees through all layers of attention."""
    return int(config["num_hidden_layers"] * (config["sliding_window"] - 1))


class Vocoder:
    """WeightsError from the caller when `tensors` are not those of the network."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: str) -> None:
        """tensors: the checkpoint's, below "code2wav."."""
        declare_missing_operators()
        from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

        self._network = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**config)).eval()
        self._network.load_state_dict(dict(tensors))
        self._network.to(device, torch.float32)
        self._device = device
        self.num_groups, self.num_codes = int(config["num_quantizers"]), int(config["codebook_size"])
        self.samples_per_frame = math.prod((*config["upsample_rates"], *config["upsampling_ratios"]))
        self.decoder_reach = decoder_reach(config)
        self.reach = self.decoder_reach + attention_reach(config)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def decode(self, codes: Codes, num_context: int) -> Samples:
        """Samples [n] in [-1, 1] from the first sample of the frame behind the context on.

        codes: [groups, frames], of which the first `num_context` were there before. All frames take part in the
        attention; the convolutions, which take most of the time, see only what they can hear.
        """
        network = self._network
        frames = torch.from_numpy(codes).to(self._device, torch.int64)[None]
        hidden = network.code_embedding(frames + network.code_offset).mean(1)
        hidden = network.pre_transformer(inputs_embeds=hidden).last_hidden_state.permute(0, 2, 1)
        num_unheard = max(0, num_context - self.decoder_reach)
        wave = hidden[..., num_unheard:]
        for block in (layer for stage in network.upsample for layer in stage):
            wave = block(wave)
        for block in network.decoder:
            wave = block(wave)
        samples = wave[0, 0].clamp(-1, 1).cpu().numpy()
        return samples[(num_context - num_unheard) * self.samples_per_frame :]
