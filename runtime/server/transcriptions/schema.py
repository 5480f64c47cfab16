"""The wire of transcriptions: the form's fields, and the shapes of what is heard."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from runtime.server.wire import WireModel, refusal

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]


class TranscriptionForm(WireModel):
    """All fields but `file`. Form values are text, so numbers and booleans are read from it."""

    model_config = ConfigDict(strict=False)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: ()
        for name in (
            "chunking_strategy",
            "include",
            "keywords",
            "known_speaker_names",
            "known_speaker_references",
            "languages",
        )
    }

    model: str
    language: Annotated[str, Field(pattern="^[a-z]{2,3}$")] | None = None
    prompt: str | None = None
    temperature: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    response_format: ResponseFormat = "json"
    stream: bool = False
    timestamp_granularities: list[Literal["segment"]] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.stream and self.response_format != "json":
            raise refusal("response_format", f"{self.response_format!r} with stream; a stream is always json")
        if self.timestamp_granularities is not None and self.response_format != "verbose_json":
            raise refusal("timestamp_granularities", "given, but response_format is not 'verbose_json'")
        return self


LIST_FIELDS = frozenset({"timestamp_granularities", "include", "keywords", "languages"})
"""Fields that a form may repeat, with or without `[]` behind the name."""


@dataclass(slots=True)
class Transcript:
    """What was heard in one clip. segments: {start, end, text} in seconds, and what else the ear says of them."""

    texts: list[str] = field(default_factory=list)
    language: str = ""
    duration_s: float = 0.0
    segments: list[Mapping[str, Any]] = field(default_factory=list)

    def add(self, meta: Mapping[str, Any]) -> str:
        """Take the meta of an ear's payload; returns its text."""
        text: str = meta["text"]
        self.texts.append(text)
        self.language = meta.get("language") or self.language
        self.duration_s = meta.get("duration_s", self.duration_s)
        self.segments += meta.get("segments", ())
        return text

    @property
    def text(self) -> str:
        return "".join(self.texts).strip()


def json_transcript(transcript: Transcript, heard_s: float) -> dict[str, Any]:
    return {"text": transcript.text, "usage": {"type": "duration", "seconds": heard_s}}


def verbose_transcript(transcript: Transcript, heard_s: float, temperature: float) -> dict[str, Any]:
    return {
        "task": "transcribe",
        "language": transcript.language,
        "duration": transcript.duration_s,
        **json_transcript(transcript, heard_s),
        "segments": [_segment(number, segment, temperature) for number, segment in enumerate(transcript.segments)],
    }


def text_delta(text: str) -> dict[str, Any]:
    return {"type": "transcript.text.delta", "delta": text}


def text_done(transcript: Transcript) -> dict[str, Any]:
    """Without usage: the event's only kind of it counts tokens, and audio has none."""
    return {"type": "transcript.text.done", "text": transcript.text}


def _segment(number: int, heard: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """The wire wants all of these; what an ear does not measure is 0."""
    text = heard["text"].encode()
    return {
        "id": number,
        "seek": 0,
        "start": heard["start"],
        "end": heard["end"],
        "text": heard["text"],
        "tokens": list(heard.get("tokens", ())),
        "temperature": temperature,
        "avg_logprob": heard.get("avg_logprob", 0.0),
        "compression_ratio": len(text) / len(zlib.compress(text)),
        "no_speech_prob": heard.get("no_speech_prob", 0.0),
    }
