"""The model in the box: brought up, asked, and heard."""

from __future__ import annotations

import base64
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import soundfile
from openai import OpenAI

from tests import served
from tests.served import Answer, Served

NAME = "sidekick"
SAMPLE_RATE_HZ = 24000


class Sidekick(Served):
    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder, NAME, *options)


@contextlib.contextmanager
def running(folder: Path, *options: str) -> Iterator[Sidekick]:
    sidekick = Sidekick(folder, *options)
    try:
        yield sidekick
    finally:
        sidekick.down()


def ask(client: OpenAI, content: Any, modalities: list[str], **options: Any) -> Answer:
    """One streamed chat request through the SDK."""
    return served.ask(client, NAME, content, modalities, **options)


def wav(samples: Any) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, SAMPLE_RATE_HZ, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def spoken(data: bytes) -> dict[str, Any]:
    """A content part with a spoken question."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def words(text: str) -> str:
    """Text without case and punctuation, for comparing what was heard with what was said."""
    return re.sub(r"\s+", " ", re.sub(r"[^a-z0-9' ]", " ", text.lower())).strip()
