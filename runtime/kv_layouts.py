"""Whether the halves of a split stage fit together: what the replicas at both ends of an edge of KV blocks said of
their caches. Pure; the deployment asks when all replicas are ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.errors import ConfigError
from runtime.plan import PayloadKind, Plan
from runtime.pool import Pools

FACT = "kv_layout"


def check_kv_layouts(plan: Plan, pools: Pools) -> None:
    """ConfigError, with both values of everything that differs."""
    problems = [
        f"edge {edge.name}: {what}"
        for edge in plan.edges
        if edge.payload is PayloadKind.KV_BLOCKS
        for source in pools[edge.source].replicas
        for target in pools[edge.target].replicas
        for what in _differences(source.facts.get(FACT, {}), target.facts.get(FACT, {}))
    ]
    if problems:
        raise ConfigError(
            f"the halves of a split stage differ: {problems[0]}",
            hint="give both stages the same weights and engine_settings",
            problems=tuple(dict.fromkeys(problems)),
        )


def _differences(source: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted({*source, *target}):
        if source.get(name) != target.get(name):
            yield f"{name} is {source.get(name)} where prompts are computed and {target.get(name)} where they are used"
