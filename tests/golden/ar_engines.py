"""What the tests of the `ar` engine share: engines on tiny checkpoints, a program of bare token ids, and a driver."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.engines.ar.engine import ArEngine
from runtime.engines.ar.environment import prepare_process
from runtime.engines.ar.program import Generated, Prompt
from runtime.engines.ar.sampling import Sampling, parse_sampling
from runtime.engines.base import End, StageWork
from runtime.payload import Payload
from runtime.plan import REQUEST_INPUT

BLOCK_SIZE = 32
KV_BYTES_PER_TOKEN = 4 * 2 * 32 * 4
"""Of the random checkpoint: layers x (key, value) x head size x float32."""
LATER_INPUT = "ear->thinker"


def import_vllm() -> None:
    """Once, before a test needs it: what vllm and torch warn of while they are imported is not ours to mend."""
    prepare_process()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("runtime.engines.ar.compat")


class TokenProgram:
    """Prompts and outputs are token ids. `faults`: method name -> request id for which it raises."""

    def __init__(self, faults: Mapping[str, str] | None = None) -> None:
        self.faults = dict(faults or {})

    def arguments(self) -> Mapping[str, Any]:
        return {}

    def open(self, work: StageWork) -> dict[str, Any]:
        sampling = parse_sampling(work.params.get("sampling", {}), Sampling(temperature=0.0, max_tokens=16))
        return {"id": work.request_id, "sampling": sampling, "ids": []}

    def feed(self, state: dict[str, Any], payload: Payload) -> None:
        self._break("feed", state)
        state["ids"] += payload.meta.get("ids", [])

    def prompt(self, state: dict[str, Any], tokenizer: Any) -> Prompt:
        self._break("prompt", state)
        return Prompt(state["ids"], state["sampling"])

    def num_tokens_by_part(self, state: dict[str, Any], tokenizer: Any) -> Mapping[str, int]:
        return {"ids": len(state["ids"])}

    def payloads(self, state: dict[str, Any], generated: Generated) -> list[Payload]:
        self._break("payloads", state)
        meta = {"text": generated.text, "ids": list(generated.token_ids), "seed": generated.seed}
        return [Payload("text", state["id"], meta=meta)]

    def facts(self) -> Mapping[str, Any]:
        return {"program": "tokens"}

    def close(self) -> None:
        self.faults.clear()

    def _break(self, method: str, state: dict[str, Any]) -> None:
        if self.faults.get(method) == state["id"]:
            raise RuntimeError(f"{method} is broken")


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    deltas: list[str] = field(default_factory=list)
    seeds: set[int | None] = field(default_factory=set)
    end: End | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)


class Driver:
    """Does to an engine what the stage loop does, and checks that nothing follows an end."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}

    def open(self, request_id: str, *inputs: str, **sampling: Any) -> None:
        names = frozenset(inputs or (REQUEST_INPUT,))
        self.engine.submit(StageWork(request_id, 0, {"sampling": sampling}, names, frozenset({"text"})))

    def feed(self, request_id: str, *, edge: str = REQUEST_INPUT, last: bool = True, **meta: Any) -> None:
        self.engine.feed(request_id, Payload("text", request_id, edge=edge, last=last, meta=meta))

    def ask(self, request_id: str, ids: Sequence[int], **sampling: Any) -> None:
        self.open(request_id, **sampling)
        self.feed(request_id, ids=list(ids))

    def step(self) -> None:
        for output in self.engine.step():
            answer = self.answers.setdefault(output.request_id, Answer())
            assert answer.end is None, f"{output.request_id}: output after its end"
            if output.payload is not None:
                answer.ids += output.payload.meta.get("ids", [])
                answer.deltas.append(output.payload.meta["text"])
                answer.seeds.add(output.payload.meta.get("seed"))
            answer.end = output.end

    def drain(self, max_steps: int = 2000) -> dict[str, Answer]:
        for _ in range(max_steps):
            if self.engine.next_step_s() is None:
                answers, self.answers = self.answers, {}
                return answers
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.engine.stats()}")

    def answer(self, ids: Sequence[int], **sampling: Any) -> Answer:
        self.ask("alone", ids, **sampling)
        return self.drain()["alone"]


def make_engine(
    folder: Path, program: Any = None, *, num_blocks: int = 128, role: Any = None, **arguments: Any
) -> ArEngine:
    import_vllm()
    from runtime.engines.ar.compat import Core

    core = Core(
        {
            "model": str(folder),
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "block_size": BLOCK_SIZE,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "kv_cache_memory_bytes": num_blocks * BLOCK_SIZE * KV_BYTES_PER_TOKEN,
            **arguments,
        },
        num_threads=1,
        role=role,
    )
    return ArEngine(core, program or TokenProgram())


def assert_nothing_left(engine: ArEngine) -> None:
    """No request in our engine, in vLLM's front, scheduler, cache or model runner."""
    core = engine.core
    assert engine.next_step_s() is None
    assert engine.stats()["queued"] == engine.stats()["running"] == 0
    assert not core._engine.output_processor.request_states
    assert not core._engine.output_processor.external_req_ids
    assert not core._scheduler.requests
    assert core._scheduler.get_kv_cache_usage() == 0.0
    runner = core._core.model_executor.driver_worker.worker.model_runner
    assert not runner.requests
    assert not runner.input_batch.req_ids
