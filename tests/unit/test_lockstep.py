"""The `sim` engine in lockstep, and the ideal run that is made of it: what steps take, on a clock of their own."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engines.base import StageWork
from runtime.engines.sim import LockstepSimEngine, SimEngine, SimSettings, make_engine
from runtime.payload import Payload
from runtime.plan import EdgeMode
from tests.bench.ideal import IdealRun, TimedEngine
from tests.plans import sim_plan


def engine(**settings: Any) -> TimedEngine:
    return TimedEngine(SimSettings(**settings), "s")


def ask(engine: SimEngine, request_id: str, edge: str = "request", *, last: bool = True) -> None:
    if engine._job(request_id) is None:
        engine.submit(StageWork(request_id, 0, {}, frozenset({edge}), frozenset({"text"})))
    engine.feed(request_id, Payload("text", request_id, edge=edge, last=last, meta={"text": "x"}))


def steps(engine: TimedEngine) -> list[tuple[float, int]]:
    """(seconds, outputs) of each step that took time."""
    taken = []
    while engine.next_step_s() is not None:
        outputs = [output for output in engine.step() if output.payload is not None]
        if engine.step_took_s:
            taken.append((round(engine.step_took_s, 6), len(outputs)))
    return taken


def test_a_step_takes_longer_with_more_requests() -> None:
    one = engine(step_s=1.0, step_s_per_request=0.1, num_outputs=2)
    ask(one, "a")
    ask(one, "b")
    assert steps(one) == [(1.2, 2), (1.2, 2)]
    ask(one, "c")
    assert steps(one) == [(1.1, 1), (1.1, 1)]


def test_prompts_are_taken_in_up_to_a_number_of_tokens_a_step() -> None:
    one = engine(step_s=1.0, num_outputs=2, prompt_tokens=30, step_tokens=40, prefill_s_per_token=0.01)
    ask(one, "a")
    ask(one, "b")
    assert steps(one) == [(1.4, 1), (1.2, 2), (1.0, 1)], "the last token of a prompt makes its first output"


def test_pieces_are_joined_and_what_follows_the_last_one_needs_none() -> None:
    joined = engine(step_s=1.0, pieces_per_output=3)
    for number in range(5):
        ask(joined, "a", "from", last=number == 4)
    assert steps(joined) == [(1.0, 1), (1.0, 1)], "three pieces, and the two that were left"
    speaker = engine(step_s=1.0, tail_outputs=4)
    ask(speaker, "a", "from", last=False)
    assert steps(speaker) == [(1.0, 1)]
    ask(speaker, "a", "from")
    assert steps(speaker) == [(1.0, 1)] * 5


def test_the_settings_choose_the_clock() -> None:
    assert isinstance(make_engine(SimSettings(step_s=0.1), "s"), LockstepSimEngine)
    assert not isinstance(make_engine(SimSettings(), "s"), LockstepSimEngine)


@pytest.mark.parametrize(
    ("mode", "expected_s"),
    [
        (EdgeMode.CHUNKED, 10 + 2 + 1),
        (EdgeMode.WHOLE, 10 + 5 * 2 + 5 * 1),
    ],
)
def test_an_ideal_run_is_the_critical_path(mode: EdgeMode, expected_s: float) -> None:
    """Five outputs of 2 s; then 2 s for each in the talker, 1 s in the vocoder: chunked, only the last ones count."""
    stages: dict[str, dict[str, Any]] = {
        "think": {"step_s": 2.0, "num_outputs": 5},
        "talk": {"step_s": 2.0},
        "wave": {"step_s": 1.0},
    }
    plan = sim_plan(mode=mode, stages=stages)
    assert IdealRun(plan, 1).makespan_s() == pytest.approx(expected_s)
    assert IdealRun(plan, 3).makespan_s() == pytest.approx(expected_s), "all three in the same steps"


def test_replicas_share_the_requests() -> None:
    stages: dict[str, dict[str, Any]] = {
        "think": {"step_s": 0.1, "step_s_per_request": 1.0, "num_outputs": 2},
        "talk": {"step_s": 0.1},
        "wave": {"step_s": 0.1},
    }
    one = sim_plan(stages=stages)
    two = sim_plan(stages=stages, processes=(("ear",), ("think",), ("think.1",), ("talk", "wave")))
    assert IdealRun(one, 4).makespan_s() == pytest.approx(2 * 4.1 + 0.2)
    assert IdealRun(two, 4).makespan_s() == pytest.approx(2 * 2.1 + 0.2)
