"""The wire of chat: what a request may say, and the shapes of completions and chunks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from runtime.server.names import VoiceName
from runtime.server.wire import WireModel, refusal

AudioFormat = Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]


class InputAudio(WireModel):
    data: str = Field(min_length=1)
    format: Literal["wav", "mp3"]


class ContentPart(WireModel):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: () for name in ("image_url", "file", "refusal", "video_url", "audio_url")
    }

    type: Literal["text", "input_audio"]
    text: str | None = None
    input_audio: InputAudio | None = None

    @model_validator(mode="after")
    def _matches_its_type(self) -> Self:
        for name in ("text", "input_audio"):
            given = getattr(self, name) is not None
            if given and name != self.type:
                raise refusal(name, f"given in a part of type {self.type!r}", "wrong_part")
            if not given and name == self.type:
                raise refusal(name, "missing", "wrong_part")
        return self


def _as_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Message(WireModel):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "tool_calls": ([],),
        **{name: () for name in ("name", "audio", "refusal", "function_call", "tool_call_id")},
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[ContentPart], BeforeValidator(_as_parts), Field(min_length=1)]

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        for part in self.content:
            if part.input_audio is not None and self.role != "user":
                raise refusal("content", f"audio in a message of role {self.role!r}; only a user can speak")
            if part.text is not None and not part.text.strip():
                raise refusal("content", "empty text", "empty_text")
        return self


class AudioOutput(WireModel):
    voice: VoiceName | None = None
    format: AudioFormat = "wav"


class StreamOptions(WireModel):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenLimit = Annotated[int, Field(ge=1, le=1 << 20)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]


class Sampling(WireModel):
    """The sampling fields of a request; top_k, min_p and repetition_penalty are additions to the public API."""

    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=1 << 20)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stop: Annotated[list[StopText] | None, BeforeValidator(_as_list), Field(max_length=4)] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=2, allow_inf_nan=False)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None

    def sampling(self) -> dict[str, Any]:
        """What the client set, under the names that the stages know."""
        given = {name: getattr(self, name) for name in Sampling.model_fields if name in self.model_fields_set}
        if "max_completion_tokens" in given:
            given["max_tokens"] = given.pop("max_completion_tokens")
        return given


class ChatRequest(Sampling):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "logit_bias": ({},),
        "response_format": ({"type": "text"},),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "prompt_cache_retention": ("in_memory",),
        **{name: () for name in ("prediction", "moderation", "prompt_cache_key", "prompt_cache_options")},
        **{name: () for name in ("safety_identifier", "user", "web_search_options")},
    }

    model: str
    messages: list[Message] = Field(min_length=1)
    modalities: list[Literal["text", "audio"]] = Field(["text"], min_length=1, max_length=2)
    audio: AudioOutput | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def speaks(self) -> bool:
        return "audio" in self.modalities

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(set(self.modalities)) < len(self.modalities):
            raise refusal("modalities", "a modality is named twice", "repeated")
        if self.audio is not None and not self.speaks:
            raise refusal("audio", "given, but modalities has no 'audio'")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "given, but stream is not true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refusal("max_tokens", "differs from max_completion_tokens; send one of them")
        return self


def completion(request_id: str, created: int, model: str, choice: dict[str, Any], usage: Any) -> dict[str, Any]:
    """A whole answer."""
    return {
        "id": f"chatcmpl-{request_id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "logprobs": None, **choice}],
        "usage": usage,
    }


class ChunkMaker:
    """The chunks of one stream: they share id, time and model; with `include_usage` all carry the field."""

    def __init__(self, request_id: str, created: int, model: str, include_usage: bool) -> None:
        self._common: dict[str, Any] = {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._no_usage = {"usage": None} if include_usage else {}

    def delta(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._common, "choices": [choice], **self._no_usage}

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._common, "choices": [], "usage": usage}
