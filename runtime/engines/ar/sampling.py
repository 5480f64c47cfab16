"""Sampling parameters of a request: checked once, here, and named in the error when they cannot be honoured.

Pure: knows the fields that clients may set and their ranges, not who samples. Used by programs; compat.py
translates the result for vLLM.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import InvalidRequest, UnsupportedValue

MIN_TEMPERATURE = 0.01
"""Below it, and above 0, probabilities overflow; vLLM would silently use this value instead."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0 is greedy. max_tokens None: up to the end of the context. seed None: a fresh one each time.

    `max_tokens` is an upper bound: a context that is full before it is reached ends the answer with reason "length".
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: type[int] | type[float]
    allows: Callable[[float], bool]
    expected: str


_PENALTY = _Rule(float, lambda v: -2 <= v <= 2, "a number from -2 to 2")

_RULES: dict[str, _Rule] = {
    "temperature": _Rule(float, lambda v: v == 0 or MIN_TEMPERATURE <= v <= 2, "0, or a number from 0.01 to 2"),
    "top_p": _Rule(float, lambda v: 0 < v <= 1, "a number above 0, at most 1"),
    "top_k": _Rule(int, lambda v: v >= -1, "a whole number, at least 1, or 0 for all tokens"),
    "min_p": _Rule(float, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "max_tokens": _Rule(int, lambda v: v >= 1, "a whole number, at least 1"),
    "seed": _Rule(int, lambda v: 0 <= v < 2**63, "a whole number from 0 to 2^63 - 1"),
    "repetition_penalty": _Rule(float, lambda v: 0 < v < float("inf"), "a number above 0"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
}


def parse_sampling(given: Mapping[str, Any], defaults: Sampling) -> Sampling:
    """`defaults` with what was given. A field that is None counts as not given.

    InvalidRequest naming the field and what it may be; UnsupportedValue for a field that does not exist here.
    """
    values = {name: _check(name, value) for name, value in given.items() if value is not None}
    return dataclasses.replace(defaults, **values)


def stage_sampling(params: Mapping[str, Any], common: Mapping[str, Any], defaults: Sampling) -> Sampling:
    """Of one stage of a request: `defaults`, over them what the request says for all stages (`common`), over that what
    it says for this one (params["stage_sampling"]). Errors as of `parse_sampling`.
    """
    sampling = parse_sampling(common, defaults)
    try:
        return parse_sampling(params.get("stage_sampling", {}), sampling)
    except InvalidRequest as exc:
        exc.message, exc.param = f"stage_params: {exc.message}", "stage_params"
        raise


def _check(name: str, value: Any) -> Any:
    if name == "stop":
        return _check_stop(value)
    if name not in _RULES:
        near = difflib.get_close_matches(name, (*_RULES, "stop"), n=1)
        raise UnsupportedValue(
            f"{name}: not a sampling parameter" + (f" (did you mean {near[0]!r}?)" if near else ""), param=name
        )
    rule = _RULES[name]
    accepted = int if rule.kind is int else int | float
    if isinstance(value, bool) or not isinstance(value, accepted) or not rule.allows(value):
        raise InvalidRequest(f"{name}: {value!r}; expected {rule.expected}", param=name)
    return rule.kind(value)


def _check_stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidRequest(f"stop: {value!r}; expected a text, or a list of texts, none of them empty", param="stop")
    return tuple(texts)
