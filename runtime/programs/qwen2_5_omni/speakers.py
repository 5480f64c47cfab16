"""The voices of a Qwen2.5-Omni checkpoint: spk_dict.pt, as published. Read by the talker and by token2wav."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from runtime.engines.base import LoadContext
from runtime.errors import InvalidRequest, WeightsError
from runtime.programs.loading import require_files

FILE = "spk_dict.pt"
DEFAULT_VOICE = "chelsie"
"""The reference's."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """condition: float32 [1, size]; mel: float32 [1, frames, bands], of a sentence in this voice."""

    bos_token_id: int
    """Of the text, with which this voice begins to speak."""
    condition: torch.Tensor
    mel: torch.Tensor


def read_speakers(context: LoadContext) -> dict[str, Speaker]:
    """By lower-case name. WeightsError when the file is missing or holds something else."""
    (path,) = require_files(context, FILE)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        return {
            name.lower(): Speaker(int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float())
            for name, entry in found.items()
        }
    except Exception as exc:  # torch's own, those of the archive and of what was packed in it
        raise WeightsError(
            f"stage {context.stage.name}: {path}: {type(exc).__name__}: {exc}",
            hint="put the file of the published checkpoint there",
        ) from exc


def choose(speakers: Mapping[str, Speaker], voice: object) -> Speaker:
    """InvalidRequest with the known names; the default one where none is asked for."""
    name = str(voice or DEFAULT_VOICE).lower()
    if name not in speakers:
        raise InvalidRequest(f"voice: {name!r}; expected one of {', '.join(speakers)}", param="voice")
    return speakers[name]
