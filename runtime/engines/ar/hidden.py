"""Rows that a model computed for the tokens of its KV cache, kept beside it. Pure torch: knows no vLLM and no model.

A row lies at the KV slot of its token. So it lives exactly as long as the token's keys and values: a prefix that is
found in the cache still has its rows, whoever computed them. compat_runner.py writes and reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class SlotStore:
    """Remembers for each request up to where its rows were taken."""

    def __init__(self, rows: torch.Tensor) -> None:
        """rows: the memory for them, [blocks, slots of a block, ...]"""
        self._rows, self._block_size = rows, rows.shape[1]
        self._taken: dict[str, int] = {}

    def put(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """slots: int64 [n]; rows: [n, ...], the n-th belongs to the token in the n-th slot."""
        self._rows.flatten(0, 1)[slots] = rows

    def take(self, request_id: str, blocks: torch.Tensor, end: int) -> tuple[int, torch.Tensor] | None:
        """The first position not taken before, and the rows [end - first, ...] from there up to `end`.

        blocks: the request's block table. None when nothing is new: a preempted request computes its rows again.
        """
        first = self._taken.get(request_id, 0)
        if end <= first:
            return None
        positions = torch.arange(first, end, device=self._rows.device)
        table = blocks.to(self._rows.device, torch.int64)
        self._taken[request_id] = end
        return first, self._rows[table[positions // self._block_size], positions % self._block_size]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Whole blocks, (source, target): whoever copies keys and values copies their rows."""
        for source, target in pairs:
            self._rows[target] = self._rows[source]

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        """[blocks, slots of a block, ...], a copy"""
        return self._rows[list(blocks)]

    def write_blocks(self, blocks: Sequence[int], values: torch.Tensor) -> None:
        """values: uint8 [blocks, ...], the bytes of what `read_blocks` gave elsewhere."""
        rows = values.view(self._rows.dtype).view(-1, *self._rows.shape[1:])
        self._rows[list(blocks)] = rows.to(self._rows.device)

    def forget(self, request_id: str) -> None:
        self._taken.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        return len(self._taken)
