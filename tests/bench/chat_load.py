"""A closed-loop load of streamed chat requests on any OpenAI-compatible server, and what its client sees."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

TIMEOUT_S = 300


@dataclass
class Timing:
    """One request; seconds since it was sent. audio_s: seconds of speech that came."""

    text: str = ""
    first_text_s: float = 0.0
    last_text_s: float = 0.0
    first_audio_s: float = 0.0
    last_audio_s: float = 0.0
    audio_s: float = 0.0
    end_s: float = 0.0


@dataclass
class Load:
    """What one batch of requests at one concurrency gave."""

    timings: list[Timing] = field(default_factory=list)
    wall_s: float = 0.0

    def median(self, name: str) -> float:
        return median(getattr(timing, name) for timing in self.timings)


async def request(client: httpx.AsyncClient, body: dict[str, Any]) -> Timing:
    timing, began_s = Timing(), time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = time.perf_counter() - began_s
            for choice in json.loads(line[6:])["choices"]:
                _take(timing, choice["delta"], now_s)
    timing.end_s = time.perf_counter() - began_s
    return timing


def _take(timing: Timing, delta: dict[str, Any], now_s: float) -> None:
    if text := delta.get("content"):
        timing.first_text_s = timing.first_text_s or now_s
        timing.last_text_s = now_s
        timing.text += text
    if data := (delta.get("audio") or {}).get("data"):
        timing.first_audio_s = timing.first_audio_s or now_s
        timing.last_audio_s = now_s
        timing.audio_s += len(base64.b64decode(data)) / 2 / 24000


async def load(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> Load:
    """Send all bodies, `concurrency` at a time."""
    result, waiting = Load(), list(reversed(bodies))
    began_s = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:

        async def client_loop() -> None:
            while waiting:
                result.timings.append(await request(client, waiting.pop()))

        await asyncio.gather(*(client_loop() for _ in range(concurrency)))
    result.wall_s = time.perf_counter() - began_s
    return result
