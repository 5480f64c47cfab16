"""Which routes there are, by plan; what the others answer; the headers that all answers have (F105, F107)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from runtime.plan import Plan
from runtime.server.chat.schema import ChatRequest
from runtime.server.speech.schema import SpeechRequest
from runtime.server.transcriptions.schema import TranscriptionForm
from tests.plans import sim_plan
from tests.server.serving import MODEL, served

EVERYWHERE = ["/health", "/livez", "/ready", "/startupz", "/metrics", "/version", "/v1/models", "/v1/omnictl/status"]
TASK_PATHS = {
    "chat": "/v1/chat/completions",
    "speech": "/v1/audio/speech",
    "transcription": "/v1/audio/transcriptions",
}


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/nope"), ("POST", "/v1/embeddings"), ("GET", "/docs"), ("GET", "/openapi.json")],
)
def test_an_unknown_route_lists_what_is_served(http: httpx.Client, method: str, path: str) -> None:
    reply = http.request(method, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "not_found")
    assert "POST /v1/chat/completions" in error["message"]


def test_a_wrong_method(http: httpx.Client) -> None:
    reply = http.get("/v1/chat/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert "wrong method" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", [*EVERYWHERE, "/nope", "/v1/audio/voices"])
def test_every_answer_has_a_request_id(http: httpx.Client, path: str) -> None:
    ids = {http.get(path).headers["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


@pytest.mark.parametrize("task", TASK_PATHS)
def test_a_plan_of_one_task_has_its_routes_and_the_common_ones(tmp_path: Path, task: str) -> None:
    plan = sim_plan()
    alone: Plan = plan.model_copy(update={"tasks": {task: plan.tasks[task]}})
    with served(alone, tmp_path) as server, server.http() as http:
        for path in EVERYWHERE:
            assert http.get(path).status_code == 200, path
        for other, path in TASK_PATHS.items():
            reply = http.post(path, json={})
            assert reply.status_code == (404 if other != task else 415 if task == "transcription" else 400)
            if other != task:
                expected = f"POST {path}: not served by {MODEL}, whose tasks are {task} and not {other}"
                assert expected in reply.json()["error"]["message"]
                assert f"POST {TASK_PATHS[task]}" in reply.json()["error"]["message"]


def test_models(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL]
    assert openai.models.retrieve(MODEL).owned_by == "omnictl"


@pytest.mark.parametrize("name", ["nope", "a/b", "SIM-CHAIN", " "])
def test_an_unknown_model_is_not_found_anywhere(openai: OpenAI, name: str) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    calls: list[Any] = [
        lambda: openai.models.retrieve(name),
        lambda: openai.chat.completions.create(model=name, messages=messages),
        lambda: openai.chat.completions.create(model=name, messages=messages, stream=True),
        lambda: openai.audio.speech.create(model=name, input="hi", voice="tone"),
        lambda: openai.audio.transcriptions.create(model=name, file=("a.wav", b"x")),
    ]
    for call in calls:
        with pytest.raises(NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found"
        assert f"served: {MODEL}" in str(caught.value)


def test_metrics_move(http: httpx.Client) -> None:
    """F110: the families that requests touch."""
    before = http.get("/metrics").text
    messages = [{"role": "user", "content": "hi"}]
    ask = {"model": MODEL, "messages": messages, "modalities": ["text", "audio"]}
    assert http.post("/v1/chat/completions", json=ask).status_code == 200
    after = http.get("/metrics")
    assert after.headers["content-type"].startswith("text/plain")
    changed = set(after.text.splitlines()) - set(before.splitlines())
    for name in (
        'omnictl_requests_total{task="chat"}',
        'omnictl_terminals_total{kind="done",task="chat"}',
        'omnictl_first_output_seconds_count{modality="text",task="chat"}',
        'omnictl_first_output_seconds_count{modality="audio",task="chat"}',
        'omnictl_audio_real_time_factor_count{task="chat"}',
    ):
        assert any(line.startswith(name) for line in changed), name


def test_the_page_on_the_api_names_every_route_and_field(http: httpx.Client) -> None:
    page = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    served_routes = http.get("/nope").json()["error"]["message"].partition("served: ")[2].split(", ")
    assert len(served_routes) > 10
    for route in served_routes:
        assert f"`{route.replace('{name:path}', '{id}')}`" in page, route
    for schema in (ChatRequest, SpeechRequest, TranscriptionForm):
        for field in schema.model_fields:
            assert f"`{field}" in page, field
