"""What the tests of Qwen3-Omni's stages share: contexts, engines on the tiny checkpoint and a driver of one stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime.engines.ar.engine import ArEngine
from runtime.engines.base import End, Engine, LoadContext, StageWork
from runtime.payload import Payload, Tensor
from runtime.plan import REQUEST_INPUT, EngineKind, MemoryBudget, StagePlan
from tests.golden.ar_engines import BLOCK_SIZE, import_vllm
from tests.golden.omni_reference import OPTIONS, Medium, file_of, media_of, messages_of

CONTEXT_TOKENS = 512


def context(folder: Path, stage: str, *, family: str = "qwen3_omni", **program_settings: Any) -> LoadContext:
    plan = StagePlan(
        name=stage,
        engine=EngineKind.AR if stage in ("thinker", "talker") else EngineKind.MODULE,
        program=f"{family}.{stage}",
        weights="tiny",
        memory=MemoryBudget(weights_bytes=0),
        program_settings=program_settings,
    )
    return LoadContext(plan, ("cpu",), 1, folder, lambda phase: None)


def make_omni_engine(
    folder: Path, program: Any, bytes_per_token: int, *, num_blocks: int = 128, role: Any = None, **arguments: Any
) -> ArEngine:
    import_vllm()
    from runtime.engines.ar.compat import Core

    core = Core(
        {
            "model": str(folder),
            "dtype": "float32",
            "max_model_len": CONTEXT_TOKENS,
            "max_num_seqs": 8,
            "block_size": BLOCK_SIZE,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": num_blocks * BLOCK_SIZE * bytes_per_token,
            **arguments,
            **program.arguments(),
        },
        num_threads=1,
        role=role,
    )
    return ArEngine(core, program)


def wav_file() -> Tensor:
    """The reference's clip: uint8 [n]."""
    return file_of(Medium("audio", "noise"))[1]


def media_payloads(name: str) -> list[Payload]:
    """The files of one of the reference's prompts."""
    payloads = []
    for index, medium in enumerate(media_of(name)):
        media_format, data = file_of(medium)
        meta = {"index": index, "format": media_format, "modality": medium.modality}
        payloads.append(Payload("media", "", meta=meta, tensors={"data": data}))
    return payloads


@dataclass
class Stream:
    """What came out of a stage for one request."""

    payloads: list[Payload] = field(default_factory=list)
    end: End | None = None

    def joined(self, tensor: str, axis: int = 0) -> Tensor:
        return np.concatenate([p.tensors[tensor] for p in self.payloads if tensor in p.tensors], axis)

    @property
    def text(self) -> str:
        return "".join(p.meta.get("text", "") for p in self.payloads)


class StageDriver:
    """Does to an engine what the stage loop does, and checks that nothing follows an end."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.streams: dict[str, Stream] = {}

    def open(self, request_id: str, *wants: str, inputs: frozenset[str], **params: Any) -> None:
        self.engine.submit(StageWork(request_id, 0, params, inputs, frozenset(wants)))

    def ask(self, request_id: str, name: str, *wants: str, **sampling: Any) -> None:
        """A thinker's request with one of the reference's prompts."""
        self.ask_with(request_id, name, media_payloads(name), *wants, **sampling)

    def ask_with(self, request_id: str, name: str, media: list[Payload], *wants: str, **sampling: Any) -> None:
        """The same with other files."""
        options = {"mm_processor_kwargs": OPTIONS.get(name, {})}
        self.open(request_id, *wants, inputs=frozenset({REQUEST_INPUT}), sampling=sampling, **options)
        for payload in media:
            self.feed(request_id, REQUEST_INPUT, "media", payload.meta, payload.tensors)
        self.feed(request_id, REQUEST_INPUT, "text", {"messages": messages_of(name)}, last=True)

    def feed(
        self,
        request_id: str,
        edge: str,
        kind: str,
        meta: dict[str, Any] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        last: bool = False,
    ) -> None:
        piece = Payload(kind, request_id, edge=edge, last=last, meta=meta or {}, tensors=dict(tensors or {}))
        self.engine.feed(request_id, piece)

    def step(self) -> None:
        for output in self.engine.step():
            stream = self.streams.setdefault(output.request_id, Stream())
            assert stream.end is None, f"{output.request_id}: output after its end"
            if output.payload is not None:
                stream.payloads.append(output.payload)
            stream.end = output.end

    def drain(self, max_steps: int = 3000) -> dict[str, Stream]:
        for _ in range(max_steps):
            if self.engine.next_step_s() is None:
                streams, self.streams = self.streams, {}
                return streams
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.engine.stats()}")
