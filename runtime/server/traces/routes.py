"""The routes of traces."""

from __future__ import annotations

from fastapi import APIRouter, Response

from runtime.server.errors import json_response
from runtime.server.traces.service import TraceService


def make_router(service: TraceService) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/omnictl/traces")
    async def all_traces() -> Response:
        return json_response(service.all())

    @router.get("/v1/omnictl/traces/{request_id}")
    async def one_trace(request_id: str) -> Response:
        return json_response(service.one(request_id))

    return router
