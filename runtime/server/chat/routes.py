"""The route of chat."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from runtime.server import sse
from runtime.server.chat.schema import ChatRequest
from runtime.server.chat.service import ChatService
from runtime.server.errors import json_response
from runtime.server.replies import until_disconnect
from runtime.server.settings import ServerSettings
from runtime.server.wire import read_json


def make_router(service: ChatService, settings: ServerSettings) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def create(request: Request) -> Response:
        body = await read_json(request, ChatRequest)
        request_id = request.state.request_id
        if not body.stream:
            return json_response(await until_disconnect(request.receive, service.complete(body, request_id)))
        return sse.event_stream(
            lambda: service.open(body, request_id), lambda call: service.frames(body, request_id, call), settings
        )

    return router
