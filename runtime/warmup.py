"""Requests that a deployment sends to itself before it calls itself ready: one per task and output modality,
and one per further input, through the same path as any other request.
"""

from __future__ import annotations

import io
import math
import wave
from array import array
from collections.abc import Iterator

import numpy as np

from runtime.graph import primary_input
from runtime.payload import Payload
from runtime.plan import Modality, PayloadKind, Plan
from runtime.requests import RequestSpec

TEXT = "Hello there."
SAMPLE_RATE_HZ = 16000
MAX_TOKENS = 4


def warm_up_requests(plan: Plan) -> Iterator[tuple[str, RequestSpec]]:
    """(what it warms, request). Every stage of every task is reached by at least one of them."""
    for task, task_plan in plan.tasks.items():
        primary = primary_input(plan, task)
        for modality in task_plan.outputs:
            yield f"{task}: {modality}", _spec(plan, task, modality, (primary,))
        for extra in task_plan.inputs:
            if extra is not primary:
                first = next(iter(task_plan.outputs))
                yield f"{task}: {extra} input", _spec(plan, task, first, (primary, extra))


def _spec(plan: Plan, task: str, modality: Modality, kinds: tuple[Modality, ...]) -> RequestSpec:
    params: dict[str, object] = {"sampling": {"max_tokens": MAX_TOKENS}}
    if plan.voices is not None:
        params["voice"] = plan.voices.default
    inputs = {kind: [_input(task, kind, with_audio=Modality.AUDIO in kinds)] for kind in kinds}
    return RequestSpec(task=task, modalities=(modality,), inputs=inputs, params=params)


def _input(task: str, kind: Modality, *, with_audio: bool) -> Payload:
    if kind is Modality.AUDIO:
        data = np.frombuffer(tone_wav(), dtype=np.uint8)
        return Payload(PayloadKind.MEDIA, "", meta={"index": 0, "format": "wav"}, tensors={"data": data})
    if task != "chat":
        return Payload(PayloadKind.TEXT, "", meta={"text": TEXT})
    parts: list[dict[str, object]] = [{"type": "text", "text": TEXT}]
    if with_audio:
        parts.append({"type": "audio", "index": 0})
    return Payload(PayloadKind.TEXT, "", meta={"messages": [{"role": "user", "content": parts}]})


def tone_wav(seconds: float = 1.0, frequency_hz: float = 220.0) -> bytes:
    """A mono 16-bit WAV file with a tone that is loud enough not to count as silence."""
    num_samples = int(seconds * SAMPLE_RATE_HZ)
    step = 2 * math.pi * frequency_hz / SAMPLE_RATE_HZ
    samples = array("h", (int(8000 * math.sin(step * i)) for i in range(num_samples)))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()
