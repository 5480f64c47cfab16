"""The routes of probes, metrics, version and status."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from runtime.server.errors import json_response
from runtime.server.health.schema import Probe
from runtime.server.health.service import HealthService


def make_router(service: HealthService) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/livez")
    async def alive() -> Response:
        return json_response({"status": "alive"})

    @router.get("/ready")
    async def ready(task: str | None = None, modality: str | None = None) -> Response:
        return _answer(service.ready(task, modality))

    @router.get("/startupz")
    async def started() -> Response:
        return _answer(service.started())

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version")
    async def version() -> Response:
        return json_response(service.version())

    @router.get("/v1/omnictl/status")
    async def status() -> Response:
        return json_response(service.status())

    return router


def _answer(probe: Probe) -> Response:
    if probe.passed:
        return json_response(probe.body)
    return json_response(probe.body, 503, {"Retry-After": "1", "Cache-Control": "no-store"})
