"""Engine `module`: one forward per piece. Encoders, vocoders, VAEs, policies.

The program holds the model and the per-request state; this engine decides which requests run together,
keeps a failing request from taking its batch along, and counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from runtime.engines.base import End, LoadContext, StageOutput, StageWork
from runtime.errors import InvalidRequest, OmniError, StageError
from runtime.payload import Payload
from runtime.programs import load_program

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ModuleResult:
    """What one run gave for one request: payloads in order, and the end when there is nothing more."""

    payloads: list[Payload] = field(default_factory=list)
    end: End | None = None


class ModuleProgram(Protocol):
    """Glue of a module stage. All methods are called from the stage's thread."""

    max_batch: int
    """How many requests `run` takes at once."""

    def open(self, work: StageWork) -> Any:
        """State of a new request. InvalidRequest for parameters it cannot honour."""

    def feed(self, state: Any, payload: Payload) -> None:
        """Take one input piece."""

    def ready(self, state: Any) -> bool:
        """Whether `run` would make progress on this request with what it has."""

    def run(self, states: Sequence[Any]) -> Sequence[ModuleResult | OmniError]:
        """One forward over ready requests, one result each, in order.

        Returns an error in the place of a request that is at fault; raises only when the whole batch failed, and
        then leaves the states as they were: each request is run again alone.
        """

    def facts(self) -> Mapping[str, Any]: ...

    def counters(self) -> Mapping[str, float]: ...

    def close(self) -> None: ...


@runtime_checkable
class Timed(Protocol):
    """What a program has besides, if a request can become ready by time alone."""

    def ready_in_s(self, state: Any) -> float | None:
        """When a request that is not ready will be, if nothing is fed; above 0. None: not before something is."""


class ModuleEngine:
    """Round-robin over ready requests, `max_batch` at a time, so that a long request does not hold up a short one."""

    def __init__(self, program: ModuleProgram) -> None:
        self.program = program
        self._states: dict[str, Any] = {}
        self._held: frozenset[str] = frozenset()
        self._began_s: dict[str, float] = {}
        """Request -> its first run."""
        self._failed: list[StageOutput] = []
        self._batches = 0
        self._rows = 0

    def submit(self, work: StageWork) -> None:
        try:
            self._states[work.request_id] = self.program.open(work)
        except OmniError as exc:
            self._failed.append(StageOutput(work.request_id, end=End(error=exc)))
        except Exception:
            log.exception("program failed to open %s", work.request_id)
            error = StageError("the stage could not take the request; see the stage's log")
            self._failed.append(StageOutput(work.request_id, end=End(error=error)))

    def feed(self, request_id: str, payload: Payload) -> None:
        if request_id not in self._states:
            return
        try:
            self.program.feed(self._states[request_id], payload)
        except OmniError as exc:
            self._fail(request_id, exc)
        except Exception:
            log.exception("program failed to take a piece of %s", request_id)
            self._fail(request_id, StageError("the stage could not take its input; see the stage's log"))

    def consumed(self, request_id: str) -> bool:
        state = self._states.get(request_id)
        return state is None or not self.program.ready(state)

    def hold(self, request_ids: frozenset[str]) -> None:
        self._held = request_ids

    def abort(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        self._began_s.pop(request_id, None)
        self._failed = [o for o in self._failed if o.request_id != request_id]

    def step(self) -> list[StageOutput]:
        outputs, self._failed = self._failed, []
        ready = [r for r in self._states if self._can_run(r)][: self.program.max_batch]
        if not ready:
            return outputs
        for request_id in ready:
            self._began_s.setdefault(request_id, time.monotonic())
        for request_id, result in zip(ready, self._run(ready), strict=True):
            state = self._states.pop(request_id)
            end = End(error=result) if isinstance(result, OmniError) else result.end
            if isinstance(result, ModuleResult):
                outputs += [StageOutput(request_id, payload=p) for p in result.payloads]
            if end is not None:
                end.began_s = self._began_s.pop(request_id)
                outputs.append(StageOutput(request_id, end=end))
            else:
                self._states[request_id] = state  # to the back of the line
        return outputs

    def next_step_s(self) -> float | None:
        if self._failed or any(map(self._can_run, self._states)):
            return 0.0
        if not isinstance(self.program, Timed):
            return None
        waits = [self.program.ready_in_s(state) for r, state in self._states.items() if r not in self._held]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def _can_run(self, request_id: str) -> bool:
        return request_id not in self._held and self.program.ready(self._states[request_id])

    def stats(self) -> Mapping[str, float]:
        running = sum(self.program.ready(s) for s in self._states.values())
        return {
            "queued": len(self._states) - running,
            "running": running,
            "batches": self._batches,
            "batch_rows": self._rows,
            **self.program.counters(),
        }

    def facts(self) -> Mapping[str, Any]:
        return {"max_batch": self.program.max_batch, **self.program.facts()}

    def close(self) -> None:
        self._states.clear()
        self.program.close()

    def _fail(self, request_id: str, error: OmniError) -> None:
        self._states.pop(request_id, None)
        self._began_s.pop(request_id, None)
        self._failed.append(StageOutput(request_id, end=End(error=error)))

    def _run(self, ready: list[str]) -> Sequence[ModuleResult | OmniError]:
        """A batch that raises is run again one by one: only the request at fault fails."""
        self._batches += 1
        self._rows += len(ready)
        states = [self._states[r] for r in ready]
        try:
            return self.program.run(states)
        except Exception as exc:
            log.exception("batch of %d failed", len(ready))
            if len(ready) == 1:
                return [self._as_error(exc)]
        return [self._run_one(state) for state in states]

    def _run_one(self, state: Any) -> ModuleResult | OmniError:
        try:
            return self.program.run([state])[0]
        except Exception as exc:
            log.exception("request failed")
            return self._as_error(exc)

    @staticmethod
    def _as_error(exc: Exception) -> OmniError:
        if isinstance(exc, InvalidRequest | StageError):
            return exc
        return StageError(f"the stage raised {type(exc).__name__}; see the stage's log")


def load(context: LoadContext) -> ModuleEngine:
    return ModuleEngine(load_program(context))
