"""Engine `module`: batches across requests, fair turns, and errors that stay with the request at fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from runtime.engines.base import End, StageOutput, StageWork
from runtime.engines.module import ModuleEngine, ModuleResult
from runtime.errors import InvalidRequest, OmniError, StageError
from runtime.payload import Payload


@dataclass
class State:
    name: str
    pieces: list[str] = field(default_factory=list)
    complete: bool = False


class Echo:
    """Gives pieces back; breaks on "bad" (an error of its own), "poison" (the batch raises) and "evil" (in feed)."""

    max_batch = 3

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def open(self, work: StageWork) -> State:
        if work.params.get("voice") == "unknown":
            raise InvalidRequest("no such voice", param="voice")
        if work.params.get("voice") == "broken":
            raise KeyError("voice")
        return State(work.request_id)

    def feed(self, state: State, payload: Payload) -> None:
        text = payload.meta.get("text")
        if text == "evil":
            raise ZeroDivisionError
        state.pieces += [text] if text else []
        state.complete = state.complete or payload.last

    def ready(self, state: State) -> bool:
        return bool(state.pieces) or state.complete

    def run(self, states: Sequence[State]) -> Sequence[ModuleResult | OmniError]:
        self.batches.append([s.name for s in states])
        if any("poison" in s.pieces[:1] for s in states):
            raise RuntimeError("shapes differ")
        return [self._one(s) for s in states]

    def _one(self, state: State) -> ModuleResult | OmniError:
        if not state.pieces:
            return ModuleResult(end=End())
        if state.pieces[0] == "bad":
            return InvalidRequest("bad piece")
        return ModuleResult([Payload("text", state.name, meta={"text": state.pieces.pop(0)})])

    def facts(self) -> Mapping[str, Any]:
        return {}

    def counters(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self.batches.clear()


@pytest.fixture
def program() -> Echo:
    return Echo()


@pytest.fixture
def engine(program: Echo) -> ModuleEngine:
    return ModuleEngine(program)


def give(engine: ModuleEngine, request_id: str, *texts: str, last: bool = True, **params: Any) -> None:
    engine.submit(StageWork(request_id, 0, params, frozenset({"request"}), frozenset({"text"})))
    for text in texts:
        engine.feed(request_id, Payload("text", request_id, meta={"text": text}))
    if last:
        engine.feed(request_id, Payload("text", request_id, last=True))


def run(engine: ModuleEngine) -> dict[str, list[Any]]:
    """Step until there is nothing to do; per request its texts, then its end or error."""
    found: dict[str, list[Any]] = {}
    while engine.next_step_s() == 0:
        for output in engine.step():
            found.setdefault(output.request_id, []).append(outcome(output))
    return found


def outcome(output: StageOutput) -> Any:
    if output.payload is not None:
        return output.payload.meta["text"]
    assert output.end is not None
    return output.end.reason if output.end.error is None else type(output.end.error)


def test_requests_run_together_and_take_turns(engine: ModuleEngine, program: Echo) -> None:
    give(engine, "long", *"abcdefgh")
    for name in ("one", "two", "three"):
        give(engine, name, "x")
    found = run(engine)
    assert found["long"] == [*"abcdefgh", "stop"]
    assert found["three"] == ["x", "stop"]
    assert program.batches[0] == ["long", "one", "two"]
    assert program.batches[1][0] == "three", "who waited comes before who has just run"


def test_an_error_of_one_row_is_its_own(engine: ModuleEngine) -> None:
    give(engine, "a", "x")
    give(engine, "b", "bad")
    assert run(engine) == {"a": ["x", "stop"], "b": [InvalidRequest]}


def test_a_batch_that_raises_is_run_one_by_one(engine: ModuleEngine, program: Echo) -> None:
    """F068: the request that poisons the batch fails, its batch mates do not."""
    for name, text in (("a", "x"), ("b", "poison"), ("c", "y")):
        give(engine, name, text)
    assert run(engine) == {"a": ["x", "stop"], "b": [StageError], "c": ["y", "stop"]}
    assert program.batches[:4] == [["a", "b", "c"], ["a"], ["b"], ["c"]]


@pytest.mark.parametrize(("voice", "error"), [("unknown", InvalidRequest), ("broken", StageError)])
def test_a_request_that_cannot_be_opened(engine: ModuleEngine, voice: str, error: type) -> None:
    give(engine, "a", "x", voice=voice)
    give(engine, "b", "y")
    assert run(engine) == {"a": [error], "b": ["y", "stop"]}


def test_input_that_cannot_be_taken(engine: ModuleEngine) -> None:
    give(engine, "a", "evil", "x")
    give(engine, "b", "y")
    assert run(engine) == {"a": [StageError], "b": ["y", "stop"]}


def test_nothing_of_an_aborted_request_comes_out(engine: ModuleEngine) -> None:
    give(engine, "a", "x", voice="unknown")
    give(engine, "b", "y", last=False)
    assert not engine.consumed("b")
    engine.abort("a")
    engine.abort("b")
    engine.abort("never seen")
    assert engine.consumed("b")
    assert engine.next_step_s() is None
    assert engine.step() == []
    assert engine.stats()["running"] == engine.stats()["queued"] == 0


def test_waiting_for_input_is_not_work(engine: ModuleEngine) -> None:
    give(engine, "a", "x", last=False)
    assert run(engine) == {"a": ["x"]}
    assert engine.next_step_s() is None
    assert engine.consumed("a")
