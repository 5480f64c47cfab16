"""Overrides: values that are laid over a recipe's raw data before it is validated, each with its source.

They come, weakest first, from a recipe's placement, the user file, the environment and `--set`; all go through
`apply`. An override may change or unset what exists or what the schema knows, and may not invent names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omnictl.schema import Node, Path, dotted, nearest
from omnictl.yaml_file import parse_value
from runtime.errors import ConfigError

COMMAND_LINE = "--set"
SECTION = "omnictl"
ROOTS = ("meta", "model", SECTION)
"""A path that starts otherwise is below `omnictl`."""


@dataclass(frozen=True, slots=True)
class Override:
    """A value of None unsets the key."""

    path: Path
    value: Any
    source: str


def short(path: Path) -> str:
    """A path as people write it: what is below `omnictl` without that prefix."""
    return dotted(path[1:] if path[0] == SECTION and len(path) > 1 else path)


def full(path: Path) -> Path:
    return path if path[0] in ROOTS else (SECTION, *path)


def parse_override(text: str, source: str) -> Override:
    """`a.b=c`, the value written as in YAML. `null` or nothing unsets the key, so that its default holds."""
    key, separator, value = text.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        raise ConfigError(f"{source} {text!r}: expected KEY=VALUE, such as stages.thinker.slots=4")
    try:
        return Override(full(path), parse_value(value), source)
    except ConfigError as error:
        raise ConfigError(f"{source} {dotted(path)}: {error.message}") from None


def flatten(values: Mapping[str, Any], source: str, prefix: Path = ()) -> Iterator[Override]:
    """Overrides from nested mappings, one a leaf; a list is a leaf. Keys may be dotted paths themselves."""
    for key, value in values.items():
        path = (*prefix, *key.split("."))
        if isinstance(value, Mapping) and value:
            yield from flatten(value, source, path)
        else:
            yield Override(full(path), value, source)


def apply(model: Any, data: dict[str, Any], overrides: Iterable[Override]) -> tuple[dict[Path, Override], list[str]]:
    """Change `data` in place, later overrides winning. Returns what was applied by path, and all problems."""
    applied: dict[Path, Override] = {}
    problems = []
    for override in overrides:
        problem = _apply_one(Node(model, data), data, override)
        if problem is not None:
            problems.append(f"{override.source} {short(override.path)}: {problem}")
            continue
        covered = [path for path in applied if path[: len(override.path)] == override.path]
        for path in covered:
            del applied[path]
        applied[override.path] = override
    return applied, problems


def _apply_one(node: Node, data: Any, override: Override) -> str | None:
    """Set or unset one value; returns the problem instead, with nothing changed, when the path leads nowhere."""
    *parents, last = override.path
    for depth, key in enumerate(override.path):
        if node.keys is not None and key not in node.keys:
            known = [*node.keys, *(ROOTS if depth == 1 else ())]
            return node.no_effect(key) or f"unknown key {key!r}{nearest(key, known)}"
        if depth < len(parents):
            node = node.child(key)
    if (problem := _wrong_type(node, last, override.value)) is not None:
        return problem
    for key in parents:
        data = _enter(data, key)
    if isinstance(data, list):
        data[int(last)] = override.value
    elif override.value is None:
        data.pop(last, None)
    else:
        data[last] = override.value
    return None


def _wrong_type(node: Node, key: str, value: Any) -> str | None:
    """Where the schema leaves a value open, the recipe's own value says which type it has."""
    current = node.child(key)
    if current.is_typed or value is None or current.data is None or _kind(value) == _kind(current.data):
        return None
    return f"expected {_kind(current.data)} such as {current.data!r}, found {value!r}"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    return {int: "a number", float: "a number", str: "text", list: "a list"}.get(type(value), "a mapping")


def _enter(data: Any, key: str) -> Any:
    if isinstance(data, list):
        return data[int(key)]
    if data.get(key) is None:
        data[key] = {}
    return data[key]
