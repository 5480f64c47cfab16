"""The routes of speech."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from runtime.plan import VoicesPlan
from runtime.server import sse
from runtime.server.audio import CONTENT_TYPES
from runtime.server.errors import json_response
from runtime.server.replies import StreamReply
from runtime.server.settings import ServerSettings
from runtime.server.speech.schema import SpeechRequest, voice_list
from runtime.server.speech.service import SpeechService
from runtime.server.wire import read_json


def make_router(service: SpeechService, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/audio/speech")
    async def create(request: Request) -> Response:
        body = await read_json(request, SpeechRequest)
        request_id = request.state.request_id
        if body.stream_format == "sse":
            return sse.event_stream(
                lambda: service.open(body, request_id), lambda call: service.frames(body, call), settings
            )
        content_type = CONTENT_TYPES[body.response_format]
        return StreamReply(
            lambda: service.open(body, request_id), lambda call: service.audio(body, call), content_type, settings
        )

    return router


def make_voices_router(voices: VoicesPlan) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/audio/voices")
    async def voice_names() -> Response:
        return json_response(voice_list(voices))

    return router
