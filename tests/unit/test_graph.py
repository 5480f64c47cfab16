"""Inconsistent recipes: every problem is found, named by its key, and told together with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from omnictl.graph import find_problems
from tests.recipe_data import make_recipe, recipe_data

Change = Callable[[dict[str, Any]], object]


def edge(source: str, target: str) -> dict[str, str]:
    return {"source": source, "target": target, "payload": "text", "mode": "whole"}


def processes(section: dict[str, Any]) -> Any:
    return section["placements"]["cpu"]["processes"]


CHANGES: list[tuple[Change, str]] = [
    (
        lambda s: s["edges"].append(edge("writr", "speaker")),
        "edges.1: unknown stage 'writr' (did you mean 'writer'?)",
    ),
    (lambda s: s["edges"].append(edge("writer", "speaker")), "edges.1: writer->speaker appears twice"),
    (lambda s: s["edges"].append(edge("speaker", "writer")), "edges: writer -> speaker -> writer is a cycle"),
    (lambda s: s["edges"].append(edge("writer", "writer")), "edges: writer -> writer is a cycle"),
    (lambda s: s["edges"].clear(), "tasks.chat.outputs.audio: no input of the task leads to stage 'speaker'"),
    (
        lambda s: s["tasks"]["chat"]["outputs"].update(audio="speeker"),
        "tasks.chat.outputs.audio: unknown stage 'speeker' (did you mean 'speaker'?)",
    ),
    (
        lambda s: s["tasks"]["speech"]["inputs"].update(audio="nobody"),
        "tasks.speech.inputs.audio: unknown stage 'nobody'; known: speaker, writer",
    ),
    (
        lambda s: s["tasks"]["chat"].update(inputs={"text": "writer", "audio": "speaker"}, outputs={"text": "writer"}),
        "tasks.chat.inputs.audio: leads to no output of the task",
    ),
    (
        lambda s: s.update(edges=[], tasks={"chat": {"inputs": {"text": "writer"}, "outputs": {"text": "writer"}}}),
        "stages.speaker: no task reaches it",
    ),
    (lambda s: s["stages"]["writer"].update(weights="acme/w"), "stages.writer.weights: unknown weights 'acme/w'"),
    (lambda s: s["stages"]["writer"].pop("cache"), "stages.writer.cache: missing; engine ar needs room"),
    (
        lambda s: s["stages"]["speaker"].pop("bytes_per_parameter"),
        "stages.speaker.bytes_per_parameter: missing; engine module has no dtype",
    ),
    (
        lambda s: s["stages"]["writer"].update(engine_settings={"max_model_len": 5000}),
        "stages.writer.engine_settings.max_model_len: 5000 exceeds the model's context of 4096 tokens",
    ),
    (
        lambda s: s.update(voices={"default": "ann", "names": ["anna"], "aliases": {"x": "ana"}}),
        "voices.default: unknown voice 'ann' (did you mean 'anna'?)",
    ),
    (
        lambda s: s.update(voices={"default": "anna", "names": ["anna"], "aliases": {"x": "ana"}}),
        "voices.aliases.x: unknown voice 'ana' (did you mean 'anna'?)",
    ),
    (lambda s: processes(s).pop("speaker"), "placements.cpu.processes: stage 'speaker' is in none"),
    (
        lambda s: processes(s)["writer"]["stages"].append("speaker"),
        "placements.cpu.processes: stage 'speaker' is in writer and in speaker; expected one",
    ),
    (
        lambda s: processes(s)["writer"]["stages"].append("speeker"),
        "placements.cpu.processes.writer.stages: unknown stage 'speeker' (did you mean 'speaker'?)",
    ),
    (
        lambda s: processes(s).update(server=processes(s).pop("speaker")),
        "placements.cpu.processes.server: names of the server and of copies (NAME-0) are taken",
    ),
    (
        lambda s: (processes(s)["writer"]["stages"].append("speaker"), s["stages"]["speaker"].update(replicas=2)),
        "placements.cpu.processes.writer: its stages have different numbers of replicas",
    ),
]


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=[expected[:40] for _, expected in CHANGES])
def test_an_inconsistency_is_named(change: Change, expected: str) -> None:
    data = recipe_data()
    change(data["omnictl"])
    found = find_problems(make_recipe(data))
    assert [problem for problem in found if problem.startswith(expected)], found


def test_a_sound_recipe_has_no_problems() -> None:
    assert find_problems(make_recipe(recipe_data())) == []


def test_weights_that_no_stage_uses_are_a_problem() -> None:
    data = recipe_data()
    package = {"requirement": "a==1", "sha256": "0" * 64, "size_bytes": 1}
    data["omnictl"]["weights"] = {
        "acme/w": {
            "license": "MIT",
            "source": "a",
            "packages": [package],
            "files": [{"name": "w", "parts": ["*/w"]}],
            "licenses": ["*/LICENSE"],
        }
    }
    assert find_problems(make_recipe(data)) == ["weights.acme/w: no stage uses them"]


def test_a_model_without_context_length_needs_one_for_its_stage() -> None:
    data = recipe_data()
    data["model"]["context_length"] = 0
    assert find_problems(make_recipe(data)) == [
        "stages.writer.engine_settings.max_model_len: missing; the model states no context_length to take it from"
    ]


def test_all_inconsistencies_are_told_at_once_and_each_only_once() -> None:
    data = recipe_data()
    for change in (CHANGES[0][0], CHANGES[2][0], CHANGES[10][0], CHANGES[13][0]):
        change(data["omnictl"])
    found = find_problems(make_recipe(data))
    assert len(found) == len(set(found)) == 5
