"""What crosses the edge between the two halves of a split stage: the inputs of a request, the keys and values of its
prompt, and how that prompt ended up in the first half. Pure numpy: knows no vLLM and no model.

The producer makes payloads of it, the consumer collects them in a `Prefix`. Used by engine.py and compat_kv.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from runtime.errors import StageError
from runtime.payload import Payload, Tensor
from runtime.plan import PayloadKind

Role = Literal["producer", "consumer"]

PIECE_BYTES = 16 << 20
"""Blocks travel in payloads of about this size, so that a long prompt needs no more shared memory than a short one."""
INPUT, FIRST_BLOCK, NUM_CACHED, TOKENS = "input", "first_block", "num_cached_tokens", "token_ids"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Successive blocks of a request's cache, from its `first` one: layer -> uint8 [blocks, bytes of a block]."""

    first: int
    layers: Mapping[str, Tensor]

    @property
    def count(self) -> int:
        return len(next(iter(self.layers.values())))


def forwarded(payload: Payload) -> Payload:
    """An input of the stage, for the other half: its program makes the same prompt of it."""
    about = {"kind": payload.kind, "edge": payload.edge, "meta": payload.meta}
    return Payload(PayloadKind.KV_BLOCKS, payload.request_id, meta={INPUT: about}, tensors=payload.tensors)


def block_payloads(request_id: str, blocks: Blocks) -> Iterator[Payload]:
    """The blocks in payloads of PIECE_BYTES or a single block."""
    block_bytes = sum(layer.shape[1] for layer in blocks.layers.values())
    step = max(1, PIECE_BYTES // block_bytes)
    for start in range(0, blocks.count, step):
        layers = {name: layer[start : start + step] for name, layer in blocks.layers.items()}
        yield Payload(PayloadKind.KV_BLOCKS, request_id, meta={FIRST_BLOCK: blocks.first + start}, tensors=layers)


def summary(request_id: str, token_ids: Sequence[int], num_cached_tokens: int) -> Payload:
    """What comes last: the prompt's tokens, and how many of them the first half had in its cache."""
    tensors = {TOKENS: np.array(token_ids, np.int32)}
    return Payload(PayloadKind.KV_BLOCKS, request_id, meta={NUM_CACHED: num_cached_tokens}, tensors=tensors)


@dataclass(slots=True)
class Prefix:
    """What has come of one request. The blocks hold all tokens of the prompt but the last, which is computed anew."""

    pieces: list[Blocks] = field(default_factory=list)
    token_ids: list[int] | None = None
    num_cached_tokens: int = 0

    def take(self, payload: Payload) -> Payload | None:
        """Keep what a payload brings; the input, if it is a forwarded one."""
        meta = payload.meta
        if INPUT in meta:
            about = meta[INPUT]
            return Payload(
                about["kind"],
                payload.request_id,
                payload.epoch,
                about["edge"],
                meta=about["meta"],
                tensors=payload.tensors,
            )
        if FIRST_BLOCK in meta:
            self._add(Blocks(meta[FIRST_BLOCK], payload.tensors))
        elif NUM_CACHED in meta:
            self.token_ids, self.num_cached_tokens = payload.tensors[TOKENS].tolist(), meta[NUM_CACHED]
        return None

    def _add(self, blocks: Blocks) -> None:
        if blocks.first != self.num_blocks:
            raise StageError(f"block {blocks.first} of the prompt came; expected block {self.num_blocks}")
        self.pieces.append(blocks)

    @property
    def num_blocks(self) -> int:
        return self.pieces[-1].first + self.pieces[-1].count if self.pieces else 0

    def check(self, token_ids: Sequence[int], block_size: int) -> None:
        """StageError unless the other half computed the very prompt that this half has made of the same inputs."""
        if self.token_ids is None:
            raise StageError("the keys and values of the prompt did not come; expected them before its end")
        if self.token_ids != list(token_ids):
            raise StageError(
                f"the prompt has {len(token_ids)} tokens here and {len(self.token_ids)} where it was computed, "
                "or other ones; expected the same ones"
            )
        expected = -(-(len(token_ids) - 1) // block_size)
        if self.num_blocks != expected:
            raise StageError(f"{self.num_blocks} blocks of the prompt came; expected {expected}")
