"""Engine `ar` against transformers: greedy token ids are equal, whatever else happens in the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.engines.ar.engine import ArEngine
from runtime.errors import InvalidRequest, StageError
from tests.golden.ar_engines import (
    BLOCK_SIZE,
    LATER_INPUT,
    Driver,
    TokenProgram,
    assert_nothing_left,
    make_engine,
)
from tests.golden.tiny_llama import END_TOKEN, NUM_BYTES, byte_tokenizer, save_random, save_reciter

NUM_NEW = 24
LENGTHS = (1, 3, 31, 32, 33, 70, 100, 129)
CHUNK_TOKENS = 48
SPOKEN = "Zoë: 😀!"


def prompt_of(length: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return torch.randint(0, NUM_BYTES, (length,), generator=generator).tolist()


PROMPTS = {f"p{length}": prompt_of(length) for length in LENGTHS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    save_random(folder)
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    """ids, new tokens -> what transformers generates greedily."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()

    def generate(ids: list[int], max_new_tokens: int = NUM_NEW, **settings: Any) -> list[int]:
        inputs = torch.tensor([ids])
        output = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, do_sample=False, **settings
        )
        return output[0, len(ids) :].tolist()

    return generate


@pytest.fixture(scope="module")
def expected(reference: Any) -> dict[str, list[int]]:
    return {name: reference(ids) for name, ids in PROMPTS.items()}


@pytest.fixture(scope="module")
def roomy_engine(checkpoint: Path) -> Iterator[ArEngine]:
    engine = make_engine(checkpoint)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tight_engine(checkpoint: Path) -> Iterator[ArEngine]:
    """Prompts are prefilled in chunks, and the KV cache holds less than its four requests need."""
    engine = make_engine(checkpoint, num_blocks=14, max_num_batched_tokens=CHUNK_TOKENS, max_num_seqs=4)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reciter_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArEngine]:
    folder = tmp_path_factory.mktemp("reciter")
    save_reciter(folder, SPOKEN)
    engine = make_engine(folder)
    yield engine
    engine.close()


@pytest.fixture
def roomy(roomy_engine: ArEngine) -> Iterator[Driver]:
    yield from _driver(roomy_engine)


@pytest.fixture
def tight(tight_engine: ArEngine) -> Iterator[Driver]:
    yield from _driver(tight_engine)


@pytest.fixture
def reciter(reciter_engine: ArEngine) -> Iterator[Driver]:
    yield from _driver(reciter_engine)


def _driver(engine: ArEngine) -> Iterator[Driver]:
    engine.core._scheduler.reset_prefix_cache()
    yield Driver(engine)
    assert_nothing_left(engine)


def test_the_reference_is_worth_comparing_with(expected: dict[str, list[int]]) -> None:
    assert len({tuple(ids) for ids in expected.values()}) == len(expected)
    assert all(len(ids) == NUM_NEW for ids in expected.values())
    assert len({token for ids in expected.values() for token in ids}) > 60


@pytest.mark.parametrize("name", PROMPTS)
def test_alone(roomy: Driver, expected: dict[str, list[int]], name: str) -> None:
    answer = roomy.answer(PROMPTS[name], max_tokens=NUM_NEW)
    assert answer.ids == expected[name]
    assert answer.end is not None
    assert answer.end.reason == "length"
    assert answer.end.usage == {
        "prompt_tokens": len(PROMPTS[name]),
        "completion_tokens": NUM_NEW,
        "cached_tokens": 0,
    }


def test_in_a_batch_of_eight_prefilled_in_one_step(roomy: Driver, expected: dict[str, list[int]]) -> None:
    for name, ids in PROMPTS.items():
        roomy.ask(name, ids, max_tokens=NUM_NEW)
    roomy.step()
    assert set(roomy.answers) == set(PROMPTS), "eight requests that came together were not prefilled together"
    assert roomy.engine.stats()["running"] == 8
    answers = roomy.drain()
    assert {name: answer.ids for name, answer in answers.items()} == expected


def test_requests_join_and_leave_a_running_batch(roomy: Driver, expected: dict[str, list[int]]) -> None:
    for number, (name, ids) in enumerate(PROMPTS.items()):
        roomy.ask(name, ids, max_tokens=8 + number)
        roomy.step()
    answers = roomy.drain()
    for number, name in enumerate(PROMPTS):
        assert answers[name].ids == expected[name][: 8 + number]


def test_who_is_held_makes_nothing_and_goes_on_later(roomy: Driver, expected: dict[str, list[int]]) -> None:
    """In the batch, and in vLLM's queue."""
    engine = roomy.engine
    for name in ("p33", "p70"):
        roomy.ask(name, PROMPTS[name], max_tokens=NUM_NEW)
    for _ in range(3):
        roomy.step()
    roomy.ask("p3", PROMPTS["p3"], max_tokens=NUM_NEW)
    engine.hold(frozenset({"p33", "p3", "unknown"}))
    num_before = len(roomy.answers["p33"].ids)
    while engine.next_step_s() is not None:
        roomy.step()
    assert roomy.answers["p70"].ids == expected["p70"]
    assert len(roomy.answers["p33"].ids) == num_before
    assert "p3" not in roomy.answers
    engine.hold(frozenset())
    answers = roomy.drain()
    assert {name: answers[name].ids for name in ("p33", "p3")} == {name: expected[name] for name in ("p33", "p3")}
    ends = [answers[name].end for name in ("p33", "p70", "p3")]
    began_s = [end.began_s for end in ends if end is not None and end.began_s is not None]
    assert len(began_s) == 3
    assert began_s == sorted(began_s), "the engine says when it first worked on each"


def test_aborted_neighbours_in_every_state(roomy: Driver, expected: dict[str, list[int]]) -> None:
    engine = roomy.engine
    roomy.ask("kept", PROMPTS["p33"], max_tokens=NUM_NEW)
    roomy.open("waiting for input", LATER_INPUT)
    roomy.feed("waiting for input", edge=LATER_INPUT, last=False, ids=[1, 2])
    roomy.ask("running", PROMPTS["p70"], max_tokens=NUM_NEW)
    for _ in range(4):
        roomy.step()
    roomy.ask("not started", PROMPTS["p3"], max_tokens=NUM_NEW)
    roomy.open("refused", temperature=9)
    assert engine.stats()["running"] == 2
    assert engine.stats()["queued"] == 2
    for name in ("waiting for input", "running", "not started", "refused", "unknown"):
        engine.abort(name)
    assert engine.stats()["queued"] == 0
    answers = roomy.drain()
    assert answers.pop("running").end is None
    assert set(answers) == {"kept"}
    assert answers["kept"].ids == expected["p33"]


def test_abort_of_what_waits_inside_vllm(tight: Driver, expected: dict[str, list[int]]) -> None:
    for name in list(PROMPTS)[:6]:
        tight.ask(name, PROMPTS[name], max_tokens=NUM_NEW)
    tight.step()
    running, waiting = tight.engine.core.counts
    assert waiting >= 2
    for name in list(PROMPTS)[3:6]:
        tight.engine.abort(name)
    answers = tight.drain()
    for name in list(PROMPTS)[:3]:
        assert answers[name].ids == expected[name]


def test_an_aborted_id_can_be_used_again(roomy: Driver, expected: dict[str, list[int]]) -> None:
    roomy.ask("again", PROMPTS["p70"], max_tokens=NUM_NEW)
    roomy.step()
    roomy.engine.abort("again")
    roomy.answers.clear()
    roomy.ask("again", PROMPTS["p31"], max_tokens=NUM_NEW)
    assert roomy.drain()["again"].ids == expected["p31"]


def test_half_of_many_requests_aborted_at_random(tight: Driver, expected: dict[str, list[int]]) -> None:
    chance = random.Random(0)
    doomed = [f"{name} {number}" for number in range(3) for name in PROMPTS if chance.random() < 0.5]
    for number in range(3):
        for name, ids in PROMPTS.items():
            tight.ask(f"{name} {number}", ids, max_tokens=NUM_NEW)
    while doomed:
        for _ in range(chance.randrange(4)):
            tight.step()
        tight.engine.abort(doomed[0])
        tight.answers.pop(doomed.pop(0), None)
    answers = tight.drain()
    assert len(answers) > len(PROMPTS)
    for request, answer in answers.items():
        assert answer.ids == expected[request.split()[0]], request


def test_chunked_prefill(tight: Driver, expected: dict[str, list[int]]) -> None:
    tight.ask("long", PROMPTS["p129"], max_tokens=NUM_NEW)
    for _ in range(129 // CHUNK_TOKENS):
        tight.step()
        assert not tight.answers, "the prompt was prefilled at once"
    tight.step()
    assert len(tight.answers["long"].ids) == 1
    assert tight.drain()["long"].ids == expected["p129"]


def test_preemption(tight: Driver, reference: Any) -> None:
    prompts = {f"r{salt}": prompt_of(80 + salt, salt) for salt in range(1, 5)}
    before = tight.engine.stats()["preemptions"]
    for name, ids in prompts.items():
        tight.ask(name, ids, max_tokens=80)
    answers = tight.drain()
    assert tight.engine.stats()["preemptions"] > before
    for name, ids in prompts.items():
        assert answers[name].ids == reference(ids, 80)
        assert answers[name].end is not None
        assert answers[name].end.usage["completion_tokens"] == 80


def test_prefix_cache_hit(roomy: Driver, expected: dict[str, list[int]]) -> None:
    before = roomy.engine.stats()["cached_tokens"]
    first = roomy.answer(PROMPTS["p100"], max_tokens=NUM_NEW)
    second = roomy.answer(PROMPTS["p100"], max_tokens=NUM_NEW)
    other = roomy.answer(PROMPTS["p100"][:70] + PROMPTS["p33"], max_tokens=1)
    assert first.ids == second.ids == expected["p100"]
    cached = [answer.end.usage["cached_tokens"] for answer in (first, second, other) if answer.end]
    assert cached == [0, 3 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert roomy.engine.stats()["cached_tokens"] - before == sum(cached)


def test_repetition_penalty(roomy: Driver, reference: Any) -> None:
    ids = PROMPTS["p33"]
    assert roomy.answer(ids, max_tokens=NUM_NEW, repetition_penalty=1.8).ids == reference(ids, repetition_penalty=1.8)


def test_no_temperature_and_a_single_candidate_are_the_same(roomy: Driver, expected: dict[str, list[int]]) -> None:
    assert roomy.answer(PROMPTS["p31"], max_tokens=NUM_NEW, temperature=1.0, top_k=1).ids == expected["p31"]
    assert roomy.answer(PROMPTS["p31"], max_tokens=NUM_NEW, temperature=1.0, min_p=1.0).ids == expected["p31"]


def test_seeded_sampling_is_the_same_alone_and_in_company(roomy: Driver) -> None:
    sampled = {"max_tokens": NUM_NEW, "temperature": 1.5}
    alone = roomy.answer(PROMPTS["p70"], seed=7, **sampled)
    roomy.ask("seed 7", PROMPTS["p70"], seed=7, **sampled)
    roomy.ask("seed 8", PROMPTS["p70"], seed=8, **sampled)
    for name in ("p1", "p3", "p31"):
        roomy.ask(name, PROMPTS[name], **sampled)
        roomy.step()
    answers = roomy.drain()
    assert answers["seed 7"].ids == alone.ids
    assert answers["seed 8"].ids != alone.ids
    assert alone.seeds == {7}


def test_unseeded_sampling_is_fresh_and_can_be_replayed(roomy: Driver) -> None:
    sampled = {"max_tokens": NUM_NEW, "temperature": 1.5}
    answers = [roomy.answer(PROMPTS["p70"], **sampled) for _ in range(3)]
    assert len({tuple(answer.ids) for answer in answers}) == 3
    (seed,) = answers[1].seeds
    assert roomy.answer(PROMPTS["p70"], seed=seed, **sampled).ids == answers[1].ids


def test_characters_of_several_tokens_come_whole(reciter: Driver) -> None:
    answer = reciter.answer([ord("?")], max_tokens=64)
    assert answer.text == SPOKEN
    assert answer.deltas[-3:] == ["😀", "!", ""]
    assert all("\N{REPLACEMENT CHARACTER}" not in delta for delta in answer.deltas)
    assert byte_tokenizer().decode(answer.ids, skip_special_tokens=True) == answer.text
    assert answer.end is not None
    assert answer.end.reason == "stop"
    assert answer.ids[-1] == END_TOKEN
    assert answer.end.usage["completion_tokens"] == len(SPOKEN.encode()) + 1


def test_a_character_cut_off_by_the_length_is_left_out(reciter: Driver) -> None:
    answer = reciter.answer([ord("?")], max_tokens=len("Zoë: ".encode()) + 2)
    assert answer.text == "Zoë: "
    assert answer.end is not None
    assert answer.end.reason == "length"


def test_stop_text(reciter: Driver) -> None:
    answer = reciter.answer([ord("?")], max_tokens=64, stop=["never", "ë:"])
    assert answer.text == "Zo"
    assert answer.end is not None
    assert answer.end.reason == "stop"
    assert answer.end.usage["completion_tokens"] == len("Zoë:".encode())


def test_a_full_context_ends_an_answer_with_reason_length(roomy: Driver) -> None:
    answer = roomy.answer(prompt_of(250), max_tokens=1000)
    assert answer.end is not None
    assert answer.end.reason == "length"
    assert 250 + len(answer.ids) == 256


def test_a_prompt_that_leaves_room_for_one_token(roomy: Driver) -> None:
    answer = roomy.answer(prompt_of(255))
    assert answer.end is not None
    assert (answer.end.reason, len(answer.ids)) == ("length", 1)


def test_a_prompt_that_is_too_long_is_refused_with_its_parts(roomy: Driver, expected: dict[str, list[int]]) -> None:
    roomy.ask("long", prompt_of(256))
    roomy.ask("short", PROMPTS["p3"], max_tokens=NUM_NEW)
    answers = roomy.drain()
    error = answers["long"].end.error if answers["long"].end else None
    assert isinstance(error, InvalidRequest)
    assert "256 tokens" in error.message
    assert "limit is 255" in error.message
    assert error.problems == ("ids: 256 tokens", "chat template: 0 tokens")
    assert answers["short"].ids == expected["p3"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [([], "cannot be empty"), ([5, 10_000], "10000"), ([-1], "-1")],
    ids=["empty", "big", "negative"],
)
def test_what_vllm_refuses_fails_only_that_request(
    roomy: Driver, expected: dict[str, list[int]], ids: list[int], message: str
) -> None:
    roomy.ask("bad", ids)
    roomy.ask("good", PROMPTS["p3"], max_tokens=NUM_NEW)
    answers = roomy.drain()
    error = answers["bad"].end.error if answers["bad"].end else None
    assert isinstance(error, InvalidRequest)
    assert message in error.message
    assert answers["good"].ids == expected["p3"]


def test_bad_parameters_fail_only_that_request(roomy: Driver, expected: dict[str, list[int]]) -> None:
    roomy.ask("bad", PROMPTS["p3"], top_p=0)
    roomy.ask("good", PROMPTS["p3"], max_tokens=NUM_NEW)
    answers = roomy.drain()
    error = answers["bad"].end.error if answers["bad"].end else None
    assert isinstance(error, InvalidRequest)
    assert error.param == "top_p"
    assert answers["good"].ids == expected["p3"]


@pytest.mark.parametrize("method", ["feed", "prompt", "payloads"])
def test_a_fault_of_the_program_fails_only_that_request(
    roomy: Driver, expected: dict[str, list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roomy.engine, "program", TokenProgram({method: "bad"}))
    roomy.ask("bad", PROMPTS["p3"])
    roomy.ask("good", PROMPTS["p3"], max_tokens=NUM_NEW)
    answers = roomy.drain()
    error = answers["bad"].end.error if answers["bad"].end else None
    assert isinstance(error, StageError)
    assert "broken" not in error.message, "what went wrong inside is for the log"
    assert answers["good"].ids == expected["p3"]


def test_inputs_come_in_pieces_and_in_any_order(roomy: Driver, expected: dict[str, list[int]]) -> None:
    ids = PROMPTS["p70"]
    roomy.open("two inputs", "request", LATER_INPUT, max_tokens=NUM_NEW)
    roomy.feed("two inputs", ids=ids[:30])
    assert roomy.engine.next_step_s() is None
    roomy.feed("two inputs", edge=LATER_INPUT, last=False, ids=ids[30:50])
    roomy.feed("two inputs", edge=LATER_INPUT, ids=ids[50:])
    assert roomy.engine.next_step_s() == 0.0
    assert roomy.drain()["two inputs"].ids == expected["p70"]


def test_counters_add_up(roomy: Driver) -> None:
    before = dict(roomy.engine.stats())
    roomy.ask("a", PROMPTS["p3"], max_tokens=5)
    roomy.ask("b", PROMPTS["p33"], max_tokens=7)
    roomy.drain()
    grown = {name: value - before[name] for name, value in roomy.engine.stats().items()}
    assert grown["prompt_tokens"] == 36
    assert grown["generated_tokens"] == 12
    assert grown["steps"] >= 7
