"""Qwen2.5-Omni's thinker: Qwen3-Omni's but for its last layer, which the talker hears, and its system prompt.

Runs on engine `ar`, whose model hears by itself. Knows no vLLM and no other stage.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.engines.base import LoadContext, StageWork
from runtime.errors import ConfigError, UnsupportedValue
from runtime.payload import Payload
from runtime.plan import PayloadKind
from runtime.programs.media.request import OPTIONS
from runtime.programs.qwen2_5_omni.config import Config
from runtime.programs.qwen3_omni import thinker as qwen3_omni
from runtime.programs.qwen3_omni.tensors import to_array

MAX_AUDIO_S = 300.0
"""The model's preprocessing cuts a clip off there."""
TEMPLATE_FILE = "chat_template.json"


class Thinker(qwen3_omni.Thinker):
    config_class = Config
    system_prompt: str | None = None
    """For requests with speech that have none of their own: the model was trained to speak with one only."""
    template: str | None = None
    """Where the tokenizer has none: published checkpoints keep it beside."""

    def arguments(self) -> Mapping[str, Any]:
        return {**super().arguments(), "hf_overrides": _as_thinker}

    def open(self, work: StageWork) -> Any:
        """WHY the refusal: vLLM 0.32 weaves picture and sound together as if the model saw a second in each step."""
        state = super().open(work)
        step_s = self.frames_per_step / state.media.options.fps
        if state.media.options.use_audio_in_video and step_s != 1:
            raise UnsupportedValue(
                f"{OPTIONS}.fps: {state.media.options.fps:g}; with use_audio_in_video this model takes "
                f"{self.frames_per_step}",
                param=OPTIONS,
            )
        return state

    @property
    def frames_per_step(self) -> int:
        return int(self.config.thinker["vision_config"]["temporal_patch_size"])

    def conversation_tokens(self, state: Any, tokenizer: Any) -> list[int]:
        messages = state.messages
        if self.system_prompt and state.wants_hidden and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        template = tokenizer.chat_template or self.template
        ids: list[int] = tokenizer.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, return_dict=False
        )
        return ids

    def _hidden_states(self, state: Any, rows: Mapping[str, Any]) -> Payload:
        """Tensor rows [n, size]: for each token, what the model makes of it plus its embedding; of a token of the
        prompt, which comes first, that stands for media only the former. With the prompt also positions [3, n].
        """
        embeddings, tensors = rows["embeddings"], {}
        if not state.sent_prompt:
            tensors["positions"] = rows["positions"].numpy().astype(np.int32)
            is_media = torch.isin(rows["token_ids"], torch.tensor(self.config.media_token_ids))
            embeddings = embeddings.masked_fill(is_media[:, None].to(embeddings.device), 0)
        state.sent_prompt = True
        tensors["rows"], dtype = to_array(rows["hidden"] + embeddings)
        return Payload(PayloadKind.HIDDEN_STATES, state.request_id, meta={"dtype": dtype}, tensors=tensors)


def _as_thinker(config: Any) -> Any:
    """Imports vLLM only when vLLM calls it."""
    from runtime.programs.qwen2_5_omni.thinker_model import as_thinker

    return as_thinker(config)


def load(context: LoadContext) -> Thinker:
    """ConfigError when a program setting is unknown or out of range, WeightsError when a file is missing."""
    settings = {"max_audio_s": MAX_AUDIO_S, **context.stage.program_settings}
    where = f"stage {context.stage.name}: program_settings"
    system_prompt = settings.pop("system_prompt", None)
    if system_prompt is not None and not isinstance(system_prompt, str):
        raise ConfigError(f"{where}: system_prompt: {system_prompt!r}; expected a text")
    stage = context.stage.model_copy(update={"program_settings": settings})
    thinker = qwen3_omni.load(dataclasses.replace(context, stage=stage), Thinker)
    assert isinstance(thinker, Thinker)
    if thinker.decoders.limits.max_audio_s > MAX_AUDIO_S:
        raise ConfigError(
            f"{where}: max_audio_s: {thinker.decoders.limits.max_audio_s:g}; this model hears {MAX_AUDIO_S:g} s at most"
        )
    assert context.weights_dir is not None  # the configuration has been read from it
    thinker.system_prompt, thinker.template = system_prompt, _read_template(context.weights_dir / TEMPLATE_FILE)
    return thinker


def _read_template(path: Path) -> str | None:
    return str(json.loads(path.read_text())["chat_template"]) if path.is_file() else None
