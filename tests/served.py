"""A recipe brought up by the command as a user brings it up, and asked by the official SDK."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import OpenAI

START_TIMEOUT_S = 300


class Served:
    """A deployment in folders of its own. `omnictl` runs the command with them."""

    def __init__(self, folder: Path, recipe: str, *options: str) -> None:
        self.environment = os.environ | {"OMNICTL_STATE_DIR": str(folder / "state")}
        shown = json.loads(self.omnictl("up", recipe, "-d", "--json", *options, timeout_s=START_TIMEOUT_S))
        (plan_file,) = (folder / "state").rglob("plan.json")
        self.folder = plan_file.parent
        self.url: str = shown["url"]
        self.client = OpenAI(base_url=f"{self.url}/v1", api_key="none", _strict_response_validation=True, max_retries=0)

    def omnictl(self, *arguments: str, timeout_s: float = 100) -> str:
        command = [sys.executable, "-P", "-m", "omnictl", *arguments]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stderr}\n{done.stdout}"
        return done.stdout

    def stages(self) -> dict[str, dict[str, Any]]:
        status = httpx.get(f"{self.url}/v1/omnictl/status", timeout=60).json()
        return {row["stage"]: row for row in status["stages"]}

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def until_ready(self, timeout_s: float = 300) -> None:
        deadline_s = time.monotonic() + timeout_s
        while (answer := httpx.get(f"{self.url}/ready", timeout=60)).status_code != 200:
            assert time.monotonic() < deadline_s, answer.text
            time.sleep(0.1)

    def down(self) -> None:
        self.omnictl("down", "--all")


@dataclass
class Answer:
    """A streamed chat answer, with when its pieces came (seconds since the request)."""

    text: str = ""
    pcm: bytes = b""
    text_s: list[float] = field(default_factory=list)
    audio_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def samples(self) -> Any:
        return np.frombuffer(self.pcm, dtype="<i2").astype(np.float32) / 32768


def ask(client: OpenAI, model: str, content: Any, modalities: list[str], **options: Any) -> Answer:
    """One streamed chat request through the SDK."""
    if "audio" in modalities:
        options["audio"] = {"voice": "default", "format": "pcm16"}
    answer, began_s = Answer(), time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content}],
        modalities=modalities,
        stream=True,
        **options,
    )
    for chunk in stream:
        now_s = time.monotonic() - began_s
        for choice in chunk.choices:
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            if choice.delta.content:
                answer.text += choice.delta.content
                answer.text_s.append(now_s)
            audio = choice.delta.audio
            if audio is not None and audio.data:
                answer.pcm += base64.b64decode(audio.data)
                answer.audio_s.append(now_s)
    return answer
