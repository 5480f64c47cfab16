"""Qwen3-Omni's thinker: understands text, audio, images and video, answers in text. Runs on engine `ar`, whose model
hears and sees by itself.

Turns messages into the model's chat template. Emits text deltas and, where somebody downstream wants them, the hidden
states that the talker speaks from. Knows no vLLM and no other stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.engines.ar.program import Generated, Prompt, hidden_states_arguments
from runtime.engines.ar.sampling import Sampling, parse_sampling, stage_sampling
from runtime.engines.base import LoadContext, StageWork
from runtime.errors import ConfigError, InvalidRequest
from runtime.payload import Payload
from runtime.plan import PayloadKind
from runtime.programs.media.request import MAX_COUNTS, MediaDecoders, RequestMedia, split_settings
from runtime.programs.qwen3_omni.config import MEDIA_KINDS, OmniConfig, read_config
from runtime.programs.qwen3_omni.tensors import to_array


@dataclass(slots=True)
class _State:
    request_id: str
    sampling: Sampling
    wants_hidden: bool
    media: RequestMedia
    messages: list[dict[str, Any]] | None = None
    sent_prompt: bool = False
    """Whether the hidden states of the prompt are out."""


class Thinker:
    """`defaults` apply where a request leaves a sampling parameter out."""

    config_class: type[OmniConfig] = OmniConfig

    def __init__(
        self, config: OmniConfig, decoders: MediaDecoders, defaults: Sampling, devices: tuple[str, ...]
    ) -> None:
        self.config, self.decoders, self.defaults, self.devices = config, decoders, defaults, devices

    def arguments(self) -> Mapping[str, Any]:
        config = self.config
        return {
            **(hidden_states_arguments(config.accept_hidden_layer, self.devices) if config.speaks else {}),
            "hf_overrides": _mended,
            "limit_mm_per_prompt": MAX_COUNTS,
            "skip_mm_profiling": True,
            "mm_processor_cache_gb": 0,
        }

    def open(self, work: StageWork) -> _State:
        sampling = stage_sampling(work.params, work.params.get("sampling", {}), self.defaults)
        media = RequestMedia(self.decoders, self.decoders.options(work.params))
        return _State(work.request_id, sampling, PayloadKind.HIDDEN_STATES in work.wants, media)

    def feed(self, state: _State, payload: Payload) -> None:
        """Messages, and media as the bytes of their files."""
        if payload.kind == PayloadKind.MEDIA and payload.tensors:
            state.media.take(payload)
        else:
            state.messages = payload.meta.get("messages", state.messages)

    def prompt(self, state: _State, tokenizer: Any) -> Prompt:
        if not state.messages:
            raise InvalidRequest("messages: none were given", param="messages")
        order = [(part["type"], part["index"]) for _, part in _parts(state) if part["type"] != "text"]
        media, options = state.media.for_prompt(order)
        token_ids = self.conversation_tokens(state, tokenizer)
        self._check_placeholders(token_ids, order, tokenizer)
        return Prompt(token_ids, state.sampling, media, options, wants_rows=state.wants_hidden)

    def _check_placeholders(self, token_ids: list[int], order: list[tuple[str, int]], tokenizer: Any) -> None:
        """A text can spell the token that stands for a medium, which would then be put into the text."""
        for modality, token_id in zip(MEDIA_KINDS, self.config.media_token_ids, strict=True):
            if token_ids.count(token_id) != sum(kind == modality for kind, _ in order):
                token = tokenizer.convert_ids_to_tokens(token_id)
                raise InvalidRequest(f"messages: a text holds {token}, which stands for {modality}", param="messages")

    def conversation_tokens(self, state: _State, tokenizer: Any) -> list[int]:
        """The messages in the model's chat template, a token for each medium."""
        ids: list[int] = tokenizer.apply_chat_template(state.messages, add_generation_prompt=True, return_dict=False)
        return ids

    def num_tokens_by_part(self, state: _State, tokenizer: Any) -> Mapping[str, int]:
        """Of the texts; what a medium takes is known only inside the model's preprocessing."""
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
        """Tensors: token_ids [n], embeddings [n, size]. With the prompt, which comes first, also positions [3, n] and
        hidden [m, size] of the m tokens of it that stand for media: of texts the talker takes only the embeddings.
        """
        token_ids = rows["token_ids"].numpy().astype(np.int32)
        embeddings, dtype = to_array(rows["embeddings"])
        tensors = {"token_ids": token_ids, "embeddings": embeddings}
        if not state.sent_prompt:
            tensors["hidden"], _ = to_array(rows["hidden"][np.isin(token_ids, self.config.media_token_ids)])
            tensors["positions"] = rows["positions"].numpy().astype(np.int32)
        state.sent_prompt = True
        return Payload(PayloadKind.HIDDEN_STATES, state.request_id, meta={"dtype": dtype}, tensors=tensors)

    def facts(self) -> Mapping[str, Any]:
        return self.decoders.facts()

    def close(self) -> None:
        """Nothing is held."""


def _mended(config: Any) -> Any:
    """The configuration as it is. vLLM asks for it before it makes the model."""
    from runtime.programs.qwen3_omni.thinker_model import merge_by_modality

    merge_by_modality()
    return config


def _parts(state: _State) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name for the client, part) of all messages, in order."""
    for number, message in enumerate(state.messages or []):
        where, content = f"messages[{number}]", message["content"]
        if isinstance(content, str):
            yield where, {"type": "text", "text": content}
            continue
        for position, part in enumerate(content):
            name = f"{where}.content[{position}]"
            if part["type"] not in ("text", *MEDIA_KINDS):
                expected = ", ".join(("text", *MEDIA_KINDS))
                raise InvalidRequest(f"{name}.type: {part['type']!r}; expected one of {expected}", param=f"{name}.type")
            yield name, part


def load(context: LoadContext, program: type[Thinker] = Thinker) -> Thinker:
    """ConfigError when a program setting is unknown or out of range, WeightsError when a file is missing."""
    config = program.config_class(read_config(context).raw)
    where = f"stage {context.stage.name}: program_settings"
    limits, settings = split_settings(context.stage.program_settings, where)
    try:
        defaults = parse_sampling(settings, Sampling())
    except InvalidRequest as exc:
        raise ConfigError(f"{where}: {exc.message}") from exc
    decoders = MediaDecoders(context.stage.name, limits, config.steps_per_s)
    return program(config, decoders, defaults, context.devices)
