"""Qwen2.5-Omni's talker: what the thinker says, as it says it, to codes. Runs on engine `ar` with input rows.

Begins with the thinker's first word and takes one row of it a code; after its last one it goes on by itself until it
says the end. Knows no vLLM and no waveforms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from runtime.engines.ar.inputs import InputRows
from runtime.engines.ar.program import Generated, Prompt, input_rows_arguments
from runtime.engines.ar.sampling import Sampling, parse_sampling, stage_sampling
from runtime.engines.base import LoadContext, StageWork
from runtime.errors import ConfigError, InvalidRequest
from runtime.payload import Payload
from runtime.plan import PayloadKind
from runtime.programs.media.positions import Positions, moved_together
from runtime.programs.qwen2_5_omni.config import Config, read_config
from runtime.programs.qwen2_5_omni.rows import NUM_MARKS, TalkerRows
from runtime.programs.qwen2_5_omni.speakers import Speaker, choose, read_speakers
from runtime.programs.qwen3_omni.checkpoint import Checkpoint
from runtime.programs.qwen3_omni.tensors import to_tensor

DEFAULTS = Sampling(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, max_tokens=4096)
"""The reference's."""


@dataclass(slots=True)
class _State:
    request_id: str
    speaker: Speaker
    sampling: Sampling
    told: torch.Tensor | None = None
    """[n, thinker size]: of the thinker's prompt."""
    positions: Positions | None = None
    """[3, n + NUM_MARKS]"""
    rows: InputRows | None = None
    """Once the thinker has said something."""


class Talker:
    """`defaults` are the sampling parameters of every request; of what a request says for all stages only the seed is
    the talker's.
    """

    def __init__(
        self,
        config: Config,
        inputs: TalkerRows,
        speakers: Mapping[str, Speaker],
        defaults: Sampling,
        devices: tuple[str, ...],
    ) -> None:
        self.config, self.inputs, self.speakers, self.defaults = config, inputs, speakers, defaults
        self.devices = devices

    def arguments(self) -> Mapping[str, Any]:
        return {**input_rows_arguments(self.devices), "hf_overrides": _as_talker}

    def open(self, work: StageWork) -> _State:
        speaker = choose(self.speakers, work.params.get("voice"))
        seed = work.params.get("seed", work.params.get("sampling", {}).get("seed"))
        return _State(work.request_id, speaker, stage_sampling(work.params, {"seed": seed}, self.defaults))

    def feed(self, state: _State, payload: Payload) -> None:
        """First the rows of the thinker's prompt, then those of what it says, alone or many together."""
        if payload.tensors:
            self._take(state, payload)
        if payload.last and state.rows is not None:
            state.rows.extend(self.inputs.end[None])
            state.rows.finish()

    def _take(self, state: _State, payload: Payload) -> None:
        rows = to_tensor(payload.tensors["rows"], payload.meta["dtype"], self.inputs.device)
        if state.told is None:
            positions = np.array(payload.tensors["positions"], np.int64)
            everything = np.ones(len(rows), np.bool_)
            state.positions = moved_together(positions, everything, ~everything, NUM_MARKS)
            state.told = rows
        elif state.rows is None:
            prompt = self.inputs.prompt(state.told, rows[0], state.speaker.bos_token_id)
            state.rows = InputRows(prompt, self.inputs.pad, torch.from_numpy(state.positions))
            state.rows.extend(self.inputs.said(rows[1:]))
        else:
            state.rows.extend(self.inputs.said(rows))

    def begins(self, state: _State) -> bool:
        return state.rows is not None

    def prompt(self, state: _State, tokenizer: Any) -> Prompt | None:
        """The tokens are those that the reference has in this place: a repetition penalty counts them.
        None when the thinker ended without a word.
        """
        if state.rows is None:
            return None
        mask, pad, start = (self.config.talker[f"tts_codec_{mark}_token_id"] for mark in ("mask", "pad", "start"))
        return Prompt(
            token_ids=[mask] * (state.rows.num_prompt_rows - NUM_MARKS) + [pad, start],
            sampling=state.sampling,
            stop_token_ids=self.config.end_token_ids,
            inputs=state.rows,
        )

    def num_tokens_by_part(self, state: _State, tokenizer: Any) -> Mapping[str, int]:
        return {}

    def payloads(self, state: _State, generated: Generated) -> list[Payload]:
        """codes: int32 [1, n]; none with the end."""
        codes = np.array([[c for c in generated.token_ids if c not in self.config.end_token_ids]], np.int32)
        if not codes.size:
            return []
        seed = {} if generated.seed is None else {"seed": generated.seed}
        return [Payload(PayloadKind.CODEC_CODES, state.request_id, meta=seed, tensors={"codes": codes})]

    def facts(self) -> Mapping[str, Any]:
        return {"voices": tuple(self.speakers)}

    def close(self) -> None:
        """Nothing is held."""


def _as_talker(config: Any) -> Any:
    """Imports vLLM only when vLLM calls it."""
    from runtime.programs.qwen2_5_omni.talker_model import as_talker

    return as_talker(config)


def load(context: LoadContext) -> Talker:
    """ConfigError when a program setting is not a sampling parameter, WeightsError when a file or tensor is missing."""
    config, speakers = read_config(context), read_speakers(context)
    try:
        defaults = parse_sampling(context.stage.program_settings, DEFAULTS)
    except InvalidRequest as exc:
        raise ConfigError(f"stage {context.stage.name}: program_settings: {exc.message}") from exc
    dtype = context.stage.engine_settings.get("dtype", "auto")
    assert context.weights_dir is not None  # read_config has read from it
    inputs = TalkerRows(
        config,
        speakers.values(),
        Checkpoint(context.weights_dir),
        None if dtype == "auto" else getattr(torch, dtype),
        context.devices[0],
    )
    return Talker(config, inputs, speakers, defaults, context.devices)
