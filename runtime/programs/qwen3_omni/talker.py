"""Qwen3-Omni's talker: what the thinker says, as it says it, to frames of codes. Runs on engine `ar` with input rows.

Begins with the thinker's first token and takes one row of it a frame; after its last one it goes on by itself until it
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
from runtime.errors import ConfigError, InvalidRequest, StageError
from runtime.payload import Payload
from runtime.plan import PayloadKind
from runtime.programs.media.positions import Positions
from runtime.programs.qwen3_omni.checkpoint import Checkpoint
from runtime.programs.qwen3_omni.config import OmniConfig, read_speaking_config
from runtime.programs.qwen3_omni.talker_input import TalkerInput
from runtime.programs.qwen3_omni.tensors import to_tensor

DEFAULTS = Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, max_tokens=4096)
DEFAULT_VOICE = "ethan"
"""Both are the reference's."""


@dataclass(slots=True)
class _Thought:
    """The thinker's prompt: token_ids [n], embeddings [n, size], hidden [m, size] of its m media tokens, positions
    [3, n].
    """

    token_ids: torch.Tensor
    embeddings: torch.Tensor
    hidden: torch.Tensor
    positions: Positions


@dataclass(slots=True)
class _State:
    request_id: str
    speaker_id: int
    sampling: Sampling
    thought: _Thought | None = None
    rows: InputRows | None = None
    """Once the thinker has said something."""


class Talker:
    """`defaults` are the sampling parameters of every request; of what a request says for all stages only the seed is
    the talker's.
    """

    def __init__(self, config: OmniConfig, inputs: TalkerInput, defaults: Sampling, devices: tuple[str, ...]) -> None:
        self.config, self.inputs, self.defaults, self.devices = config, inputs, defaults, devices
        self.speakers: Mapping[str, int] = config.talker["speaker_id"]

    def arguments(self) -> Mapping[str, Any]:
        return {**input_rows_arguments(self.devices), "hf_overrides": _as_talker}

    def open(self, work: StageWork) -> _State:
        voice = str(work.params.get("voice") or DEFAULT_VOICE).lower()
        if voice not in self.speakers:
            raise InvalidRequest(f"voice: {voice!r}; expected one of {', '.join(self.speakers)}", param="voice")
        seed = work.params.get("seed", work.params.get("sampling", {}).get("seed"))
        sampling = stage_sampling(work.params, {"seed": seed}, self.defaults)
        return _State(work.request_id, self.speakers[voice], sampling)

    def feed(self, state: _State, payload: Payload) -> None:
        """First the thinker's prompt, then what it says, row by row, alone or many together."""
        if payload.tensors:
            self._take(state, payload)
        if payload.last and state.rows is not None:
            state.rows.extend(self.inputs.end[None])
            state.rows.finish()

    def _take(self, state: _State, payload: Payload) -> None:
        dtype = payload.meta["dtype"]
        embeddings = to_tensor(payload.tensors["embeddings"], dtype, self.inputs.device)
        if state.thought is None:
            if "hidden" not in payload.tensors:
                raise StageError("talker: the first hidden states that came are not those of a prompt")
            token_ids = to_tensor(payload.tensors["token_ids"], "int32", self.inputs.device)
            hidden = to_tensor(payload.tensors["hidden"], dtype, self.inputs.device)
            positions = np.array(payload.tensors["positions"], np.int64)
            state.thought = _Thought(token_ids, embeddings, hidden, positions)
        elif state.rows is None:
            state.rows = self._begin(state.thought, embeddings[0], state.speaker_id)
            state.rows.extend(self.inputs.text(embeddings[1:]))
        else:
            state.rows.extend(self.inputs.text(embeddings))

    def _begin(self, thought: _Thought, first_text: torch.Tensor, speaker_id: int) -> InputRows:
        prompt = self.inputs.prompt(thought.token_ids, thought.embeddings, thought.hidden, first_text, speaker_id)
        positions = self.inputs.positions(thought.token_ids.cpu().numpy(), thought.positions)
        return InputRows(prompt, self.inputs.pad, torch.from_numpy(positions))

    def begins(self, state: _State) -> bool:
        return state.rows is not None

    def prompt(self, state: _State, tokenizer: Any) -> Prompt | None:
        """The token that fills the prompt is one that is never said, so that a repetition penalty cannot touch it.
        None when the thinker ended without a word.
        """
        if state.rows is None:
            return None
        talker = self.config.talker
        return Prompt(
            token_ids=[talker["codec_pad_id"]] * state.rows.num_prompt_rows,
            sampling=state.sampling,
            stop_token_ids=(talker["codec_eos_token_id"],),
            inputs=state.rows,
        )

    def num_tokens_by_part(self, state: _State, tokenizer: Any) -> Mapping[str, int]:
        return {}

    def payloads(self, state: _State, generated: Generated) -> list[Payload]:
        """codes: int32 [groups, 1], one frame; none with the end."""
        if not generated.tensors:
            return []
        codes = generated.tensors["codes"].cpu().numpy().astype(np.int32)[:, None]
        seed = {} if generated.seed is None else {"seed": generated.seed}
        return [Payload(PayloadKind.CODEC_CODES, state.request_id, meta=seed, tensors={"codes": codes})]

    def facts(self) -> Mapping[str, Any]:
        return {"voices": tuple(self.speakers)}

    def close(self) -> None:
        """Nothing is held."""


def _as_talker(config: Any) -> Any:
    """Imports vLLM only when vLLM calls it."""
    from runtime.programs.qwen3_omni.talker_model import as_talker

    return as_talker(config)


def load(context: LoadContext) -> Talker:
    """ConfigError when a program setting is not a sampling parameter, WeightsError when a file or tensor is missing."""
    config = read_speaking_config(context)
    try:
        defaults = parse_sampling(context.stage.program_settings, DEFAULTS)
    except InvalidRequest as exc:
        raise ConfigError(f"stage {context.stage.name}: program_settings: {exc.message}") from exc
    dtype = context.stage.engine_settings.get("dtype", "auto")
    assert context.weights_dir is not None  # read_speaking_config has read from it
    inputs = TalkerInput(
        config, Checkpoint(context.weights_dir), None if dtype == "auto" else getattr(torch, dtype), context.devices[0]
    )
    return Talker(config, inputs, defaults, context.devices)
