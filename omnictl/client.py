"""HTTP client of our own API, for a deployment on this machine. Knows the wire, not where deployments are.

Proxy variables are not honoured: what is dialled is this machine, and a proxy would not find it.
"""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from omnictl import settings
from runtime.errors import ERRORS, DeadlineExceeded, InvalidRequest, OmniError, Unavailable

CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0
"""Silence on a stream; the server sends comments more often than that."""

_BY_CODE = {error.code: error for error in ERRORS.values()}


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A part of a streamed answer. audio: 16-bit little-endian mono samples at 24 kHz."""

    text: str = ""
    audio: bytes = b""
    finish_reason: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)


class Client:
    """One deployment. Use as a context manager. Every method raises OmniError: the server's, or Unavailable."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self.url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def ready(self) -> dict[str, Any]:
        """The report of /ready, the same shape whether the answer is yes (200) or not yet (503). Needs no key."""
        with self._translated():
            response = self._http.get("/ready", timeout=PROBE_TIMEOUT_S)
        report = _json(response)
        if response.status_code not in (200, 503) or "phase" not in report:
            raise Unavailable(f"{self.url}: what answers there is not an omnictl server (HTTP {response.status_code})")
        return report

    def status(self) -> dict[str, Any]:
        """Phase, failure, queue depth and a row a stage replica; needs the API key where one is set."""
        with self._translated():
            response = self._http.get("/v1/omnictl/status", timeout=PROBE_TIMEOUT_S)
        report = _checked(response)
        if "phase" not in report or "stages" not in report:
            raise Unavailable(f"{self.url}: what answers there is not an omnictl server")
        return report

    def traces(self) -> list[dict[str, Any]]:
        """The requests whose traces are kept, newest first, those that still run before the others."""
        with self._translated():
            return list(_checked(self._http.get("/v1/omnictl/traces")).get("data", ()))

    def trace(self, request_id: str) -> dict[str, Any]:
        """Where the time of a request went. NotFound when its trace is not kept."""
        with self._translated():
            return _checked(self._http.get(f"/v1/omnictl/traces/{quote(request_id, safe='')}"))

    def chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], *, with_audio: bool = False
    ) -> Iterator[ChatDelta]:
        """Stream an answer; closing the iterator early aborts the request."""
        body: dict[str, Any] = {"model": model, "messages": list(messages), "stream": True}
        body["stream_options"] = {"include_usage": True}
        if with_audio:
            body |= {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
        for event in self._events("/v1/chat/completions", body):
            yield _chat_delta(event)

    def speech(self, model: str, text: str, *, audio_format: str = "wav") -> Iterator[bytes]:
        """The spoken text as a file in the format, as it is made, in the model's default voice."""
        body = {"model": model, "input": text, "response_format": audio_format}
        with self._translated(), self._http.stream("POST", "/v1/audio/speech", json=body) as response:
            _raise_for_error(response)
            yield from response.iter_bytes()

    def transcribe(self, model: str, file: Path) -> str:
        """The text spoken in an audio file."""
        data = _read(file)
        with self._translated():
            response = self._http.post(
                "/v1/audio/transcriptions", data={"model": model}, files={"file": (file.name, data)}
            )
        return str(_checked(response)["text"])

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Data frames of an event stream up to [DONE]; an error frame or a cut stream is raised."""
        with self._translated(), self._http.stream("POST", path, json=body) as response:
            _raise_for_error(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                if line.startswith("data:"):
                    yield _checked_event(data)
        raise Unavailable("the connection ended before the answer did", hint="omnictl logs shows what happened")

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """httpx's errors become ours, here and nowhere else."""
        try:
            yield
        except httpx.ConnectError as error:
            raise Unavailable(f"nothing answers at {self.url} ({error})", hint="omnictl ps") from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"{self.url}: no answer in time ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise Unavailable(f"{self.url}: {error or type(error).__name__}", hint="omnictl logs") from error


def audio_part(file: Path) -> dict[str, Any]:
    """A sound file as a content part of a chat message. The format is the ending of its name."""
    clip = {"data": base64.b64encode(_read(file)).decode(), "format": file.suffix.removeprefix(".").lower() or "wav"}
    return {"type": "input_audio", "input_audio": clip}


def seen_part(kind: str, file: Path) -> dict[str, Any]:
    """An image or a video, as `kind` says, as a content part of a chat message."""
    content_type = mimetypes.guess_type(file.name)[0] or ""
    url = f"data:{content_type};base64,{base64.b64encode(_read(file)).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{file}: {error.strerror}") from None


def error_from(fields: Mapping[str, Any]) -> OmniError:
    """The error that the server sent as OpenAI error JSON, with its class and so its exit code."""
    code = str(fields.get("code"))
    hint = f"set {settings.API_KEY_VARIABLE} to the server's key" if code == "invalid_api_key" else None
    return _BY_CODE.get(code, OmniError)(str(fields.get("message", "unknown error")), hint=hint)


def _checked_event(data: str) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        raise Unavailable(f"a piece of the answer is not JSON: {data[:80]!r}") from None
    if "error" in event:
        raise error_from(event["error"])
    return event


def _chat_delta(event: Mapping[str, Any]) -> ChatDelta:
    choice: Mapping[str, Any] = next(iter(event.get("choices") or ()), {})
    delta = choice.get("delta") or {}
    audio = delta.get("audio") or {}
    return ChatDelta(
        # Not the audio's transcript: beside text it only repeats it.
        text=delta.get("content") or "",
        audio=base64.b64decode(audio.get("data") or ""),
        finish_reason=choice.get("finish_reason"),
        usage=event.get("usage") or {},
    )


def _checked(response: httpx.Response) -> dict[str, Any]:
    _raise_for_error(response)
    return _json(response)


def _raise_for_error(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    error = _json(response).get("error")
    if isinstance(error, Mapping):
        raise error_from(error)
    raise Unavailable(f"{response.url}: HTTP {response.status_code}")


def _json(response: httpx.Response) -> dict[str, Any]:
    """The body when it is a JSON object, else an empty one."""
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
