"""What the stages of Qwen3-Omni read from the checkpoint's config.json. Knows no model library."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from runtime.engines.base import LoadContext
from runtime.errors import WeightsError
from runtime.programs.loading import require_files

MEDIA_KINDS = ("audio", "image", "video")


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
    def speaks(self) -> bool:
        """False for the checkpoints that have a thinker alone."""
        return bool(self.raw.get("enable_audio_output", True)) and {"talker_config", "code2wav_config"} <= set(self.raw)

    @property
    def accept_hidden_layer(self) -> int | None:
        return int(self.talker["accept_hidden_layer"])

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Of the tokens that stand for MEDIA_KINDS in a prompt."""
        return tuple(int(self.thinker[f"{kind}_token_id"]) for kind in MEDIA_KINDS)

    @property
    def steps_per_s(self) -> int:
        """Positions that a second of video takes, times the frames that are one for the model."""
        return int(self.thinker["position_id_per_seconds"]) * int(self.thinker["vision_config"]["temporal_patch_size"])


def read_config(context: LoadContext) -> OmniConfig:
    """Of a checkpoint that understands. WeightsError when the file is missing or is not of this family."""
    (path,) = require_files(context, "config.json")
    where = f"stage {context.stage.name}: {path}"
    try:
        raw = json.loads(path.read_text())
    except ValueError as exc:
        raise WeightsError(f"{where} is not JSON: {exc}", hint="fetch the weights again with `omnictl pull`") from exc
    if "thinker_config" not in raw:
        raise WeightsError(f"{where} has no thinker_config: not a checkpoint of this model")
    return OmniConfig(raw)


def read_speaking_config(context: LoadContext) -> OmniConfig:
    """Of a checkpoint that also speaks: WeightsError for one that does not."""
    config = read_config(context)
    if not config.speaks:
        raise WeightsError(
            f"stage {context.stage.name}: {context.weights_dir} has a thinker alone: not a Qwen3-Omni checkpoint with "
            "speech",
            hint="serve it with a recipe that answers in text, or use the weights of the Instruct model",
        )
    return config
