"""A server that is not ready yet, one that cannot become ready, and one that lost a stage (F107, F108, F109)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import InternalServerError

from tests.deploy import hold_restart
from tests.plans import sim_plan
from tests.server.serving import MODEL, Served, served

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
SPOKEN: dict[str, Any] = {**CHAT, "modalities": ["text", "audio"]}


def check_unavailable(reply: httpx.Response, phase: str) -> None:
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["phase"] == phase
    assert {row["stage"] for row in reply.json()["stages"]} == {"ear", "think", "talk", "wave"}


def test_a_server_listens_while_it_loads(tmp_path: Path) -> None:
    plan = sim_plan(stages={"talk": {"load_s": 600.0}})
    with served(plan, tmp_path, wait=False) as server, server.http() as http:
        for path in (
            "/health",
            "/livez",
            "/v1/models",
            "/metrics",
            "/version",
            "/v1/omnictl/status",
            "/v1/audio/voices",
        ):
            assert http.get(path).status_code == 200, path
        check_unavailable(http.get("/startupz"), "starting")
        check_unavailable(http.get("/ready"), "starting")
        refused = http.post("/v1/chat/completions", json=CHAT)
        check_unavailable(refused, "starting")
        assert refused.json()["error"]["code"] == "unavailable"
        assert http.post("/v1/chat/completions", json={**CHAT, "stream": True}).status_code == 503
        assert http.post("/v1/audio/speech", json={"model": MODEL, "input": "x"}).status_code == 503
        assert http.post("/v1/chat/completions", json={**CHAT, "n": 2}).status_code == 400
        server.until(lambda: "loading" in reason_of(server, "talk"))
        assert "loading" in next(r["reason"] for r in http.get("/startupz").json()["stages"] if r["stage"] == "talk")


def reason_of(server: Served, stage: str) -> str:
    return next(str(row["reason"]) for row in server.deployment.status()["stages"] if row["stage"] == stage)


def test_a_start_that_fails_is_said(tmp_path: Path) -> None:
    plan = sim_plan(stages={"wave": {"faults": [{"action": "raise"}]}})
    with served(plan, tmp_path, wait=False) as server, server.http() as http:
        server.until(lambda: server.deployment.phase == "failed")
        assert http.get("/livez").status_code == 200
        for path in ("/startupz", "/ready"):
            check_unavailable(http.get(path), "failed")
            assert "simulated failure" in http.get(path).json()["failure"]["message"]
        check_unavailable(http.post("/v1/chat/completions", json=CHAT), "failed")


def pid_of(server: Served, stage: str) -> int:
    return next(int(row["pid"]) for row in server.deployment.status()["stages"] if row["stage"] == stage)


def test_text_works_while_the_voice_is_dead(tmp_path: Path) -> None:
    """Must-show 4 and 6: the request that was bound there ends with one error, /ready says which modalities are
    out, text goes on, and the voice comes back."""
    stuck = {"action": "stuck", "at_output": 1, "when": {"seed": 1}}
    with (
        served(sim_plan(stages={"wave": {"faults": [stuck]}}), tmp_path) as server,
        server.http() as http,
        server.openai() as openai,
    ):
        chunks = openai.chat.completions.create(**SPOKEN, stream=True, seed=1)
        next(chunks)
        release = hold_restart(tmp_path)
        os.kill(pid_of(server, "wave"), signal.SIGKILL)
        with pytest.raises(Exception, match="stage (talk|wave) .* went away: killed by signal 9"):
            list(chunks)
        server.until(lambda: server.deployment.status()["phase"] == "degraded")
        ready = http.get("/ready")
        assert (ready.status_code, ready.json()["phase"]) == (503, "degraded")
        tasks = ready.json()["tasks"]
        assert tasks["chat"]["text"] == {"ready": True, "reason": ""}
        assert tasks["chat"]["audio"]["ready"] is tasks["speech"]["audio"]["ready"] is False
        assert "stage talk is down" in tasks["speech"]["audio"]["reason"]
        assert http.get("/ready?modality=text").status_code == http.get("/startupz").status_code == 200
        assert http.get("/ready?task=speech").status_code == http.get("/ready?modality=audio").status_code == 503
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
        with pytest.raises(InternalServerError) as caught:
            openai.chat.completions.create(**SPOKEN)
        assert caught.value.status_code == 503
        release()
        server.until(lambda: server.deployment.status()["phase"] == "ready")
        assert http.get("/ready").status_code == http.get("/startupz").status_code == 200
        assert openai.chat.completions.create(**SPOKEN).choices[0].message.audio is not None


def test_probes_of_what_is_not_there(tmp_path: Path) -> None:
    with served(sim_plan(), tmp_path, wait=False) as server, server.http() as http:
        for query, param, text in (
            ("task=paint", "task", "no task 'paint' here; served: chat (text, audio)"),
            ("modality=smell", "modality", "no modality 'smell' here; served: chat (text, audio)"),
            ("task=speech&modality=text", "modality", "no task 'speech' with modality 'text' here"),
        ):
            reply = http.get(f"/ready?{query}")
            assert reply.status_code == 400
            assert reply.json()["error"]["param"] == param
            assert reply.json()["error"]["message"].startswith(text)
