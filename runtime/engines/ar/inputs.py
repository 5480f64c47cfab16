"""Input rows of a request whose model is not fed with tokens alone. Pure torch: knows no vLLM and no model.

The program writes what comes from upstream, the model runner what the model made of its own tokens; the scheduler asks
whether the next row is there. All rows are kept until the request ends, so a chunk of the prompt or what a preempted
request computes again is a slice like any other.
"""

from __future__ import annotations

import torch

SEEDS = 2**63


class InputRows:
    """Row p of the prompt is `prompt[p]`. The row after sampled token n is what the model fed back for the token, plus
    upstream row n; once upstream is finished, `filler` stands for rows that it does not have.
    """

    def __init__(self, prompt: torch.Tensor, filler: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        """prompt: [n, size]; filler: [size]; positions: int64 [3, n] of the prompt, None where they count up."""
        self._prompt, self._filler, self.positions = prompt, filler, positions
        self._upstream: list[torch.Tensor] = []
        self._fed_back: list[torch.Tensor] = []
        self._finished = False
        self.generator: torch.Generator | None = None
        """For what the model samples besides the token; None where it takes the most likely."""

    def seed(self, seed: int | None) -> None:
        """Of the request; None when it is greedy. Its token draws from the seed itself, the rest from a neighbour."""
        if seed is not None:
            self.generator = torch.Generator(self._filler.device).manual_seed((seed + 1) % SEEDS)

    def extend(self, rows: torch.Tensor) -> None:
        """More from upstream: [n, size]."""
        self._upstream += rows.unbind()

    def finish(self) -> None:
        self._finished = True

    def can_follow(self, num_tokens: int) -> bool:
        """Whether the row after the last of `num_tokens` sampled tokens is there; the prompt always is."""
        return self._finished or num_tokens <= len(self._upstream)

    def feed_back(self, row: torch.Tensor) -> None:
        """What the model made of the token it sampled: [size]."""
        self._fed_back.append(row)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """[stop - start, size]"""
        parts = [self._prompt[start:stop]]
        num_prompt = len(self._prompt)
        for number in range(max(start, num_prompt) - num_prompt, stop - num_prompt):
            upstream = self._upstream[number] if number < len(self._upstream) else self._filler
            parts.append((self._fed_back[number] + upstream)[None])
        return torch.cat(parts)

    @property
    def num_prompt_rows(self) -> int:
        return len(self._prompt)
