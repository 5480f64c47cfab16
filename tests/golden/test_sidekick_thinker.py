"""The sidekick's thinker on its real weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.engines.ar.engine import load
from runtime.engines.base import LoadContext
from runtime.plan import EngineKind, MemoryBudget, StagePlan
from runtime.settings import weights_dir
from tests.golden.ar_engines import Answer, Driver, assert_nothing_left, import_vllm

pytestmark = pytest.mark.weights

CAPITAL = "What is the capital of France?"
QUESTIONS = (
    CAPITAL,
    "Why is the sky blue?",
    "Say hello in Spanish.",
    "Tell me a story about a fox and the moon.",
    "Name a planet.",
)


@pytest.fixture(scope="module")
def thinker() -> Iterator[Driver]:
    import_vllm()
    folder = weights_dir() / "sidekick/thinker"
    if not (folder / "model.safetensors").is_file():
        pytest.fail(f"{folder}: no weights; fetch them with `omnictl pull sidekick`")
    stage = StagePlan(
        name="thinker",
        engine=EngineKind.AR,
        program="sidekick.thinker",
        slots=8,
        memory=MemoryBudget(weights_bytes=1, cache_bytes=192 << 20),
        engine_settings={"dtype": "float32", "max_model_len": 2048},
        program_settings={"temperature": 0.0, "repetition_penalty": 1.1, "max_tokens": 24},
    )
    engine = load(
        LoadContext(stage=stage, devices=("cpu",), num_threads=1, weights_dir=folder, progress=lambda phase: None)
    )
    yield Driver(engine)
    assert_nothing_left(engine)
    engine.close()


@pytest.fixture(scope="module")
def alone(thinker: Driver) -> dict[str, Answer]:
    answers = {}
    for question in QUESTIONS:
        ask(thinker, question)
        answers |= thinker.drain()
    return answers


def ask(thinker: Driver, question: str) -> None:
    thinker.open(question)
    thinker.feed(question, messages=[{"role": "user", "content": question}])


def test_the_capital_of_france(alone: dict[str, Answer]) -> None:
    answer = alone[CAPITAL]
    assert "Paris" in answer.text
    assert answer.end is not None
    assert answer.end.reason == "stop"


def test_an_answer_is_the_same_in_company(thinker: Driver, alone: dict[str, Answer]) -> None:
    for number, question in enumerate(QUESTIONS):
        ask(thinker, question)
        if number % 2 == 0:
            thinker.step()
    assert {question: answer.text for question, answer in thinker.drain().items()} == {
        question: answer.text for question, answer in alone.items()
    }


def test_a_question_asked_again_starts_from_the_cache(thinker: Driver, alone: dict[str, Answer]) -> None:
    ask(thinker, QUESTIONS[3])
    answer = thinker.drain()[QUESTIONS[3]]
    assert answer.text == alone[QUESTIONS[3]].text
    assert answer.end is not None
    assert answer.end.usage["cached_tokens"] == 32
