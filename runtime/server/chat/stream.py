"""One streamed chat answer: events to chunks. Joining the deltas of a stream gives the message that the same
request gives without streaming.

Text comes as `content`; when only audio was asked for it comes as the audio's transcript. Audio comes as base64
of one file in pieces. The transcript of an answer with text is sent once, at its end.
"""

from __future__ import annotations

import time
from typing import Any

from runtime.plan import Modality
from runtime.requests import Delta, ModalityEnd
from runtime.server.audio import AudioTrack, Base64Stream
from runtime.server.chat.schema import ChatRequest, ChunkMaker


class ChatStream:
    """`audio_format` is None for an answer in text."""

    def __init__(self, body: ChatRequest, request_id: str, audio_format: str | None) -> None:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        self._maker = ChunkMaker(request_id, int(time.time()), body.model, include_usage)
        self._include_usage = include_usage
        self._shows_text = "text" in body.modalities
        self._track = AudioTrack(audio_format) if audio_format else None
        self._base64 = Base64Stream()
        self._audio_id = {"id": f"audio-{request_id}"}
        self._role = {"role": "assistant"}
        self._texts: list[str] = []
        self._reason = "stop"

    async def chunks(self, event: Delta | ModalityEnd) -> list[dict[str, Any]]:
        """The chunks that an event becomes; often one, sometimes none."""
        match event:
            case Delta(modality=Modality.TEXT, payload=payload):
                return self._text(payload.meta["text"])
            case ModalityEnd(modality=Modality.TEXT):
                self._reason = event.reason
            case Delta(modality=Modality.AUDIO, payload=payload) if self._track:
                return self._audio(data=self._base64.add(await self._track.add(payload)))
            case ModalityEnd(modality=Modality.AUDIO) if self._track:
                tail = self._base64.add(await self._track.finish())
                return self._audio(data=tail + self._base64.finish())
        return []

    def last_chunks(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """What follows the last event of an answer that went well."""
        chunks = []
        if self._track is not None:
            if self._shows_text:
                chunks += self._audio(transcript="".join(self._texts))
            # nothing is kept to refer to: the audio expires as it is sent
            chunks.append(self._delta({"audio": {**self._take_audio_id(), "expires_at": int(time.time())}}))
        chunks.append(self._delta({}, self._reason))
        if self._include_usage:
            chunks.append(self._maker.usage(usage))
        return chunks

    def _text(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        if not self._shows_text:
            return self._audio(transcript=text)
        self._texts.append(text)
        return [self._delta({"content": text})]

    def _audio(self, **fields: str) -> list[dict[str, Any]]:
        if not any(fields.values()):
            return []
        return [self._delta({"audio": {**self._take_audio_id(), **fields}})]

    def _delta(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        """Role and audio id are said once: clients join what repeats."""
        role, self._role = self._role, {}
        return self._maker.delta({**role, **delta}, reason)

    def _take_audio_id(self) -> dict[str, str]:
        audio_id, self._audio_id = self._audio_id, {}
        return audio_id
