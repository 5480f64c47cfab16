"""What the stages of Qwen3-Omni read from the checkpoint's config.json. Knows no model library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from runtime.engines.base import LoadContext
from runtime.errors import WeightsError
from runtime.programs.loading import require_files


@dataclass(frozen=True)
class OmniConfig:
    """`raw` is the whole file."""

    raw: dict[str, Any]

    @property
    def thinker(self) -> dict[str, Any]:
        return self.raw["thinker_config"]

    @property
    def talker(self) -> dict[str, Any]:
        return self.raw["talker_config"]

    @property
    def code2wav(self) -> dict[str, Any]:
        return self.raw["code2wav_config"]

    @property
    def accept_hidden_layer(self) -> int:
        return int(self.talker["accept_hidden_layer"])

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Of the tokens that stand for audio, images and video in a prompt."""
        return tuple(int(self.thinker[f"{kind}_token_id"]) for kind in ("audio", "image", "video"))


def read_config(context: LoadContext) -> OmniConfig:
    """WeightsError when the file is missing or is not of this family."""
    (path,) = require_files(context, "config.json")
    where = f"stage {context.stage.name}: {path}"
    try:
        raw = json.loads(path.read_text())
    except ValueError as exc:
        raise WeightsError(f"{where} is not JSON: {exc}", hint="fetch the weights again with `omnictl pull`") from exc
    missing = [name for name in ("thinker_config", "talker_config", "code2wav_config") if name not in raw]
    if missing:
        raise WeightsError(f"{where} has no {', '.join(missing)}: not a Qwen3-Omni checkpoint with speech")
    return OmniConfig(raw)
