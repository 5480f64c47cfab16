"""Requests that a deployment sends to itself before it calls itself ready: one per task and output modality,
and one per further input, through the same path as any other request.
"""

from __future__ import annotations

import io
import math
import wave
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from runtime.graph import primary_input
from runtime.payload import Payload
from runtime.plan import Modality, PayloadKind, Plan
from runtime.requests import RequestSpec

TEXT = "Hello there."
SAMPLE_RATE_HZ = 16000
MAX_TOKENS = 4
FRAME_SIDE = 64


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
    inputs = {kind: [_input(task, kind, [kind for kind in kinds if kind in FILES])] for kind in kinds}
    return RequestSpec(task=task, modalities=(modality,), inputs=inputs, params=params)


def _input(task: str, kind: Modality, media: list[Modality]) -> Payload:
    if kind in FILES:
        media_format, make = FILES[kind]
        meta = {"index": media.index(kind), "format": media_format, "modality": str(kind)}
        return Payload(PayloadKind.MEDIA, "", meta=meta, tensors={"data": np.frombuffer(make(), dtype=np.uint8)})
    if task != "chat":
        return Payload(PayloadKind.TEXT, "", meta={"text": TEXT})
    parts: list[dict[str, object]] = [{"type": "text", "text": TEXT}]
    parts += [{"type": str(medium), "index": index} for index, medium in enumerate(media)]
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


def black_frames(num_frames: int, container: str, codec: str, pixels: str) -> bytes:
    """A picture or video file of black frames, two a second."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=2, width=FRAME_SIDE, height=FRAME_SIDE)
        stream.pix_fmt = pixels
        black = np.zeros((FRAME_SIDE, FRAME_SIDE, 3), np.uint8)
        for _ in range(num_frames):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(black, format="rgb24")))
        file.mux(stream.encode(None))
    return buffer.getvalue()


FILES: dict[Modality, tuple[str, Callable[[], bytes]]] = {
    Modality.AUDIO: ("wav", tone_wav),
    Modality.IMAGE: ("png", lambda: black_frames(1, "image2pipe", "png", "rgb24")),
    Modality.VIDEO: ("mp4", lambda: black_frames(4, "mp4", "mpeg4", "yuv420p")),
}
"""Kind of input -> format and maker of the file that it is warmed with."""
