"""Qwen3-Omni's code predictor: from the talker's hidden state and its first code to the other codes of a frame.

Batched over requests, outside of the paged KV cache: a frame starts from nothing. It is run once a code, on one
position a request, so what counts is the number of operations: matrices that are applied to the same input lie in one,
norms are vLLM's kernel. Called by talker_model.py after each step of the talker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm import _custom_ops as kernels

TOP_K, TOP_P = 50, 0.8
"""What the reference samples the residual codes with, at temperature 1, whenever the talker samples."""


class Layer(nn.Module):
    """Works on one position of each request; keys and values of the ones before are in the caller's cache."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        num_rotated, size, inner = self.num_heads + self.num_kv_heads, config.hidden_size, config.intermediate_size
        self.qkv = _matrix((num_rotated + self.num_kv_heads) * self.head_dim, size)
        self.qk_norm = _matrix(num_rotated, self.head_dim)
        self.out = _matrix(size, self.num_heads * self.head_dim)
        self.gate_up = _matrix(2 * inner, size)
        self.down = _matrix(size, inner)
        self.norm_before = _matrix(size)
        self.norm_between = _matrix(size)

    def parts(self) -> dict[str, torch.Tensor]:
        """The checkpoint's names of what lies in the parameters; a norm of all heads is written to each."""
        queries, keys, inner = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, len(self.gate_up) // 2
        return {
            "self_attn.q_proj.weight": self.qkv[:queries],
            "self_attn.k_proj.weight": self.qkv[queries : queries + keys],
            "self_attn.v_proj.weight": self.qkv[queries + keys :],
            "self_attn.q_norm.weight": self.qk_norm[: self.num_heads],
            "self_attn.k_norm.weight": self.qk_norm[self.num_heads :],
            "self_attn.o_proj.weight": self.out,
            "mlp.gate_proj.weight": self.gate_up[:inner],
            "mlp.up_proj.weight": self.gate_up[inner:],
            "mlp.down_proj.weight": self.down,
            "input_layernorm.weight": self.norm_before,
            "post_attention_layernorm.weight": self.norm_between,
        }

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """x: [n, size]; cos, sin: [head_dim] of the position; cache: [2, n, kv heads, positions up to this one,
        head_dim], whose last position is written.
        """
        heads = F.linear(rms_norm(x, self.norm_before, self.eps), self.qkv).view(len(x), -1, self.head_dim)
        rotated = rms_norm(heads, None, self.eps)[:, : len(self.qk_norm)] * self.qk_norm
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, -1), sin)
        cache[0, :, :, -1] = rotated[:, self.num_heads :]
        cache[1, :, :, -1] = heads[:, len(self.qk_norm) :]
        queries = rotated[:, : self.num_heads].reshape(len(x), self.num_kv_heads, -1, self.head_dim)
        mixed = F.scaled_dot_product_attention(queries, cache[0], cache[1])
        x = torch.addmm(x, mixed.reshape(len(x), -1), self.out.T)
        gate, up = F.linear(rms_norm(x, self.norm_between, self.eps), self.gate_up).chunk(2, -1)
        return torch.addmm(x, F.silu(gate).mul_(up), self.down.T)


def _matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Over the last dimension of x, which must be contiguous."""
    normed = torch.empty_like(x)
    kernels.rms_norm(normed, x, weight, eps)
    return normed


class CodePredictor(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        num_residual = config.num_code_groups - 1
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _matrix(config.hidden_size)
        self.tables = nn.ParameterList(_matrix(config.vocab_size, config.hidden_size) for _ in range(num_residual))
        self.heads = nn.ParameterList(_matrix(config.vocab_size, config.hidden_size) for _ in range(num_residual))
        self.eps = config.rms_norm_eps
        cos, sin = _rotations(config.head_dim, config.rope_parameters["rope_theta"], num_residual + 1)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._cache_shape = (config.num_key_value_heads, num_residual + 1, config.head_dim)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """By the checkpoint's names. Returns the names of all parameters when each of their parts was among them."""
        parts = {"model.norm.weight": self.norm}
        for number, layer in enumerate(self.layers):
            parts |= {f"model.layers.{number}.{name}": part for name, part in layer.parts().items()}
        parts |= {f"model.codec_embedding.{number}.weight": table for number, table in enumerate(self.tables)}
        parts |= {f"lm_head.{number}.weight": head for number, head in enumerate(self.heads)}
        for name, weight in weights:
            parts.pop(name).copy_(weight)
        return set() if parts else {name for name, _ in self.named_parameters()}

    def forward(
        self, hidden: torch.Tensor, embedding: torch.Tensor, generators: Sequence[torch.Generator | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden, embedding: [n, size], the talker's state and its embedding of the first code. generators: of each
        row, None for the most likely code. Returns codes int64 [n, groups - 1] and the sum of all groups' embeddings
        [n, size].
        """
        caches = hidden.new_empty(len(self.layers), 2, len(hidden), *self._cache_shape)
        cos, sin = self.cos.to(hidden.dtype).unbind(), self.sin.to(hidden.dtype).unbind()

        def run(x: torch.Tensor, position: int) -> torch.Tensor:
            for layer, cache in zip(self.layers, caches, strict=True):
                x = layer(x, cos[position], sin[position], cache[..., : position + 1, :])
            return x

        run(hidden, 0)
        noise = draw_noise(generators, len(self.heads), hidden.device)
        draws = None if all(generators) else torch.tensor([g is not None for g in generators], device=hidden.device)
        x, total, codes = embedding, embedding, []
        for group, (head, table) in enumerate(zip(self.heads, self.tables, strict=True)):
            logits = F.linear(rms_norm(run(x, group + 1), self.norm, self.eps), head)
            codes.append(pick(logits, None if noise is None else noise[:, group], draws))
            x = F.embedding(codes[-1], table)
            total = total + x
        return torch.stack(codes, 1), total


def _rotations(head_dim: int, theta: float, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [positions, head_dim]. The first half of sin is negative: what it is multiplied with is a vector
    whose halves have changed places, where the rotation wants the first of them negated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), theta**-exponents)
    sin = angles.sin()
    return angles.cos().repeat(1, 2), torch.cat([-sin, sin], 1)


def draw_noise(
    generators: Sequence[torch.Generator | None], num_groups: int, device: torch.device
) -> torch.Tensor | None:
    """float32 [n, groups, TOP_K], exponential, each row from its own generator: its company makes no difference.
    Ones, which are not used, where there is no generator; None when there is none at all.
    """
    if not any(generators):
        return None
    noise = torch.ones(len(generators), num_groups, TOP_K, device=device)
    for row, generator in zip(noise, generators, strict=True):
        if generator is not None:
            row.exponential_(generator=generator)
    return noise


def pick(logits: torch.Tensor, noise: torch.Tensor | None, draws: torch.Tensor | None = None) -> torch.Tensor:
    """A code for each row of logits [n, codes]: the most likely, or one of the TOP_K best that together reach TOP_P.

    noise: [n, TOP_K]. The greatest quotient of probability and exponential noise is a draw. draws: bool [n], which rows
    do; None when all do.
    """
    if noise is None:
        return logits.argmax(-1)
    values, order = logits.float().topk(min(TOP_K, logits.shape[-1]))
    weights = values.softmax(-1)
    weights = weights.masked_fill(weights.cumsum(-1) - weights >= TOP_P, 0)
    best = (weights / noise[:, : weights.shape[-1]]).argmax(-1, keepdim=True)
    drawn = order.gather(-1, best)[:, 0]
    return drawn if draws is None else torch.where(draws, drawn, logits.argmax(-1))
