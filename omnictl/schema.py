"""Walking a schema of pydantic models along a dotted path, and saying what is wrong with data in our words.

Generic: knows models, not recipes. Used to apply overrides to raw data before it is validated.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue, ValidationError

Path = tuple[str, ...]
TAG = "engine"
"""The key that tells the models of a union apart."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or the list of what is known when nothing is near."""
    names = sorted(known)
    if near := difflib.get_close_matches(name, names, n=1):
        return f" (did you mean {near[0]!r}?)"
    return f"; known: {', '.join(names)}" if names else ""


def dotted(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


class Node:
    """A place in the schema: the type there, with the raw data found there (None when unset)."""

    def __init__(self, annotation: Any, data: Any) -> None:
        self.data = data
        self.annotation = _select(annotation, data)

    @property
    def keys(self) -> Collection[str] | None:
        """Keys that may be set here; None for any key. Empty for a plain value."""
        if _is_model(self.annotation):
            return list(self.annotation.model_fields)
        if get_origin(self.annotation) is dict:
            return None if self._is_open else list(self.data or {})
        if get_origin(self.annotation) is tuple:
            return [str(index) for index in range(len(self.data or ()))]
        return list(self.data) if isinstance(self.data, Mapping) else []

    @property
    def is_typed(self) -> bool:
        """False where anything goes (a program's own settings): data is then the only declaration there is."""
        return self.annotation not in (Any, JsonValue)

    def no_effect(self, key: str) -> str | None:
        """Why a key that is none of `keys` is refused, where the model says it."""
        reason = getattr(self.annotation, "SET_ELSEWHERE", {}).get(key)
        return reason and f"has no effect here: {reason}"

    def child(self, key: str) -> Node:
        """The place below `key`, which must be one of `keys`."""
        if _is_model(self.annotation):
            return Node(self.annotation.model_fields[key].annotation, _get(self.data, key))
        if get_origin(self.annotation) is dict:
            return Node(get_args(self.annotation)[1], _get(self.data, key))
        if get_origin(self.annotation) is tuple:
            return Node(get_args(self.annotation)[0], self.data[int(key)])
        return Node(Any, _get(self.data, key))

    @property
    def _is_open(self) -> bool:
        """Mappings from names to text (aliases, environment) take new names; sections and settings do not."""
        return _strip(get_args(self.annotation)[1]) is str


def validate(model: type[BaseModel], data: Any) -> tuple[BaseModel | None, list[tuple[Path, str]]]:
    """Validate raw data as strict JSON: the model, or all problems with their paths."""
    try:
        text = json.dumps(data, allow_nan=False)
    except (ValueError, RecursionError) as error:
        return None, [((), f"cannot be used: {error}")]
    try:
        return model.model_validate_json(text, strict=True), []
    except ValidationError as error:
        items = [dict(item) for item in error.errors(include_url=False)]
    return None, [_describe(model, data, item) for item in items if not _is_consequence(item, items)]


def _is_consequence(error: dict[str, Any], errors: list[dict[str, Any]]) -> bool:
    """A list counts as too short when its items are at fault: only the items are worth a word."""
    loc = error["loc"]
    return error["type"] == "too_short" and any(
        len(e["loc"]) > len(loc) and e["loc"][: len(loc)] == loc for e in errors
    )


def _describe(model: type[BaseModel], data: Any, error: dict[str, Any]) -> tuple[Path, str]:
    path, parent = _follow(model, data, error["loc"])
    value, kind = error["input"], error["type"]
    if kind == "extra_forbidden":
        return path, parent.no_effect(path[-1]) or "unknown key" + nearest(path[-1], parent.keys or ())
    if kind == "missing":
        return path, "missing"
    if kind == "union_tag_not_found":
        return (*path, TAG), "missing"
    if kind == "union_tag_invalid":
        tags = error["ctx"]["expected_tags"].replace("'", "").split(", ")
        return (*path, TAG), f"unknown value {error['ctx']['tag']!r}" + nearest(error["ctx"]["tag"], tags)
    if kind in ("literal_error", "enum"):
        return path, _wrong_choice(value, error["ctx"]["expected"])
    text = error["msg"].removeprefix("Value error, ")
    return path, f"{text[0].lower()}{text[1:]}, found {_shown(value)}"


def _wrong_choice(value: Any, expected: str) -> str:
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    if isinstance(value, str):
        return f"unknown value {value!r}" + nearest(value, choices)
    return f"expected one of {', '.join(choices)}, found {_shown(value)}"


def _follow(model: type[BaseModel], data: Any, loc: tuple[str | int, ...]) -> tuple[Path, Node]:
    """pydantic's location without the tags of unions, and the node that holds its last key."""
    path: list[str] = []
    parent = node = Node(model, data)
    for part in map(str, loc):
        if part == "[key]":
            break
        if part in _tags(node) and part not in (node.keys or ()):
            continue
        path.append(part)
        parent = node
        known = node.keys
        node = node.child(part) if known is None or part in known else Node(Any, None)
    return tuple(path), parent


def _tags(node: Node) -> tuple[str, ...]:
    if not _is_model(node.annotation) or TAG not in node.annotation.model_fields:
        return ()
    return get_args(node.annotation.model_fields[TAG].annotation)


def _select(annotation: Any, data: Any) -> Any:
    """The plain type: without Annotated and None, and of a union of models the one that its tag names."""
    plain = _strip(annotation)
    if get_origin(plain) not in (Union, UnionType):
        return plain
    options = [option for option in map(_strip, get_args(plain)) if option is not type(None)]
    if len(options) == 1:
        return options[0]
    tag = _get(data, TAG)
    for option in options:
        if _is_model(option) and tag in get_args(option.model_fields[TAG].annotation):
            return option
    return Any


def _strip(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _get(data: Any, key: str) -> Any:
    return data.get(key) if isinstance(data, Mapping) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
