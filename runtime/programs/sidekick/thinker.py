"""The sidekick's thinker: a chat model that answers in text. Runs on engine `ar`.

Turns messages into the model's chat template; where a message has audio, what the ear understood stands in its place.
Emits text deltas. Knows no vLLM and no other stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.engines.ar.program import Generated, Prompt
from runtime.engines.ar.sampling import Sampling, parse_sampling, stage_sampling
from runtime.engines.base import LoadContext, StageWork
from runtime.errors import ConfigError, InvalidRequest, StageError
from runtime.payload import Payload
from runtime.plan import REQUEST_INPUT, PayloadKind
from runtime.programs.loading import require_files

FILES = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
PART_SEPARATOR = "\n"


@dataclass(slots=True)
class _State:
    request_id: str
    sampling: Sampling
    messages: list[dict[str, Any]] | None = None
    transcripts: dict[int, str] = field(default_factory=dict)
    """Index of a clip -> what was said in it."""


class Thinker:
    """`defaults` apply where a request leaves a sampling parameter out."""

    def __init__(self, defaults: Sampling) -> None:
        self.defaults = defaults

    def arguments(self) -> Mapping[str, Any]:
        return {}

    def open(self, work: StageWork) -> _State:
        sampling = stage_sampling(work.params, work.params.get("sampling", {}), self.defaults)
        return _State(work.request_id, sampling)

    def feed(self, state: _State, payload: Payload) -> None:
        """Messages come from the request; a text on any other input is the transcript of a clip."""
        if payload.edge == REQUEST_INPUT:
            state.messages = payload.meta.get("messages", state.messages)
        elif "text" in payload.meta:
            state.transcripts[payload.meta["index"]] = payload.meta["text"]

    def prompt(self, state: _State, tokenizer: Any) -> Prompt:
        if not state.messages:
            raise InvalidRequest("messages: none were given", param="messages")
        conversation = [
            {
                "role": message["role"],
                "content": PART_SEPARATOR.join(text for _, text in _parts(state, number, message)),
            }
            for number, message in enumerate(state.messages)
        ]
        if not conversation[-1]["content"].strip():
            raise InvalidRequest(
                f"messages[{len(conversation) - 1}]: says nothing: no text, and no speech was understood",
                hint="check that the recording is not silent",
                param="messages",
            )
        token_ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        return Prompt(token_ids, state.sampling)

    def num_tokens_by_part(self, state: _State, tokenizer: Any) -> Mapping[str, int]:
        return {
            name: len(tokenizer.encode(text, add_special_tokens=False))
            for number, message in enumerate(state.messages or [])
            for name, text in _parts(state, number, message)
        }

    def payloads(self, state: _State, generated: Generated) -> list[Payload]:
        """One text delta, with the seed that makes the answer again if it was sampled."""
        if not generated.text:
            return []
        meta: dict[str, Any] = {"text": generated.text}
        if generated.seed is not None:
            meta["seed"] = generated.seed
        return [Payload(PayloadKind.TEXT, state.request_id, meta=meta)]

    def facts(self) -> Mapping[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing is held."""


def _parts(state: _State, number: int, message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name for the client, text) of a message's parts, in order."""
    where, content = f"messages[{number}]", message["content"]
    if isinstance(content, str):
        yield where, content
        return
    for position, part in enumerate(content):
        name = f"{where}.content[{position}]"
        if part["type"] == "text":
            yield name, part["text"]
        elif part["type"] == "audio":
            yield f"{name} (audio)", _transcript(state, name, part["index"])
        else:
            raise InvalidRequest(f"{name}.type: {part['type']!r}; expected 'text' or 'audio'", param=f"{name}.type")


def _transcript(state: _State, name: str, index: int) -> str:
    if index not in state.transcripts:
        raise StageError(f"{name}: no transcript of clip {index} came; there are {sorted(state.transcripts)}")
    return state.transcripts[index]


def load(context: LoadContext) -> Thinker:
    """ConfigError when a program setting is not a sampling parameter, WeightsError when a file is missing."""
    require_files(context, *FILES)
    try:
        defaults = parse_sampling(context.stage.program_settings, Sampling())
    except InvalidRequest as exc:
        raise ConfigError(f"stage {context.stage.name}: program_settings: {exc.message}") from exc
    return Thinker(defaults)
