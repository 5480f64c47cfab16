"""Every value of a plan with where it came from, as `omnictl plan --explain` shows it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runtime.plan import Plan

DEFAULT = "default"


def explain(plan: Plan) -> list[tuple[str, Any, str]]:
    """(dotted key, value, source) for each value; list items of the plan go by their names."""
    data = plan.model_dump(mode="json", exclude={"provenance", "schema_version"})
    data["stages"] = {stage.pop("name"): stage for stage in data["stages"]}
    data["processes"] = {process.pop("name"): process for process in data["processes"]}
    data["edges"] = {f"{edge['source']}->{edge['target']}": edge for edge in data["edges"]}
    return [(".".join(path), value, _source(plan, path)) for path, value in _leaves(data)]


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    else:
        yield path, value


def _source(plan: Plan, path: tuple[str, ...]) -> str:
    """The source of the value, or of the part of the plan that holds it."""
    for end in range(len(path), 0, -1):
        if (source := plan.provenance.get(".".join(path[:end]))) is not None:
            return source
    return DEFAULT
