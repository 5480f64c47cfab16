"""What Qwen2.5-Omni's talker is fed with: the thinker's rows, framed by a few marks and projected. Pure torch.

Owns the few tensors of the checkpoint that this takes. Called by talker.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from runtime.programs.qwen2_5_omni.config import Config
from runtime.programs.qwen2_5_omni.speakers import Speaker
from runtime.programs.qwen3_omni.checkpoint import Checkpoint

TEXTS, CODES = "thinker.model.embed_tokens.weight", "talker.model.embed_tokens.weight"
NUM_MARKS = 2
"""Rows that follow what the thinker was told before the talker's first code."""
PROJECTION = "talker.thinker_to_talker_proj"


class TalkerRows:
    """`end` and `pad`: [size], what stands for text after the last of it, and ever after."""

    def __init__(
        self,
        config: Config,
        speakers: Iterable[Speaker],
        checkpoint: Checkpoint,
        dtype: torch.dtype | None,
        device: str,
    ) -> None:
        """dtype: of the talker; None for the checkpoint's."""

        def row(table: str, token_id: int) -> torch.Tensor:
            return checkpoint.row(table, token_id).to(device, dtype)

        talker, self.device = config.talker, device
        self._weight, self._bias = (
            checkpoint.tensor(f"{PROJECTION}.{part}").to(device, dtype) for part in ("weight", "bias")
        )
        self._text_begin = {s.bos_token_id: row(TEXTS, s.bos_token_id) for s in speakers}
        self._code_begin, self._code_pad = (row(CODES, talker[f"tts_codec_{m}_token_id"]) for m in ("start", "pad"))
        marks = torch.stack([row(TEXTS, talker[f"tts_text_{mark}_token_id"]) for mark in ("end", "pad")])
        self.end, self.pad = self.said(marks)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def said(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, thinker size] of what the thinker says, for the talker: [n, size]."""
        return F.linear(rows.to(self._weight.dtype), self._weight, self._bias)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def prompt(self, told: torch.Tensor, first_said: torch.Tensor, bos_token_id: int) -> torch.Tensor:
        """Rows [n + 2, size] that the talker starts from: of what the thinker was told [n, thinker size], the beginning
        of speech, and the first token that it said.
        """
        begin = self._text_begin[bos_token_id] + self._code_pad
        first = first_said.to(begin.dtype) + self._code_begin
        return self.said(torch.cat([told.to(begin.dtype), begin[None], first[None]]))
