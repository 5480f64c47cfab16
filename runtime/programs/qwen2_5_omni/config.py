"""What the stages of Qwen2.5-Omni read from the checkpoint's config.json. Knows no model library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from runtime.engines.base import LoadContext
from runtime.errors import WeightsError
from runtime.programs.qwen3_omni import config as qwen3_omni


@dataclass(frozen=True)
class Config(qwen3_omni.OmniConfig):
    @property
    def speaks(self) -> bool:
        return {"talker_config", "token2wav_config"} <= set(self.raw)

    @property
    def dit(self) -> dict[str, Any]:
        return self.raw["token2wav_config"]["dit_config"]

    @property
    def vocoder(self) -> dict[str, Any]:
        return self.raw["token2wav_config"]["bigvgan_config"]

    @property
    def accept_hidden_layer(self) -> None:
        """The talker speaks from what the whole thinker makes of a token."""

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        return tuple(int(self.thinker[f"{kind}_token_index"]) for kind in ("audio", "image", "video"))

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Each of them ends the talker's speech: its own end, and the pad."""
        return tuple(int(self.talker[f"tts_codec_{mark}_token_id"]) for mark in ("end", "pad"))


def read_config(context: LoadContext) -> Config:
    """Of a checkpoint that speaks. WeightsError when the file is missing or is not of this family."""
    config = Config(qwen3_omni.read_config(context).raw)
    if not config.speaks:
        raise WeightsError(
            f"stage {context.stage.name}: {context.weights_dir}: not a Qwen2.5-Omni checkpoint with speech"
        )
    return config
