"""The key guard on every route there is, HTTP and WebSocket (F127)."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fastapi.routing import APIRoute
from openai import AuthenticationError

from runtime.server.app import create_app
from runtime.server.auth import OPEN_PATHS
from runtime.server.settings import ServerSettings
from tests.plans import sim_plan
from tests.server.serving import MODEL, Served, served

KEYS = ("first-key", "second-kéy")
UPGRADE = {
    "connection": "upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
}
BAD_HEADERS: list[dict[str, str]] = [
    {},
    *(
        {"authorization": v}
        for v in ("", "Bearer", "Bearer wrong", "Bearer first-key2", "Basic first-key", "first-key")
    ),
    {"x-api-key": "first-key"},
    {"sec-websocket-protocol": "openai-insecure-api-key.first-key"},
    {"cookie": "key=first-key"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(sim_plan(), tmp_path_factory.mktemp("auth"), ServerSettings(api_keys=KEYS)) as one:
        yield one


def routes(server: Served) -> list[tuple[str, str]]:
    app = create_app(server.deployment, server.deployment.plan, ServerSettings())
    found = [(m, r.path.replace("{name:path}", "x")) for r in app.routes if isinstance(r, APIRoute) for m in r.methods]
    assert len(found) > 10
    return [*found, ("GET", "/"), ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/health/"), ("POST", "/nope")]


@pytest.mark.parametrize("headers", BAD_HEADERS)
def test_every_route_but_the_probes_wants_a_key(server: Served, headers: dict[str, str]) -> None:
    with server.http() as http:
        for method, path in routes(server):
            reply = http.request(method, f"{path}?api_key=first-key&key=first-key", headers=headers)
            if path in OPEN_PATHS:
                assert reply.status_code == 200
                continue
            assert reply.status_code == 401, (method, path)
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert "first" not in reply.text


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens(server: Served, key: str) -> None:
    headers = {"authorization": f"bearer {key}".encode()}
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/v1/realtime", "/nope", "/health"])
def test_a_websocket_wants_a_key(server: Served, path: str) -> None:
    with server.http() as http:
        for headers in BAD_HEADERS:
            reply = http.get(f"{path}?key=first-key", headers={**UPGRADE, **headers})
            assert reply.status_code == (403 if path in OPEN_PATHS else 401)
        known = {**UPGRADE, "authorization": "Bearer first-key"}
        assert http.get(path, headers=known).status_code == 403, "there is no such socket; the key was accepted"


def test_the_sdk_with_and_without_the_key(server: Served) -> None:
    with server.openai("first-key") as openai:
        assert [model.id for model in openai.models.list()] == [MODEL]
    with server.openai("wrong") as openai, pytest.raises(AuthenticationError):
        openai.models.list()
