"""The event loop stays free while large clips come in and long ones are encoded (F133)."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy import PATIENCE_S
from tests.plans import sim_plan
from tests.server.listening import RATE_HZ
from tests.server.serving import MODEL, Served, served

PIECE_S, NUM_PIECES = 40, 2
ASK: dict[str, Any] = {"model": MODEL, "modalities": ["text", "audio"], "audio": {"format": "mp3"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Answers with a minute of audio."""
    stages = {"wave": {"output_bytes": PIECE_S * RATE_HZ * 4}, "think": {"num_outputs": NUM_PIECES - 1}}
    with served(sim_plan(stages=stages), tmp_path_factory.mktemp("loop")) as one:
        yield one


async def longest_turn_s(stop: threading.Event) -> float:
    """Processor time of the loop's thread between two of many short timers: how long work held it, at most.

    Unlike the wall clock it does not count what other processes do meanwhile.
    """
    before_s = longest_s = 0.0
    while not stop.is_set():
        before_s = time.thread_time()
        await asyncio.sleep(0.005)
        longest_s = max(longest_s, time.thread_time() - before_s)
    return longest_s


@pytest.mark.parametrize("stream", [False, True])
def test_large_clips_and_long_answers_leave_the_loop_free(server: Served, stream: bool) -> None:
    clip = {"data": base64.b64encode(b"x" * 15_000_000).decode(), "format": "wav"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "input_audio", "input_audio": clip}]}
    ]
    body = json.dumps({**ASK, "messages": messages, "stream": stream}).encode()
    stop = threading.Event()
    turn = asyncio.run_coroutine_threadsafe(longest_turn_s(stop), server.loop)
    began_s = time.process_time()
    with server.http(headers={"content-type": "application/json"}) as http:
        reply = http.post("/v1/chat/completions", content=body)
    work_s = time.process_time() - began_s
    stop.set()
    assert reply.status_code == 200
    assert turn.result(PATIENCE_S) < work_s / NUM_PIECES / 4, "encoding one piece on the loop would hold it for longer"
