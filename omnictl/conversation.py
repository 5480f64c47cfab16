"""A dialogue with a deployment: keeps what was said, streams answers, measures when they begin."""

from __future__ import annotations

import time
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnictl import output
from omnictl.api_keys import key_for
from omnictl.client import Client
from omnictl.state import Deployment
from runtime.errors import EnvironmentProblem, InvalidRequest

SAMPLE_RATE_HZ = 24_000
SAMPLE_BYTES = 2
PROMPT = "> "


@dataclass(slots=True)
class Answer:
    """What came, and seconds from sending the question to its first text, first audio and end."""

    text: str = ""
    audio_s: float = 0.0
    first_text_s: float | None = None
    first_audio_s: float | None = None
    total_s: float = 0.0
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def times(self) -> str:
        """For people: `first text 0.21 s, first audio 0.80 s, all 3.10 s`."""
        named = {"first text": self.first_text_s, "first audio": self.first_audio_s, "all": self.total_s}
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in named.items() if seconds is not None)


class Conversation:
    """Use as a context manager. `audio_file` collects the sound of all answers; `quiet` prints nothing."""

    def __init__(self, deployment: Deployment, audio_file: Path | None, *, quiet: bool = False) -> None:
        self._model, self._quiet = deployment.model_names[0], quiet
        self._client = Client(deployment.url, key_for(deployment))
        self._sound = WavFile(audio_file) if audio_file is not None else None
        self._messages: list[dict[str, Any]] = []

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()
        if self._sound is not None:
            self._sound.close()

    def hold(self) -> None:
        """Questions from the terminal until it says end of file."""
        while True:
            output.prompt(PROMPT)
            try:
                line = input()
            except EOFError:
                output.note("")
                return
            if line.strip():
                self.ask(line)

    def ask(self, text: str | None, media: Sequence[Mapping[str, Any]] = ()) -> Answer:
        """Stream one answer. The question and the answer become part of the dialogue only when it went well.

        media: content parts that belong to the question.
        """
        question = {"role": "user", "content": _content(text, media)}
        answer, began_s = Answer(), time.monotonic()
        deltas = self._client.chat(self._model, [*self._messages, question], with_audio=self._sound is not None)
        for delta in deltas:
            elapsed_s = time.monotonic() - began_s
            if delta.text:
                answer.first_text_s = answer.first_text_s or elapsed_s
                answer.text += delta.text
                self._print(delta.text)
            if delta.audio and self._sound is not None:
                answer.first_audio_s = answer.first_audio_s or elapsed_s
                answer.audio_s += self._sound.write(delta.audio)
            answer.finish_reason = delta.finish_reason or answer.finish_reason
            answer.usage = delta.usage or answer.usage
        answer.total_s = time.monotonic() - began_s
        self._print("\n")
        if not self._quiet:
            output.note(answer.times())
        self._messages += [question, {"role": "assistant", "content": answer.text}]
        return answer

    def _print(self, text: str) -> None:
        if not self._quiet:
            output.write(text)


class WavFile:
    """Mono 16-bit sound, written as it comes. The file is made when the first sound is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: wave.Wave_write | None = None
        self._half_sample = b""

    def write(self, data: bytes) -> float:
        """Seconds of sound in `data`, which may end inside a sample."""
        data = self._half_sample + data
        whole = len(data) // SAMPLE_BYTES * SAMPLE_BYTES
        self._half_sample = data[whole:]
        try:
            self._opened().writeframes(data[:whole])
        except OSError as error:
            raise EnvironmentProblem(f"{self._path}: {error.strerror}") from None
        return whole / SAMPLE_BYTES / SAMPLE_RATE_HZ

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> wave.Wave_write:
        if self._file is None:
            self._file = wave.Wave_write(str(self._path))
            self._file.setnchannels(1)
            self._file.setsampwidth(SAMPLE_BYTES)
            self._file.setframerate(SAMPLE_RATE_HZ)
        return self._file


def _content(text: str | None, media: Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    if not media:
        if not (text or "").strip():
            raise InvalidRequest("the question is empty", hint="omnictl chat 'What is the capital of France?'")
        return str(text)
    parts = [{"type": "text", "text": text}] if text else []
    return [*parts, *media]
