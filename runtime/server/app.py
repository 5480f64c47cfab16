"""Builds the HTTP application of one deployment: which endpoints the plan has, the layers in front of them, and
how errors leave. Holds no state of its own; called by the process that serves a plan, and by tests.
"""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from runtime.errors import Aborted, InvalidRequest, NotFound, OmniError, Unavailable
from runtime.plan import Plan
from runtime.server.auth import KeyGuard
from runtime.server.chat import routes as chat_routes
from runtime.server.chat.service import ChatService
from runtime.server.edge import Edge
from runtime.server.errors import error_response
from runtime.server.health import routes as health_routes
from runtime.server.health.schema import stage_phases
from runtime.server.health.service import HealthService
from runtime.server.limits import BodyLimit
from runtime.server.models import routes as model_routes
from runtime.server.models.service import ModelService
from runtime.server.ports import Orchestrator
from runtime.server.settings import ServerSettings
from runtime.server.speech import routes as speech_routes
from runtime.server.speech.service import SpeechService
from runtime.server.traces import routes as trace_routes
from runtime.server.traces.service import TraceService
from runtime.server.transcriptions import routes as transcription_routes
from runtime.server.transcriptions.service import TranscriptionService

TASK_OF = {
    "/v1/chat/completions": "chat",
    "/v1/audio/speech": "speech",
    "/v1/audio/transcriptions": "transcription",
}


def create_app(orchestrator: Orchestrator, plan: Plan, settings: ServerSettings) -> FastAPI:
    """The application. The orchestrator may still be starting: until it is ready, requests get 503 with phases."""
    app = FastAPI(title=plan.name, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for router in _routers(orchestrator, plan, settings):
        app.include_router(router)
    _handle_errors(app, orchestrator, plan)
    # the last one added is the first one that a request meets
    app.add_middleware(BodyLimit, max_bytes=plan.limits.max_body_bytes, idle_timeout_s=settings.body_idle_timeout_s)
    if settings.api_keys:
        app.add_middleware(KeyGuard, keys=settings.api_keys)
    app.add_middleware(Edge, traces=orchestrator.traces)
    return app


def _routers(orchestrator: Orchestrator, plan: Plan, settings: ServerSettings) -> list[APIRouter]:
    """The endpoints of the plan's tasks, and those that every deployment has."""
    routers = [
        health_routes.make_router(HealthService(orchestrator, plan)),
        model_routes.make_router(ModelService(plan)),
        trace_routes.make_router(TraceService(orchestrator.traces)),
    ]
    if "chat" in plan.tasks:
        routers.append(chat_routes.make_router(ChatService(orchestrator, plan, settings.media), settings))
    if "speech" in plan.tasks:
        routers.append(speech_routes.make_router(SpeechService(orchestrator, plan), settings))
    if "transcription" in plan.tasks:
        routers.append(transcription_routes.make_router(TranscriptionService(orchestrator, plan), settings))
    if plan.voices is not None:
        routers.append(speech_routes.make_voices_router(plan.voices))
    return routers


def _handle_errors(app: FastAPI, orchestrator: Orchestrator, plan: Plan) -> None:
    served = ", ".join(_served(app))

    async def omni_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, OmniError)
        phases = stage_phases(orchestrator.status()) if isinstance(error, Unavailable) else None
        return error_response(error, phases)

    async def http_error(request: Request, error: Exception) -> Response:
        """What the framework refuses: unknown routes, methods, broken forms."""
        assert isinstance(error, HTTPException)
        asked = f"{request.method} {request.url.path}"
        if error.status_code == 404:
            return error_response(
                NotFound(f"{asked}: not served by {plan.name}{_why(request, plan)}; served: {served}")
            )
        if error.status_code == 405:
            return _with_status(InvalidRequest(f"{asked}: wrong method; served: {served}"), error)
        return _with_status(InvalidRequest(f"{asked}: {error.detail}"), error)

    async def client_gone(request: Request, error: Exception) -> Response:
        return error_response(Aborted("the client closed the connection"))

    app.add_exception_handler(OmniError, omni_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)


def _why(request: Request, plan: Plan) -> str:
    """What the model would have to have for a route that others of its kind have."""
    task = TASK_OF.get(request.url.path)
    return f", whose tasks are {', '.join(plan.tasks)} and not {task}" if task and task not in plan.tasks else ""


def _with_status(error: InvalidRequest, cause: HTTPException) -> Response:
    response = error_response(error)
    response.status_code = cause.status_code
    response.headers.update(cause.headers or {})
    return response


def _served(app: FastAPI) -> list[str]:
    return [f"{method} {r.path}" for r in app.routes if isinstance(r, APIRoute) for method in sorted(r.methods)]
