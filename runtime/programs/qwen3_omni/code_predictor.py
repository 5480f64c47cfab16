"""Qwen3-Omni's code predictor: from the talker's hidden state and its first code to the other codes of a frame.

Plain torch, batched over requests, outside of the paged KV cache: a frame starts from nothing. Parameter names are the
checkpoint's. Called by talker_model.py after each step of the talker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

TOP_K, TOP_P = 50, 0.8
"""What the reference samples the residual codes with, at temperature 1, whenever the talker samples."""


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RmsNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        """x: [batch, n, size]; angles: [n, head_dim]; cache: keys and values of what came before, updated."""
        heads = (*x.shape[:2], -1, self.head_dim)
        queries = _rotated(self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2), angles)
        keys = _rotated(self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2), angles)
        values = self.v_proj(x).view(heads).transpose(1, 2)
        if cache:
            keys, values = torch.cat([cache[0], keys], 2), torch.cat([cache[1], values], 2)
        cache[:] = [keys, values]
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=x.shape[1] > 1, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * angles.cos().to(x.dtype) + torch.cat([-second, first], -1) * angles.sin().to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), FeedForward(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        num_residual = config.num_code_groups - 1
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab_size, config.hidden_size) for _ in range(num_residual)
        )


class CodePredictor(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        num_residual = config.num_code_groups - 1
        self.model = Body(config)
        self.lm_head = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(num_residual)
        )
        self._head_dim, self._theta = config.head_dim, config.rope_parameters["rope_theta"]

    def forward(
        self, hidden: torch.Tensor, embedding: torch.Tensor, generators: Sequence[torch.Generator | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden, embedding: [n, size], the talker's state and its embedding of the first code. generators: of each
        row, None for the most likely code. Returns codes int64 [n, groups - 1] and the sum of all groups' embeddings
        [n, size].
        """
        caches: list[list[torch.Tensor]] = [[] for _ in self.model.layers]
        x, position = torch.stack([hidden, embedding], 1), 0
        total, codes = embedding, []
        for head, table in zip(self.lm_head, self.model.codec_embedding, strict=True):
            codes.append(pick(head(self._run(x, position, caches)), generators))
            position += x.shape[1]
            x = table(codes[-1])[:, None]
            total = total + x[:, 0]
        return torch.stack(codes, 1), total

    def _run(self, x: torch.Tensor, position: int, caches: list[list[torch.Tensor]]) -> torch.Tensor:
        """The last output of x [n, k, size], which starts at a position."""
        exponents = torch.arange(0, self._head_dim, 2, device=x.device, dtype=torch.float32) / self._head_dim
        positions = torch.arange(position, position + x.shape[1], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self._theta**-exponents).repeat(1, 2)
        for layer, cache in zip(self.model.layers, caches, strict=True):
            x = layer(x, angles, cache)
        return self.model.norm(x[:, -1])


def pick(logits: torch.Tensor, generators: Sequence[torch.Generator | None]) -> torch.Tensor:
    """A code for each row of logits [n, codes]. A row's draw depends on its own generator alone."""
    best = logits.argmax(-1)
    if not any(generators):
        return best
    weights = _nucleus(logits.float())
    for row, generator in enumerate(generators):
        if generator is not None:
            best[row] = torch.multinomial(weights[row], 1, generator=generator)[0]
    return best


def _nucleus(logits: torch.Tensor) -> torch.Tensor:
    """Probabilities of the TOP_K best and, of those, the best that together reach TOP_P."""
    values, order = logits.topk(min(TOP_K, logits.shape[-1]))
    weights = values.softmax(-1)
    weights[weights.cumsum(-1) - weights >= TOP_P] = 0
    return torch.zeros_like(logits).scatter(-1, order, weights)
