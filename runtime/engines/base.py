"""The engine interface: a step machine that batches across requests inside `step`.

The stage loop (runtime/stage.py) owns an engine and calls it from one thread: drain the inbox, step,
emit. An engine never waits, never talks to a socket and never knows which stages are its neighbours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from runtime.errors import ConfigError, OmniError
from runtime.payload import Payload
from runtime.plan import StagePlan


@dataclass(slots=True)
class StageWork:
    """A request as one stage sees it.

    inputs: names of what will be fed ("request" or edge names); each of them ends with one `last` piece.
    wants: payload kinds that somebody downstream takes, so that an engine can skip making the others.
    """

    request_id: str
    epoch: int
    params: dict[str, Any]
    inputs: frozenset[str]
    wants: frozenset[str]


@dataclass(slots=True)
class End:
    """How a request ended at a stage: reason "stop" or "length", or an error.

    began_s: when the engine first worked on it (time.monotonic), if it knows.
    """

    reason: str = "stop"
    usage: dict[str, float] = field(default_factory=dict)
    error: OmniError | None = None
    began_s: float | None = field(default=None, compare=False)


@dataclass(slots=True)
class StageOutput:
    """A payload of a request, its end at this stage, or both (the payload first)."""

    request_id: str
    payload: Payload | None = None
    end: End | None = None


class Engine(Protocol):
    """Everything keyed by request id: a request's outputs never depend on its company in the batch."""

    def submit(self, work: StageWork) -> None:
        """Take a request; its data may come later through `feed`."""

    def feed(self, request_id: str, payload: Payload) -> None:
        """Data for a submitted request; `payload.edge` says which input, `payload.last` that it is complete.

        The payload belongs to the engine: its memory stays valid as long as it is referenced.
        """

    def consumed(self, request_id: str) -> bool:
        """Whether what was fed so far has been worked on: then its producer gets its credit back.

        True for a request that waits for more input. This is what slows a producer down to its consumer.
        """

    def hold(self, request_ids: frozenset[str]) -> None:
        """Make no output of these requests before the next call of `hold`: what they made has no room where it goes.

        Replaces the requests named before; unknown ids are fine. Everybody else's work goes on.
        """

    def abort(self, request_id: str) -> None:
        """Forget a request, in whatever state; nothing of it may be emitted afterwards. Unknown ids are fine."""

    def step(self) -> list[StageOutput]:
        """One iteration over everything that can run now. Errors of one request become its End."""

    def next_step_s(self) -> float | None:
        """Seconds until `step` is worth calling: 0 now, None not before something is fed."""

    def stats(self) -> Mapping[str, float]:
        """queued, running and the engine's own counters (monotonic, named as in the metrics)."""

    def facts(self) -> Mapping[str, Any]:
        """What `Ready` tells the world, stated once."""

    def close(self) -> None:
        """Free everything. Called once, last."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a factory gets. `progress(phase)` tells the supervisor that loading goes on."""

    stage: StagePlan
    devices: tuple[str, ...]
    num_threads: int
    weights_dir: Path | None
    progress: Callable[[str], None]


ENGINES: dict[str, str] = {
    "ar": "runtime.engines.ar.engine:load",
    "module": "runtime.engines.module:load",
    "sim": "runtime.engines.sim:load",
}


def resolve(target: str) -> Callable[..., Any]:
    """Import "package.module:name"."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def load_engine(context: LoadContext) -> Engine:
    """Build the engine of a stage. ConfigError for an engine that this build does not have."""
    kind = str(context.stage.engine)
    if kind not in ENGINES:
        raise ConfigError(
            f"stage {context.stage.name}: engine {kind!r} is not available; known: {', '.join(sorted(ENGINES))}"
        )
    engine: Engine = resolve(ENGINES[kind])(context)
    return engine
