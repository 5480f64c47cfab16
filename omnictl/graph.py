"""Whether the parts of a recipe fit together: edges make a directed acyclic graph, tasks enter and leave it where
there is a way, names mean something. Knows no hardware; `placement` and `recipes validate` call it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from omnictl.recipe import Recipe
from omnictl.recipe_schema import ArStage, Edge, Model, Omnictl, Task
from omnictl.schema import nearest
from runtime.plan import Modality, PayloadKind


def find_problems(recipe: Recipe) -> list[str]:
    """Every inconsistency, each naming its key, in whichever placement it shows."""
    problems: dict[str, None] = {}
    for name, placed in recipe.placed.items():
        values = placed.values
        problems |= dict.fromkeys(
            [
                *_edge_problems(values),
                *_cycle_problems(values),
                *_task_problems(values),
                *_weights_problems(values),
                *_voice_problems(values),
                *_ar_problems(values, recipe.model),
                *_split_problems(values, name),
                *_half_problems(values),
                *_process_problems(values, name),
            ]
        )
    return list(problems)


def _edge_problems(values: Omnictl) -> Iterator[str]:
    seen = set()
    for index, edge in enumerate(values.edges):
        for end in (edge.source, edge.target):
            if end not in values.stages:
                yield f"edges.{index}: unknown stage {end!r}{nearest(end, values.stages)}"
        if edge.name in seen:
            yield f"edges.{index}: {edge.name} appears twice"
        seen.add(edge.name)


def _cycle_problems(values: Omnictl) -> Iterator[str]:
    sources: dict[str, list[str]] = {stage: [] for stage in values.stages}
    for edge in values.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    try:
        TopologicalSorter(sources).prepare()
    except CycleError as error:
        yield f"edges: {' -> '.join(error.args[1])} is a cycle; a request must be able to end"


def _task_problems(values: Omnictl) -> Iterator[str]:
    forward = _neighbours((edge.source, edge.target) for edge in values.edges)
    used: set[str] = set()
    for kind, task in values.tasks.items():
        reached = {modality: _reachable(stage, forward) for modality, stage in task.inputs.items()}
        yield from _end_problems(f"tasks.{kind}", task, reached, values.stages)
        used = used.union(*reached.values())
    for stage in values.stages:
        if stage not in used:
            yield f"stages.{stage}: no task reaches it"


def _end_problems(path: str, task: Task, reached: Mapping[Modality, set[str]], stages: Iterable[str]) -> Iterator[str]:
    """`reached`: for each input the stages behind it."""
    for side, ends in (("inputs", task.inputs), ("outputs", task.outputs)):
        for modality, stage in ends.items():
            if stage not in stages:
                yield f"{path}.{side}.{modality}: unknown stage {stage!r}{nearest(stage, stages)}"
    for modality, stage in task.outputs.items():
        if stage in stages and not any(stage in behind for behind in reached.values()):
            yield f"{path}.outputs.{modality}: no input of the task leads to stage {stage!r}"
    for modality, behind in reached.items():
        if task.inputs[modality] in stages and not behind.intersection(task.outputs.values()):
            yield f"{path}.inputs.{modality}: leads to no output of the task"


def _neighbours(pairs: Iterable[tuple[str, str]]) -> Mapping[str, set[str]]:
    neighbours: dict[str, set[str]] = {}
    for source, target in pairs:
        neighbours.setdefault(source, set()).add(target)
    return neighbours


def _reachable(start: str, forward: Mapping[str, set[str]]) -> set[str]:
    found, pending = set(), [start]
    while pending:
        stage = pending.pop()
        if stage not in found:
            found.add(stage)
            pending.extend(forward.get(stage, ()))
    return found


def _weights_problems(values: Omnictl) -> Iterator[str]:
    for name, stage in values.stages.items():
        if stage.weights is not None and stage.weights not in values.weights:
            yield f"stages.{name}.weights: unknown weights {stage.weights!r}{nearest(stage.weights, values.weights)}"
        if stage.weights is not None and not stage.parameters:
            yield f"stages.{name}.parameters: missing; the stage has weights, whose memory must be planned"
        if stage.parameters and stage.bytes_per_parameter is None and stage.engine != "ar":
            yield f"stages.{name}.bytes_per_parameter: missing; engine {stage.engine} has no dtype to take it from"
    for name in values.weights:
        if all(stage.weights != name for stage in values.stages.values()):
            yield f"weights.{name}: no stage uses them"
    for name, entry in values.weights.items():
        made = {"packages": entry.packages, "files": entry.files, "licenses": entry.licenses}
        missing = [key for key, value in made.items() if not value]
        is_built = len(missing) == len(made) and entry.convert is not None
        if entry.provided and (is_built or len(missing) < len(made)):
            yield f"weights.{name}.provided: the folder is made from packages; it cannot be provided as well"
        if missing and not is_built and not entry.provided:
            yield f"weights.{name}: {' and '.join(missing)} missing; or name the files that are `provided`"


def _voice_problems(values: Omnictl) -> Iterator[str]:
    if values.voices is None:
        return
    names = values.voices.names
    if values.voices.default not in names:
        yield f"voices.default: unknown voice {values.voices.default!r}{nearest(values.voices.default, names)}"
    for alias, voice in values.voices.aliases.items():
        if voice not in names:
            yield f"voices.aliases.{alias}: unknown voice {voice!r}{nearest(voice, names)}"


def _ar_problems(values: Omnictl, model: Model) -> Iterator[str]:
    for name, stage in values.stages.items():
        if stage.engine != "ar":
            continue
        if not stage.cache:
            yield f"stages.{name}.cache: missing; engine ar needs room for its KV cache, such as 192 MiB"
        path, length = f"stages.{name}.engine_settings.max_model_len", stage.engine_settings.max_model_len
        if length is None and not model.context_length:
            yield f"{path}: missing; the model states no context_length to take it from"
        elif length is not None and length > model.context_length > 0:
            yield f"{path}: {length} exceeds the model's context of {model.context_length} tokens"


def _split_problems(values: Omnictl, placement: str) -> Iterator[str]:
    for name, split in values.placements[placement].splits.items():
        path, stage = f"placements.{placement}.splits.{name}", values.stages.get(name)
        if stage is None:
            yield f"{path}: unknown stage {name!r}{nearest(name, values.stages)}"
        elif not isinstance(stage, ArStage):
            yield f"{path}: engine {stage.engine} computes no prompts; only a stage on engine ar can be split"
        elif stage.engine_settings.kv_role is None:
            yield f"{path}.prefill: the recipe has a stage {split.prefill!r} already; choose another name"


def _half_problems(values: Omnictl) -> Iterator[str]:
    """Each half of a split stage has one edge of KV blocks to the other half, and they are the same model."""
    halves = {name: stage for name, stage in values.stages.items() if isinstance(stage, ArStage)}
    for index, edge in enumerate(values.edges):
        source, target = halves.get(edge.source), halves.get(edge.target)
        if edge.payload is PayloadKind.KV_BLOCKS and source is not None and target is not None:
            if (source.engine_settings.kv_role, target.engine_settings.kv_role) != ("producer", "consumer"):
                yield f"edges.{index}: kv_blocks go from a stage of kv_role producer to one of kv_role consumer"
            yield from (f"edges.{index}: {what}" for what in _half_differences(edge, source, target))
    for name, stage in halves.items():
        path = f"stages.{name}.engine_settings.kv_role"
        if stage.engine_settings.kv_role == "producer":
            ends = {f"task {kind}": task.outputs for kind, task in values.tasks.items()}
            yield from _lone_half_problems(
                f"{path}: producer", [e for e in values.edges if e.source == name], name, ends
            )
        elif stage.engine_settings.kv_role == "consumer":
            ends = {f"task {kind}": task.inputs for kind, task in values.tasks.items()}
            yield from _lone_half_problems(
                f"{path}: consumer", [e for e in values.edges if e.target == name], name, ends
            )


def _lone_half_problems(
    path: str, edges: Sequence[Edge], name: str, ends: Mapping[str, Mapping[Modality, str]]
) -> Iterator[str]:
    """edges: those to the side of the other half. ends: where requests would go past it."""
    if [edge.payload for edge in edges] != [PayloadKind.KV_BLOCKS]:
        found = ", ".join(f"{edge.name} ({edge.payload})" for edge in edges) or "none"
        yield f"{path}: expected one edge of kv_blocks to its other half and no other edge there; found {found}"
    for what, stages in ends.items():
        if name in stages.values():
            yield f"{path}: {what} would go past the other half; let it enter at the producer and end at the consumer"


def _half_differences(edge: Edge, source: ArStage, target: ArStage) -> Iterator[str]:
    pairs = {name: (getattr(source, name), getattr(target, name)) for name in ("program", "weights")}
    ours, theirs = source.engine_settings, target.engine_settings
    for name in ("dtype", "max_model_len", "block_size", "kv_cache_dtype", "quantization"):
        pairs[f"engine_settings.{name}"] = (getattr(ours, name), getattr(theirs, name))
    for name, (first, second) in pairs.items():
        if first != second:
            yield f"{name} is {first} at {edge.source} and {second} at {edge.target}; expected the same"


def _process_problems(values: Omnictl, placement: str) -> Iterator[str]:
    path = f"placements.{placement}"
    homes: dict[str, list[str]] = {stage: [] for stage in values.stages}
    for name, process in values.placements[placement].processes.items():
        if name == "server" or re.search(r"-\d+$", name):
            yield f"{path}.processes.{name}: names of the server and of copies (NAME-0) are taken; choose another"
        for stage in process.stages:
            if stage in homes:
                homes[stage].append(name)
            else:
                yield f"{path}.processes.{name}.stages: unknown stage {stage!r}{nearest(stage, values.stages)}"
        replicas = {values.stages[stage].replicas for stage in process.stages if stage in values.stages}
        if len(replicas) > 1:
            yield f"{path}.processes.{name}: its stages have different numbers of replicas; give each its own process"
    for stage, processes in homes.items():
        if not processes:
            yield f"{path}.processes: stage {stage!r} is in none"
        elif len(processes) > 1:
            yield f"{path}.processes: stage {stage!r} is in {' and in '.join(processes)}; expected one"
