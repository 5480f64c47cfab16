"""Engine `sim`: takes its time from the plan and makes well-formed fake payloads.

For control-plane benchmarks at thousands of requests, rehearsals of a placement, and chaos: `faults` in the
engine settings break chosen requests in chosen ways. An entry stage makes `num_outputs` outputs; a stage that
is fed by an edge makes one output for `pieces_per_output` input pieces. `batch_size` requests are worked on at a
time, the others queue: each on its own clock, or, with a `step_s`, all together in steps (`LockstepSimEngine`).
"""

from __future__ import annotations

import ctypes
import heapq
import math
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from runtime.engines.base import End, LoadContext, StageOutput, StageWork
from runtime.errors import ConfigError, InvalidRequest, StageError
from runtime.payload import Payload
from runtime.plan import REQUEST_INPUT, PayloadKind

SAMPLE_RATE_HZ = 24000


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to break: at output number `at_output` of requests whose params match every `when` (dotted names).

    actions: raise (this request), invalid (this request, 400), crash (step raises), exit, segfault, hang
    (the step never returns), slow (the step takes `seconds`), hold (the step waits until somebody opens the named
    pipe `path` for writing), stuck (this request makes nothing more, the others do), memory (this request, as if
    memory had run out).
    """

    action: str
    at_output: int = 0
    seconds: float = 1.0
    path: str = ""
    when: dict[str, Any] = {}


class SimSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    first_output_s: float = 0.01
    interval_s: float = 0.01
    num_outputs: int = 8
    pieces_per_output: int = 1
    tail_outputs: int = 0
    """Outputs that follow when the input is complete: a talker that speaks on after the last word was written."""
    batch_size: int = 1024
    step_s: float = 0.0
    step_s_per_request: float = 0.0
    prompt_tokens: int = 0
    """Of each request; a step takes in at most `step_tokens` of all requests together."""
    step_tokens: int = 8192
    prefill_s_per_token: float = 0.0
    output_bytes: int = 960
    load_s: float = 0.0
    load_silently: bool = False
    faults: list[Fault] = []


@dataclass(slots=True)
class _Job:
    work: StageWork
    pieces: int = 0
    """Input pieces with data that were fed and not yet worked on."""
    complete: bool = False
    emitted: int = 0
    due_s: float | None = None
    """When the output in the making is done; None while there is nothing to make, infinite for one that is stuck."""
    open_inputs: set[str] = field(default_factory=set)
    prompt_tokens: int = 0
    """Still to be taken in."""
    began_s: float | None = None


class SimEngine:
    """Every request on its own clock: its first output takes `first_output_s`, each further one `interval_s`."""

    def __init__(self, settings: SimSettings, name: str) -> None:
        self.settings = settings
        self.name = name
        self._waiting: OrderedDict[str, _Job] = OrderedDict()
        self._active: dict[str, _Job] = {}
        self._due: list[tuple[float, str]] = []
        self._held: frozenset[str] = frozenset()
        self._steps = 0
        self._ended: list[StageOutput] = []

    def submit(self, work: StageWork) -> None:
        self._waiting[work.request_id] = _Job(
            work, open_inputs=set(work.inputs), prompt_tokens=self.settings.prompt_tokens
        )
        self._activate()

    def feed(self, request_id: str, payload: Payload) -> None:
        job = self._job(request_id)
        if job is None:
            return
        has_data = bool(payload.meta or payload.tensors)
        if payload.edge == REQUEST_INPUT and has_data:
            job.pieces += self.settings.num_outputs * self.settings.pieces_per_output
        elif has_data:
            job.pieces += 1
        if payload.last:
            job.open_inputs.discard(payload.edge)
            if not job.open_inputs and not job.complete:
                job.complete = True
                job.pieces += self.settings.tail_outputs * self.settings.pieces_per_output
        if request_id in self._active:
            self._schedule(request_id, job)

    def consumed(self, request_id: str) -> bool:
        job = self._job(request_id)
        return job is None or not self._can_make(job)

    def hold(self, request_ids: frozenset[str]) -> None:
        freed, self._held = self._held - request_ids, request_ids
        for request_id in freed & self._active.keys():
            due_s = self._active[request_id].due_s
            if due_s is not None and math.isfinite(due_s):
                heapq.heappush(self._due, (due_s, request_id))

    def abort(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._active.pop(request_id, None)
        self._ended = [o for o in self._ended if o.request_id != request_id]
        self._activate()

    def step(self) -> list[StageOutput]:
        self._steps += 1
        outputs, self._ended = self._ended, []
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due_s, request_id = heapq.heappop(self._due)
            job = self._active.get(request_id)
            if job is None or job.due_s != due_s or request_id in self._held:
                continue  # aborted meanwhile; what is held comes back when it is not
            outputs += self._output(request_id, job)
        return outputs

    def next_step_s(self) -> float | None:
        if self._ended:
            return 0.0
        while self._due and self._is_stale(*self._due[0]):
            heapq.heappop(self._due)
        return max(0.0, self._due[0][0] - time.monotonic()) if self._due else None

    def stats(self) -> Mapping[str, float]:
        return {
            "queued": len(self._waiting),
            "running": len(self._active),
            "steps": self._steps,
        }

    def facts(self) -> Mapping[str, Any]:
        return {"simulated": True, "sample_rate_hz": SAMPLE_RATE_HZ}

    def close(self) -> None:
        self._waiting.clear()
        self._active.clear()

    def _job(self, request_id: str) -> _Job | None:
        return self._active.get(request_id) or self._waiting.get(request_id)

    def _is_stale(self, due_s: float, request_id: str) -> bool:
        job = self._active.get(request_id)
        return job is None or job.due_s != due_s or request_id in self._held

    def _can_make(self, job: _Job) -> bool:
        """Whether there is input for an output; the last one takes what is left."""
        return job.pieces >= self.settings.pieces_per_output or (job.complete and job.pieces > 0)

    def _activate(self) -> None:
        while self._waiting and len(self._active) < self.settings.batch_size:
            request_id, job = self._waiting.popitem(last=False)
            self._active[request_id] = job
            self._schedule(request_id, job)

    def _schedule(self, request_id: str, job: _Job) -> None:
        """Start the clock of the next output when there is input for it; end the request when there is none left."""
        if job.due_s is not None:
            return
        if self._can_make(job):
            job.began_s = job.began_s or time.monotonic()
            wait_s = self.settings.first_output_s if job.emitted == 0 else self.settings.interval_s
            job.due_s = time.monotonic() + wait_s
            heapq.heappush(self._due, (job.due_s, request_id))
        else:
            self._finish_if_done(request_id, job)

    def _finish_if_done(self, request_id: str, job: _Job) -> None:
        if job.complete and not job.pieces:
            usage = {"outputs": float(job.emitted)}
            if PayloadKind.TEXT in job.work.wants:
                usage |= {"prompt_tokens": 1.0, "completion_tokens": float(job.emitted)}
            if PayloadKind.MEDIA in job.work.wants:
                usage |= {"audio_s": job.emitted * (self.settings.output_bytes // 4) / SAMPLE_RATE_HZ}
            self._finish(request_id, End(usage=usage))

    def _finish(self, request_id: str, end: End) -> None:
        if (job := self._active.pop(request_id, None)) is not None:
            end.began_s = job.began_s
        self._ended.append(StageOutput(request_id, end=end))
        self._activate()

    def _output(self, request_id: str, job: _Job) -> list[StageOutput]:
        for fault in self.settings.faults:
            if fault.at_output == job.emitted and all(_lookup(job.work.params, k) == v for k, v in fault.when.items()):
                if fault.action == "stuck":
                    job.due_s = math.inf
                    return []
                end = self._break(fault)
                if end is not None:
                    self._finish(request_id, end)
                    return []
        made = [StageOutput(request_id, self._payload(kind, job)) for kind in sorted(job.work.wants)]
        job.emitted += 1
        job.pieces = max(0, job.pieces - self.settings.pieces_per_output)
        job.due_s = None
        self._schedule(request_id, job)
        return made

    def _payload(self, kind: str, job: _Job) -> Payload:
        index = job.emitted
        if kind == PayloadKind.TEXT:
            return Payload(kind, job.work.request_id, meta={"text": f"word{index} "})
        if kind == PayloadKind.MEDIA:
            tone = np.sin(np.arange(self.settings.output_bytes // 4, dtype=np.float32) * np.float32(0.1))
            meta = {"sample_rate_hz": SAMPLE_RATE_HZ}
            return Payload(kind, job.work.request_id, meta=meta, tensors={"samples": tone * np.float32(0.1)})
        data = np.full(self.settings.output_bytes, index % 256, dtype=np.uint8)
        return Payload(kind, job.work.request_id, meta={"index": index}, tensors={"data": data})

    def _break(self, fault: Fault) -> End | None:
        match fault.action:
            case "raise":
                return End(error=StageError(f"stage {self.name}: simulated failure"))
            case "invalid":
                return End(error=InvalidRequest(f"stage {self.name}: simulated invalid input"))
            case "crash":
                raise RuntimeError("simulated crash of the engine")
            case "memory":
                return End(error=StageError(f"stage {self.name}: simulated lack of memory"))
            case "exit":
                os._exit(9)
            case "segfault":
                ctypes.string_at(0)
            case "hang":
                time.sleep(3600)
            case "slow":
                time.sleep(fault.seconds)
            case "hold":
                os.close(os.open(fault.path, os.O_RDONLY))
        return None


class LockstepSimEngine(SimEngine):
    """All requests advance together, as on an accelerator: a step takes `step_s`, plus `step_s_per_request` for each
    request that makes an output in it, plus `prefill_s_per_token` for each prompt token that it takes in. The loop
    waits in `step` meanwhile, so that what it does between steps costs what it would cost a real engine.
    """

    def step(self) -> list[StageOutput]:
        self._steps += 1
        outputs, self._ended = self._ended, []
        making, num_tokens = self._plan_step()
        if making or num_tokens:
            own = self.settings
            self._take(own.step_s + own.step_s_per_request * len(making) + own.prefill_s_per_token * num_tokens)
        for request_id in making:
            outputs += self._output(request_id, self._active[request_id])
        return outputs

    def _take(self, seconds: float) -> None:
        time.sleep(seconds)

    def next_step_s(self) -> float | None:
        return 0.0 if self._ended or any(map(self._can_step, self._active)) else None

    def _can_step(self, request_id: str) -> bool:
        job = self._active[request_id]
        return request_id not in self._held and job.due_s is None and self._can_make(job)

    def _plan_step(self) -> tuple[list[str], int]:
        """Who makes an output, and how many prompt tokens are taken in; the last one of a prompt makes an output."""
        making: list[str] = []
        left = self.settings.step_tokens
        for request_id in filter(self._can_step, self._active):
            job = self._active[request_id]
            job.began_s = job.began_s or time.monotonic()
            taken = min(job.prompt_tokens, left)
            left -= taken
            job.prompt_tokens -= taken
            if not job.prompt_tokens:
                making.append(request_id)
        return making, self.settings.step_tokens - left

    def _schedule(self, request_id: str, job: _Job) -> None:
        self._finish_if_done(request_id, job)


def _lookup(params: Mapping[str, Any], dotted: str) -> Any:
    value: Any = params
    for part in dotted.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def make_engine(settings: SimSettings, name: str) -> SimEngine:
    engine = LockstepSimEngine if settings.step_s else SimEngine
    return engine(settings, name)


def load(context: LoadContext) -> SimEngine:
    try:
        settings = msgspec.convert(context.stage.engine_settings, SimSettings)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"stage {context.stage.name}: engine_settings: {exc}") from exc
    end_s = time.monotonic() + settings.load_s
    while (left_s := end_s - time.monotonic()) > 0:
        if not settings.load_silently:
            context.progress(f"loading, {left_s:.1f} s left")
        time.sleep(min(left_s, 0.5))
    return make_engine(settings, context.stage.name)
