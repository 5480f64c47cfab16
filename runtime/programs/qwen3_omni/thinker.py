"""Qwen3-Omni's thinker: understands text and audio, answers in text. Runs on engine `ar`, whose model hears by itself.

Turns messages into the model's chat template and clips into samples. Emits text deltas and, where somebody downstream
wants them, the hidden states that the talker speaks from. Knows no vLLM and no other stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.engines.ar.program import Generated, Prompt, hidden_states_arguments
from runtime.engines.ar.sampling import Sampling, parse_sampling, stage_sampling
from runtime.engines.base import LoadContext, StageWork
from runtime.errors import ConfigError, InvalidRequest, StageError, UnsupportedMedia
from runtime.payload import Payload
from runtime.plan import PayloadKind
from runtime.programs.media.audio import SAMPLE_RATE_HZ, AudioDecoder, FloatArray
from runtime.programs.qwen3_omni.config import OmniConfig, read_config
from runtime.programs.qwen3_omni.tensors import to_array

MAX_CLIPS = 16
MAX_AUDIO_S = 600.0


@dataclass(slots=True)
class _State:
    request_id: str
    sampling: Sampling
    wants_hidden: bool
    messages: list[dict[str, Any]] | None = None
    clips: dict[int, FloatArray] = field(default_factory=dict)
    """Index of a clip -> samples at 16 kHz."""
    sent_prompt: bool = False
    """Whether the hidden states of the prompt are out."""


class Thinker:
    """`defaults` apply where a request leaves a sampling parameter out; max_audio_s bounds all clips of a request."""

    def __init__(
        self,
        config: OmniConfig,
        decoder: AudioDecoder,
        defaults: Sampling,
        devices: tuple[str, ...],
        max_audio_s: float = MAX_AUDIO_S,
    ) -> None:
        self.config, self.decoder, self.defaults, self.devices = config, decoder, defaults, devices
        self.max_audio_s = max_audio_s

    def arguments(self) -> Mapping[str, Any]:
        config = self.config
        return {
            **(hidden_states_arguments(config.accept_hidden_layer, self.devices) if config.speaks else {}),
            "limit_mm_per_prompt": {"audio": MAX_CLIPS, "image": 0, "video": 0},
            "skip_mm_profiling": True,
            "mm_processor_cache_gb": 0,
        }

    def open(self, work: StageWork) -> _State:
        sampling = stage_sampling(work.params, work.params.get("sampling", {}), self.defaults)
        return _State(work.request_id, sampling, PayloadKind.HIDDEN_STATES in work.wants)

    def feed(self, state: _State, payload: Payload) -> None:
        """Messages, and clips as the bytes of their files."""
        if payload.kind == PayloadKind.MEDIA and payload.tensors:
            self._hear(state, payload)
        else:
            state.messages = payload.meta.get("messages", state.messages)

    def _hear(self, state: _State, payload: Payload) -> None:
        index = payload.meta["index"]
        name = payload.meta.get("name") or f"audio clip {index}"
        left_s = self.max_audio_s - sum(map(len, state.clips.values())) / SAMPLE_RATE_HZ
        self.decoder.check_format(payload.meta.get("format", ""))
        try:
            samples = self.decoder.decode(payload.tensors["data"], left_s)
        except UnsupportedMedia as exc:
            raise UnsupportedMedia(f"{name}: {exc.message}", param="messages") from exc
        if len(samples) > left_s * SAMPLE_RATE_HZ:
            raise InvalidRequest(
                f"{name}: the request has more than {self.max_audio_s:g} s of audio",
                hint="send less at a time; the limit is the thinker's setting max_audio_s",
                param="messages",
            )
        state.clips[index] = samples

    def prompt(self, state: _State, tokenizer: Any) -> Prompt:
        if not state.messages:
            raise InvalidRequest("messages: none were given", param="messages")
        order = [part["index"] for _, part in _parts(state) if part["type"] == "audio"]
        if len(order) > MAX_CLIPS:
            raise InvalidRequest(f"messages: {len(order)} audio clips; the limit is {MAX_CLIPS}", param="messages")
        missing = sorted(set(order) - set(state.clips))
        if missing:
            raise StageError(f"messages: no data of clip {missing[0]} came; there are {sorted(state.clips)}")
        token_ids = tokenizer.apply_chat_template(state.messages, add_generation_prompt=True, return_dict=False)
        media = {"audio": [(state.clips[index], SAMPLE_RATE_HZ) for index in order]} if order else {}
        return Prompt(token_ids, state.sampling, media, wants_rows=state.wants_hidden)

    def num_tokens_by_part(self, state: _State, tokenizer: Any) -> Mapping[str, int]:
        """Of the texts; what a clip takes is known only inside the model's preprocessing."""
        return {
            name: len(tokenizer.encode(part["text"], add_special_tokens=False))
            for name, part in _parts(state)
            if part["type"] == "text"
        }

    def payloads(self, state: _State, generated: Generated) -> list[Payload]:
        """A text delta, with the seed that makes the answer again if it was sampled; hidden states of new rows."""
        found = []
        if generated.text:
            seed = {} if generated.seed is None else {"seed": generated.seed}
            found.append(Payload(PayloadKind.TEXT, state.request_id, meta={"text": generated.text, **seed}))
        if generated.tensors:
            found.append(self._hidden_states(state, generated.tensors))
        return found

    def _hidden_states(self, state: _State, rows: Mapping[str, Any]) -> Payload:
        """Tensors: token_ids [n], embeddings [n, size]; with the prompt, which comes first, hidden [m, size] of the m
        tokens of it that stand for media: of texts the talker takes only the embeddings.
        """
        token_ids = rows["token_ids"].numpy().astype(np.int32)
        embeddings, dtype = to_array(rows["embeddings"])
        tensors = {"token_ids": token_ids, "embeddings": embeddings}
        if not state.sent_prompt:
            tensors["hidden"], _ = to_array(rows["hidden"][np.isin(token_ids, self.config.media_token_ids)])
        state.sent_prompt = True
        return Payload(PayloadKind.HIDDEN_STATES, state.request_id, meta={"dtype": dtype}, tensors=tensors)

    def facts(self) -> Mapping[str, Any]:
        return {"audio_formats": self.decoder.formats}

    def close(self) -> None:
        """Nothing is held."""


def _parts(state: _State) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name for the client, part) of all messages, in order."""
    for number, message in enumerate(state.messages or []):
        where, content = f"messages[{number}]", message["content"]
        if isinstance(content, str):
            yield where, {"type": "text", "text": content}
            continue
        for position, part in enumerate(content):
            name = f"{where}.content[{position}]"
            if part["type"] not in ("text", "audio"):
                raise InvalidRequest(f"{name}.type: {part['type']!r}; expected 'text' or 'audio'", param=f"{name}.type")
            yield name, part


def load(context: LoadContext, program: type[Thinker] = Thinker) -> Thinker:
    """ConfigError when a program setting is unknown or out of range, WeightsError when a file is missing."""
    config, where = read_config(context), f"stage {context.stage.name}: program_settings"
    settings = dict(context.stage.program_settings)
    max_audio_s = settings.pop("max_audio_s", MAX_AUDIO_S)
    if isinstance(max_audio_s, bool) or not isinstance(max_audio_s, int | float) or max_audio_s <= 0:
        raise ConfigError(f"{where}: max_audio_s: {max_audio_s!r}; expected a number of seconds above 0")
    try:
        defaults = parse_sampling(settings, Sampling())
    except InvalidRequest as exc:
        raise ConfigError(f"{where}: {exc.message}") from exc
    return program(config, AudioDecoder(context.stage.name), defaults, context.devices, max_audio_s)
