"""The wire of chat: what a request may say, and the shapes of completions and chunks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from runtime.plan import Modality
from runtime.server.names import VoiceName
from runtime.server.wire import WireModel, refusal

AudioFormat = Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]


class InputAudio(WireModel):
    data: str = Field(min_length=1)
    format: Literal["wav", "mp3"]


class MediaUrl(WireModel):
    """data:<type>;base64,<data>, or an http or https address."""

    url: str = Field(min_length=1)


class ImageUrl(MediaUrl):
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"detail": ("auto",)}


MEDIA_PARTS = {
    "input_audio": Modality.AUDIO,
    "audio_url": Modality.AUDIO,
    "image_url": Modality.IMAGE,
    "video_url": Modality.VIDEO,
}


class ContentPart(WireModel):
    """audio_url and video_url are additions to the public API."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {name: () for name in ("file", "refusal")}

    type: Literal["text", "input_audio", "audio_url", "image_url", "video_url"]
    text: str | None = None
    input_audio: InputAudio | None = None
    audio_url: MediaUrl | None = None
    image_url: ImageUrl | None = None
    video_url: MediaUrl | None = None

    @property
    def modality(self) -> Modality:
        return MEDIA_PARTS.get(self.type, Modality.TEXT)

    @model_validator(mode="after")
    def _matches_its_type(self) -> Self:
        for name in ("text", *MEDIA_PARTS):
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
            if part.text is None and self.role != "user":
                raise refusal("content", f"{part.modality} in a message of role {self.role!r}; only a user sends media")
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


class StageSampling(WireModel):
    """How one stage samples; top_k, min_p and repetition_penalty are additions to the public API."""

    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=1 << 20)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=2, allow_inf_nan=False)
    max_tokens: TokenLimit | None = None


class Sampling(StageSampling):
    """The sampling fields of a request: of the stage that writes the text."""

    stop: Annotated[list[StopText] | None, BeforeValidator(_as_list), Field(max_length=4)] = None
    max_completion_tokens: TokenLimit | None = None

    def sampling(self) -> dict[str, Any]:
        """What the client set, under the names that the stages know."""
        given = {name: getattr(self, name) for name in Sampling.model_fields if name in self.model_fields_set}
        if "max_completion_tokens" in given:
            given["max_tokens"] = given.pop("max_completion_tokens")
        return given


class ProcessorOptions(WireModel):
    """How a model takes media in."""

    use_audio_in_video: bool | None = None
    fps: float | None = Field(None, gt=0, le=60, allow_inf_nan=False)


class ChatRequest(Sampling):
    """stage_params and mm_processor_kwargs are additions to the public API."""

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
    stage_params: dict[str, StageSampling] | None = None
    mm_processor_kwargs: ProcessorOptions | None = None

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
