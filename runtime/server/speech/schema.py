"""The wire of speech: what a request may say, the shapes of its events, and of the list of voices."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from runtime.plan import VoicesPlan
from runtime.server.names import VoiceName
from runtime.server.wire import WireModel


class SpeechRequest(WireModel):
    """`seed` is an addition to the public API; voice may be left out."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"instructions": ()}

    model: str
    input: str
    voice: VoiceName | None = None
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    speed: float = Field(1.0, ge=0.25, le=4.0, allow_inf_nan=False)
    stream_format: Literal["audio", "sse"] = "audio"
    seed: int | None = Field(None, ge=0, lt=1 << 63)


def audio_delta(audio: str) -> dict[str, Any]:
    return {"type": "speech.audio.delta", "audio": audio}


def audio_done(usage: dict[str, int]) -> dict[str, Any]:
    return {"type": "speech.audio.done", "usage": usage}


def voice_list(voices: VoicesPlan) -> dict[str, Any]:
    """Names first, then aliases with the voice that they mean. Under `voices` too: there web interfaces look."""
    names = [{"id": name, "object": "audio.voice", "name": name} for name in voices.names]
    aliases = [
        {"id": alias, "object": "audio.voice", "name": alias, "alias_of": name}
        for alias, name in voices.aliases.items()
    ]
    return {"object": "list", "default": voices.default, "data": names + aliases, "voices": names + aliases}
