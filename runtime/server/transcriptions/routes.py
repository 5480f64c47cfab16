"""The route of transcriptions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from runtime.server import sse
from runtime.server.errors import json_response
from runtime.server.replies import until_disconnect
from runtime.server.settings import ServerSettings
from runtime.server.transcriptions.form import read_form
from runtime.server.transcriptions.service import TranscriptionService


def make_router(service: TranscriptionService, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/audio/transcriptions")
    async def create(request: Request) -> Response:
        upload = await read_form(request)
        request_id = request.state.request_id
        if upload.form.stream:
            return sse.event_stream(lambda: service.open(upload, request_id), service.frames, settings)
        answer = await until_disconnect(request.receive, service.complete(upload, request_id))
        media_type = "text/vtt" if upload.form.response_format == "vtt" else "text/plain"
        return Response(answer, media_type=media_type) if isinstance(answer, str) else json_response(answer)

    return router
