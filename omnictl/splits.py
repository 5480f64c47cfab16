"""A placement may cut a stage in two: one computes prompts, the other goes on from their keys and values. Pure.

Where the recipe has the stage, the placed recipe has both, joined by an edge; what came into the stage now goes into
the first half. `recipe` calls it; `graph` says what cannot be cut.
"""

from __future__ import annotations

from collections.abc import Mapping

from omnictl.recipe_schema import ArStage, Edge, Omnictl, Split, Stage
from runtime.plan import EdgeMode, PayloadKind


def cut(values: Omnictl, sources: Mapping[str, str], placement: str) -> tuple[Omnictl, dict[str, str]]:
    """The recipe with the stages cut as its placement says, and the sources of all values.

    The first half has the stage's own values, overrides included. What cannot be cut stays whole.
    """
    found = dict(sources)
    for name, split in values.placements[placement].splits.items():
        if isinstance(values.stages.get(name), ArStage) and split.prefill not in values.stages:
            found |= _sources(found, name, split.prefill, f"placement {placement}")
            values = _cut(values, name, split)
    return values, found


def _cut(values: Omnictl, name: str, split: Split) -> Omnictl:
    whole = values.stages[name]
    assert isinstance(whole, ArStage)
    first, second = (whole.engine_settings.model_copy(update={"kv_role": role}) for role in ("producer", "consumer"))
    halves = {
        split.prefill: whole.model_copy(update={"engine_settings": first, "replicas": split.replicas}),
        name: whole.model_copy(update={"engine_settings": second}),
    }
    stages: dict[str, Stage] = {}
    for other, stage in values.stages.items():
        stages |= halves if other == name else {other: stage}
    edge = Edge(source=split.prefill, target=name, payload=PayloadKind.KV_BLOCKS, mode=EdgeMode.CHUNKED)
    edges = [e.model_copy(update={"target": split.prefill}) if e.target == name else e for e in values.edges]
    tasks = {
        kind: task.model_copy(
            update={"inputs": {m: split.prefill if stage == name else stage for m, stage in task.inputs.items()}}
        )
        for kind, task in values.tasks.items()
    }
    return values.model_copy(update={"stages": stages, "edges": (*edges, edge), "tasks": tasks})


def _sources(sources: Mapping[str, str], name: str, prefill: str, placement: str) -> dict[str, str]:
    """Of the first half: those of the whole; and of what cutting it changed."""
    old, new = f"stages.{name}.", f"stages.{prefill}."
    copied = {new + path.removeprefix(old): source for path, source in sources.items() if path.startswith(old)}
    own = [new + "replicas", new + "engine_settings.kv_role", old + "engine_settings.kv_role"]
    return copied | dict.fromkeys(own, placement)
