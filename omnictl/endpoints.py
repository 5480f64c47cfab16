"""What a ready deployment offers: its endpoints, and a request to copy."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from omnictl import settings
from omnictl.state import Deployment

PATHS = {
    "chat": "/v1/chat/completions",
    "speech": "/v1/audio/speech",
    "transcription": "/v1/audio/transcriptions",
}
"""Task -> path, the task that makes the best first request first."""


def endpoints(deployment: Deployment, tasks: Iterable[str]) -> dict[str, str]:
    """Task -> URL."""
    wanted = set(tasks)
    return {task: deployment.url + path for task, path in PATHS.items() if task in wanted}


def example_request(deployment: Deployment, tasks: Iterable[str]) -> str | None:
    """A curl command for the first task; None when there is no task that we know a request for."""
    for task, url in endpoints(deployment, tasks).items():
        words = ["curl", url, *_key_header(deployment), *_arguments(task, deployment.model_names[0])]
        return " ".join(words)
    return None


def _key_header(deployment: Deployment) -> list[str]:
    """Where the key is, not the key: the line is meant to be copied, and may be logged."""
    if deployment.api_keys_sha256 is None:
        return []
    key = f"${settings.API_KEY_VARIABLE}"
    if deployment.api_key_file is not None:
        key = f"$(grep -m 1 . {shlex.quote(deployment.api_key_file)})"
    return ["-H", f'"Authorization: Bearer {key}"']


def _arguments(task: str, model: str) -> list[str]:
    if task == "transcription":
        return ["-F", f"model={model}", "-F", "file=@speech.wav"]
    question = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    bodies = {"chat": question, "speech": {"model": model, "input": "Hello from your own machine."}}
    output = ["-o", "speech.mp3"] if task == "speech" else []
    return ["-H", "'Content-Type: application/json'", "-d", shlex.quote(json.dumps(bodies[task])), *output]
