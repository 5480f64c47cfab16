"""What Qwen3-Omni's talker is fed with: the thinker's rows, projected, in the order of the reference. Pure torch.

Owns the few tensors of the checkpoint that this takes. Called by talker.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from runtime.programs.media.positions import Positions, moved_together
from runtime.programs.qwen3_omni.checkpoint import Checkpoint
from runtime.programs.qwen3_omni.config import OmniConfig

NUM_ROLE_TOKENS = 3
"""An answer begins with its mark, its role and a line break."""
NUM_PADS = 4
"""Text pads that stand beside the marks which tell the talker how and with whose voice to speak."""


@dataclass(frozen=True)
class Projection:
    """Two linear layers with SiLU between."""

    weights: dict[str, torch.Tensor]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        inner = F.silu(F.linear(rows, self.weights["linear_fc1.weight"], self.weights["linear_fc1.bias"]))
        return F.linear(inner, self.weights["linear_fc2.weight"], self.weights["linear_fc2.bias"])


class TalkerInput:
    """`pad` and `end`: [size], what stands for text where there is none, and after the last of it."""

    def __init__(self, config: OmniConfig, checkpoint: Checkpoint, dtype: torch.dtype | None, device: str) -> None:
        """dtype: of the talker; None for the checkpoint's."""

        def loaded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}

        self.config, self.device = config, device
        self._text = Projection(loaded(checkpoint.below("talker.text_projection.")))
        self._hidden = Projection(loaded(checkpoint.below("talker.hidden_projection.")))
        self._codes = checkpoint.tensor("talker.model.codec_embedding.weight").to(device, dtype)
        table = "thinker.model.embed_tokens.weight"
        marks = [checkpoint.row(table, config.raw[f"tts_{mark}_token_id"]) for mark in ("bos", "eos", "pad")]
        self._begin, self.end, self.pad = self._text(torch.stack(marks).to(device, dtype))

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def text(self, embeddings: torch.Tensor) -> torch.Tensor:
        """The thinker's embeddings [n, size] of what it says, for the talker."""
        return self._text(embeddings.to(self._codes.dtype))

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def prompt(
        self,
        token_ids: torch.Tensor,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        first_text: torch.Tensor,
        speaker_id: int,
    ) -> torch.Tensor:
        """Rows [n, size] that the talker starts from.

        token_ids [n], embeddings [n, thinker size]: the thinker's prompt; hidden [m, thinker size]: of its m media
        tokens; first_text [thinker size]: embedding of the first token that the thinker said.
        """
        rows = self.text(embeddings)
        is_media = torch.isin(token_ids, torch.tensor(self.config.media_token_ids, device=self.device))
        rows[is_media] = self._hidden(hidden.to(self._codes.dtype))
        start = self._answer_start(token_ids)
        spoken = torch.cat(
            [
                rows[start : start + NUM_ROLE_TOKENS],
                self.pad.expand(NUM_PADS, -1),
                self._begin[None],
                self.text(first_text[None]),
            ]
        )
        marks = self._codes[torch.tensor(self._marks(speaker_id), device=self.device)]
        spoken[NUM_ROLE_TOKENS:] += marks
        return torch.cat([rows[self._of_the_user(token_ids)], spoken])

    def _marks(self, speaker_id: int) -> list[int]:
        talker = self.config.talker
        before = [talker[f"codec_{mark}_id"] for mark in ("nothink", "think_bos", "think_eos")]
        return [*before, speaker_id, talker["codec_pad_id"], talker["codec_bos_id"]]

    def positions(self, token_ids: npt.NDArray[np.int32], positions: Positions) -> Positions:
        """int64 [3, n] of the rows of `prompt`, from those [3, n] of the thinker's prompt.

        WHY flat: the reference's talker is not told that a video brings its own sound (use_audio_in_video), and finds
        the places of pictures and sound one after the other only as long as images are still to come.
        """
        config = self.config
        is_media = np.isin(token_ids, config.media_token_ids)
        is_flat = np.zeros(len(token_ids), np.bool_)
        pairs = zip(token_ids, token_ids[1:], strict=False)
        for start, pair in enumerate(pairs):
            if pair == (config.thinker["vision_start_token_id"], config.thinker["audio_start_token_id"]):
                stop = start + 2 + int(np.argmin(is_media[start + 2 :])) + 2
                is_flat[start:stop] = config.thinker["image_token_id"] not in token_ids[stop:]
        is_kept = self._of_the_user(torch.from_numpy(token_ids)).numpy()
        return moved_together(positions, is_kept, is_flat, NUM_ROLE_TOKENS + NUM_PADS + 2)

    def _of_the_user(self, token_ids: torch.Tensor) -> torch.Tensor:
        """bool [n]: what stands in a turn of the user."""
        positions = torch.arange(len(token_ids), device=token_ids.device)
        is_start = token_ids == self.config.raw["im_start_token_id"]
        starts = torch.where(is_start, positions, 0).cummax(0).values
        roles = token_ids[(starts + 1).clamp(max=len(token_ids) - 1)]
        return roles == self.config.raw["user_token_id"]

    def _answer_start(self, token_ids: torch.Tensor) -> int:
        """Where the last turn of the assistant, which the thinker goes on with, begins."""
        is_start = token_ids[:-1] == self.config.raw["im_start_token_id"]
        is_answer = token_ids[1:] == self.config.raw["assistant_token_id"]
        return int((is_start & is_answer).nonzero()[-1])
