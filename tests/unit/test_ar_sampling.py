"""Sampling parameters: every field is honoured or refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from runtime.engines.ar.sampling import Sampling, parse_sampling, stage_sampling
from runtime.errors import InvalidRequest, UnsupportedValue

DEFAULTS = Sampling(temperature=0.0, repetition_penalty=1.1, max_tokens=256)

GOOD: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.0, 0.01, 1, 2.0),
    "top_p": (0.01, 1),
    "top_k": (-1, 0, 1, 50),
    "min_p": (0, 0.5, 1),
    "max_tokens": (1, 100_000),
    "stop": ("end", ["a", "b"], []),
    "seed": (0, 2**63 - 1),
    "repetition_penalty": (0.5, 1, 2.0),
    "presence_penalty": (-2, 2.0),
    "frequency_penalty": (-2.0, 2),
}
BAD: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 0.001, 2.1, float("nan"), float("inf"), "1", True, [1]),
    "top_p": (0, 1.01, -1, float("nan"), "0.5"),
    "top_k": (-2, 1.5, "5", True),
    "min_p": (-0.1, 1.1),
    "max_tokens": (0, -1, 1.0, "9", True),
    "stop": ("", [""], ["a", ""], 5, [5], {"a": 1}),
    "seed": (-1, 2**63, 1.5, "7"),
    "repetition_penalty": (0, -1, float("inf"), float("nan")),
    "presence_penalty": (-2.1, 2.1),
    "frequency_penalty": (-2.1, 2.1),
}


def test_every_field_is_covered_here() -> None:
    fields = {field.name for field in dataclasses.fields(Sampling)}
    assert set(GOOD) == set(BAD) == fields


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GOOD.items() for value in values])
def test_what_a_client_sets_wins(name: str, value: Any) -> None:
    found = getattr(parse_sampling({name: value}, DEFAULTS), name)
    assert found == (tuple([value] if isinstance(value, str) else value) if name == "stop" else value)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name}: .*expected ") as caught:
        parse_sampling({name: value}, DEFAULTS)
    assert caught.value.param == name


def test_what_is_left_out_or_null_stays_as_the_default() -> None:
    assert parse_sampling({}, DEFAULTS) == DEFAULTS
    assert parse_sampling(dict.fromkeys(GOOD), DEFAULTS) == DEFAULTS


def test_numbers_become_what_the_sampler_computes_with() -> None:
    assert type(parse_sampling({"temperature": 1}, DEFAULTS).temperature) is float


def test_an_unknown_field_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnsupportedValue, match=r"temprature: .*did you mean 'temperature'\?") as caught:
        parse_sampling({"temprature": 1.0}, DEFAULTS)
    assert caught.value.param == "temprature"
    with pytest.raises(UnsupportedValue, match="^best_of: not a sampling parameter$"):
        parse_sampling({"best_of": 2}, DEFAULTS)


def test_what_is_said_for_one_stage_goes_over_what_is_said_for_all() -> None:
    own = {"temperature": 0.5, "seed": 3}
    found = stage_sampling({"stage_sampling": own}, {"temperature": 1.0, "top_k": 5}, DEFAULTS)
    assert found == dataclasses.replace(DEFAULTS, temperature=0.5, seed=3, top_k=5)
    assert stage_sampling({}, {"top_k": 5}, DEFAULTS) == dataclasses.replace(DEFAULTS, top_k=5)


def test_a_bad_value_for_one_stage_is_refused_as_such() -> None:
    with pytest.raises(InvalidRequest, match=r"^stage_params: temperature: 0\.001; expected") as caught:
        stage_sampling({"stage_sampling": {"temperature": 0.001}}, {}, DEFAULTS)
    assert caught.value.param == "stage_params"
