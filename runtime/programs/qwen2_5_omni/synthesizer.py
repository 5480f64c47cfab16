"""Qwen2.5-Omni's way from codes to a waveform: a diffusion transformer makes a mel spectrogram out of noise, along a
flow, and a BigVGAN makes samples of it. transformers' own networks, in float32. Knows no requests. Called by
token2wav.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from runtime.engines.torchvision_operators import declare_missing_operators
from runtime.programs.qwen2_5_omni.config import Config
from runtime.programs.qwen2_5_omni.speakers import Speaker
from runtime.programs.qwen3_omni.checkpoint import Checkpoint

NUM_TIMES = 10
GUIDANCE = 0.5
"""How far past the prediction with the voice and the codes, away from the one without; both are the reference's."""

Codes = npt.NDArray[np.int32]
Samples = npt.NDArray[np.float32]


class Synthesizer:
    def __init__(self, config: Config, checkpoint: Checkpoint, device: str) -> None:
        """RuntimeError when the tensors are not those of the networks."""
        declare_missing_operators()
        from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as configuration
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

        self._solver = modeling.RungeKutta4ODESolver
        self._dit = _loaded(
            modeling.Qwen2_5OmniToken2WavDiTModel, configuration.Qwen2_5OmniDiTConfig(**config.dit), checkpoint, device
        )
        self._vocoder = _loaded(
            modeling.Qwen2_5OmniToken2WavBigVGANModel,
            configuration.Qwen2_5OmniBigVGANConfig(**config.vocoder),
            checkpoint,
            device,
        )
        self._dit._create_block_diff = self._block_distances
        self._device = device
        dit, vocoder = self._dit.config, self._vocoder.config
        self.num_codes = int(dit.num_embeds) + 1
        self.max_codes = int(dit.max_position_embeddings // dit.repeats)
        self.samples_per_code = int(dit.repeats * math.prod(vocoder.upsample_rates))

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def speak(self, codes: Codes, speaker: Speaker, seed: int) -> Samples:
        """codes [n], n at least 1 -> samples [n * samples_per_code] in [-1, 1]. The seed makes the noise."""
        tokens = torch.from_numpy(codes).to(self._device, torch.int64)[None]
        samples = self._vocoder(self._mel(tokens, speaker, self.noise(len(codes), seed)))
        return np.atleast_1d(samples.cpu().numpy())

    def noise(self, num_codes: int, seed: int) -> torch.Tensor:
        """[1, frames, bands]. Made on the CPU by a generator of its own, so that it is the same on every device, in
        every company, and the same as the reference's after torch.manual_seed.
        """
        size = (1, num_codes * self._dit.repeats, self._dit.mel_dim)
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(self._device)

    def _mel(self, codes: torch.Tensor, speaker: Speaker, noise: torch.Tensor) -> torch.Tensor:
        """[1, bands, frames]"""
        condition = speaker.condition[:, None].expand(-1, noise.shape[1], -1).to(self._device)
        reference = speaker.mel.to(self._device)

        def velocity(time: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            predicted = self._dit(
                hidden_states=state,
                condition_vector=reference,
                speaker_embedding=condition,
                quantized_code=codes,
                time_step=time,
                apply_cfg=True,
            )
            guided, free = predicted.chunk(2)
            return guided + (guided - free) * GUIDANCE

        times = torch.linspace(0, 1, NUM_TIMES, device=self._device)
        times -= torch.cos(torch.pi / 2 * times) - 1 + times  # more of the steps early
        solver = self._solver(function=velocity, initial_value=noise)
        mel: torch.Tensor = solver.integrate(times)[-1]
        return mel.permute(0, 2, 1)

    def _block_distances(self, hidden: torch.Tensor) -> torch.Tensor:
        """[1, 1, frames, frames]: how many blocks the frame of the column is ahead of that of the row.

        The reference's has a copy for each head: 16 times the memory, which grows with the square of the length.
        """
        blocks = torch.arange(hidden.shape[1], device=hidden.device) // self._dit.block_size
        return (blocks[None] - blocks[:, None])[None, None]


def _loaded(kind: Any, config: Any, checkpoint: Checkpoint, device: str) -> Any:
    network: nn.Module = kind._from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    part = {"Qwen2_5OmniDiTConfig": "dit", "Qwen2_5OmniBigVGANConfig": "bigvgan"}[type(config).__name__]
    network.load_state_dict(checkpoint.below(f"token2wav.code2wav_{part}_model."))
    return network.to(device, torch.float32)
