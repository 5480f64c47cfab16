"""The routes of models."""

from __future__ import annotations

from fastapi import APIRouter, Response

from runtime.server.errors import json_response
from runtime.server.models.service import ModelService


def make_router(service: ModelService) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def all_models() -> Response:
        return json_response(service.all())

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return json_response(service.one(name))

    return router
