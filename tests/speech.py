"""Runs the speech programs without a server: contexts to load them from, and requests through their engines."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile

from runtime.engines.base import End, LoadContext, StageWork
from runtime.engines.module import ModuleEngine
from runtime.payload import Payload
from runtime.plan import EngineKind, MemoryBudget, StagePlan

FloatArray = npt.NDArray[np.float32]

SENTENCES = (
    "Hello, I am your assistant.",
    "The capital of France is Paris, and it is a large city.",
    "If you want to learn more, please ask me; I am happy to help.",
    "The quick brown fox jumps over the lazy dog.",
    "My name is Alice, and I live in a small town near the sea.",
    "She sells apples, honey and cheese on Saturday mornings.",
    "Please close the window, because it is getting cold outside.",
    "We will meet Dr. Smith at the station in the morning.",
    "Speech is produced frame by frame, so that it can be streamed.",
    "Why is the sky blue? It is blue because of scattering.",
)


def load_context(stage: str, weights_dir: Path | None = None, **program_settings: Any) -> LoadContext:
    plan = StagePlan(
        name=stage,
        engine=EngineKind.MODULE,
        program=f"sidekick.{stage}",
        memory=MemoryBudget(weights_bytes=1),
        program_settings=program_settings,
    )
    return LoadContext(
        stage=plan, devices=("cpu",), num_threads=1, weights_dir=weights_dir, progress=lambda phase: None
    )


def work(request_id: str, **params: Any) -> StageWork:
    return StageWork(request_id, 0, params, frozenset({"request"}), frozenset({"text", "latents", "media"}))


def texts(*pieces: str) -> list[Payload]:
    """Text pieces of a request's input, the last one marked."""
    return [Payload("text", "", meta={"text": t}, last=i == len(pieces)) for i, t in enumerate(pieces, 1)]


@dataclass(frozen=True)
class Outcome:
    payloads: list[Payload]
    end: End

    @property
    def samples(self) -> FloatArray:
        parts = [p.tensors["samples"] for p in self.payloads]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def run_requests(
    program: Any, requests: Mapping[str, tuple[Mapping[str, Any], Sequence[Payload]]]
) -> dict[str, Outcome]:
    """Requests {id: (params, input payloads)} through one engine, all at the same time, one input piece a turn."""
    engine = ModuleEngine(program)
    waiting = {request_id: list(inputs) for request_id, (_, inputs) in requests.items()}
    payloads: dict[str, list[Payload]] = {request_id: [] for request_id in requests}
    ends: dict[str, End] = {}
    for request_id, (params, _) in requests.items():
        engine.submit(work(request_id, **params))
    while len(ends) < len(requests):
        for request_id, pieces in waiting.items():
            if pieces and request_id not in ends:
                engine.feed(request_id, pieces.pop(0))
        for output in engine.step():
            if output.payload is not None:
                payloads[output.request_id].append(output.payload)
            if output.end is not None:
                ends[output.request_id] = output.end
    return {request_id: Outcome(payloads[request_id], ends[request_id]) for request_id in requests}


def run_request(program: Any, inputs: Sequence[Payload], **params: Any) -> Outcome:
    return run_requests(program, {"only": (params, inputs)})["only"]


def hand_over(payloads: Sequence[Payload], kind: str) -> list[Payload]:
    """Outputs of a stage as the next one gets them: then an empty piece that is the last, as the stage loop sends."""
    return [*payloads, Payload(kind, "", last=True)]


def clip(
    samples: npt.NDArray[Any],
    rate_hz: int = 24_000,
    *,
    container: str = "WAV",
    index: int = 0,
    last: bool = True,
) -> Payload:
    out = io.BytesIO()
    soundfile.write(out, samples, rate_hz, format=container)
    data = np.frombuffer(out.getvalue(), np.uint8)
    return Payload("media", "", meta={"index": index, "format": container.lower()}, last=last, tensors={"data": data})


def snr_db(wanted: FloatArray, got: FloatArray) -> float:
    return float(10 * np.log10(np.sum(wanted**2) / np.sum((wanted - got) ** 2)))


class NoiseByFrame:
    """Gives the library the numbers that we draw: it asks for all frames at once, bin by bin."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def standard_normal(self, shape: tuple[int, int], dtype: type) -> FloatArray:
        num_bins, num_values = shape
        drawn = self._generator.standard_normal((num_values // 2, 2 * num_bins), dtype=dtype).view(np.complex64)
        return np.ascontiguousarray(drawn.T).view(np.float32)
