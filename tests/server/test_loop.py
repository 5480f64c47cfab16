"""The event loop stays free while large clips come in and long ones are encoded (F133)."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.plans import sim_plan
from tests.server.listening import RATE_HZ
from tests.server.serving import MODEL, Served, served

PIECE_S, NUM_PIECES = 40, 2
MAX_LAG_S = 0.4
"""Generous, for machines with much else to do; encoding one piece on the loop would hold it for longer."""
ASK: dict[str, Any] = {"model": MODEL, "modalities": ["text", "audio"], "audio": {"format": "mp3"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Answers with a minute of audio."""
    stages = {"wave": {"output_bytes": PIECE_S * RATE_HZ * 4}, "think": {"num_outputs": NUM_PIECES - 1}}
    with served(sim_plan(stages=stages), tmp_path_factory.mktemp("loop")) as one:
        yield one


async def longest_lag_s(stop: threading.Event) -> float:
    """How late the worst of many short timers was."""
    loop, worst_s = asyncio.get_running_loop(), 0.0
    while not stop.is_set():
        due_s = loop.time() + 0.005
        await asyncio.sleep(0.005)
        worst_s = max(worst_s, loop.time() - due_s)
    return worst_s


@pytest.mark.parametrize("stream", [False, True])
def test_large_clips_and_long_answers_leave_the_loop_free(server: Served, stream: bool) -> None:
    clip = {"data": base64.b64encode(b"x" * 15_000_000).decode(), "format": "wav"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "input_audio", "input_audio": clip}]}
    ]
    body = json.dumps({**ASK, "messages": messages, "stream": stream}).encode()
    stop = threading.Event()
    lag = asyncio.run_coroutine_threadsafe(longest_lag_s(stop), server.loop)
    with server.http(headers={"content-type": "application/json"}) as http:
        reply = http.post("/v1/chat/completions", content=body)
    stop.set()
    assert reply.status_code == 200
    assert reply.elapsed.total_seconds() > 2 * MAX_LAG_S, "there was work enough to tell"
    assert lag.result(10) < MAX_LAG_S
