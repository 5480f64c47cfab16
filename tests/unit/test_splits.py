"""A placement that cuts a stage in two: what the plan has then, and what cannot be cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omnictl.graph import find_problems
from omnictl.hardware import make_profile
from omnictl.placement import make_plan
from omnictl.recipe import Recipe, load_recipe
from runtime.plan import Modality, PayloadKind
from tests.recipe_data import recipe_data, write_recipe

pytestmark = pytest.mark.usefixtures("no_user_settings")

SPLIT = {"writer": {"prefill": "writer-prefill", "replicas": 2}}
PROCESSES = {
    "prefill": {"stages": ["writer-prefill"], "reserve": "500 MiB"},
    "writer": {"stages": ["writer"], "reserve": "500 MiB"},
    "speaker": {"stages": ["speaker"], "reserve": "100 MiB"},
}


def recipe_of(folder: Path, *overrides: str, splits: Any = SPLIT, **omnictl: Any) -> Recipe:
    data = recipe_data()
    data["omnictl"] |= omnictl
    data["omnictl"]["placements"] = {"cut": {"processes": PROCESSES, "splits": splits}}
    return load_recipe(str(write_recipe(folder, data)), overrides=overrides)


def test_both_halves_are_in_the_plan(tmp_path: Path) -> None:
    plan = make_plan(recipe_of(tmp_path, "stages.writer.engine_settings.block_size=64"), make_profile("cpu-4x64"))
    assert [stage.name for stage in plan.stages] == ["writer-prefill", "writer", "speaker"]
    first, second = plan.stage("writer-prefill"), plan.stage("writer")
    assert (first.replicas, second.replicas) == (2, 1)
    assert first.engine_settings == second.engine_settings | {"kv_role": "producer"}
    assert second.engine_settings["kv_role"] == "consumer"
    assert second.engine_settings["block_size"] == 64
    assert first.memory == second.memory
    edge = plan.edges_into("writer")[0]
    assert (edge.source, edge.payload) == ("writer-prefill", PayloadKind.KV_BLOCKS)
    assert plan.tasks["chat"].inputs == {Modality.TEXT: "writer-prefill"}
    assert plan.tasks["chat"].outputs == {Modality.TEXT: "writer", Modality.AUDIO: "speaker"}
    assert plan.provenance["stages.writer-prefill.engine_settings.kv_role"] == "placement cut"
    assert plan.provenance["stages.writer-prefill.engine_settings.block_size"] == "--set"


@pytest.mark.parametrize(
    ("splits", "problem"),
    [
        ({"writr": {"prefill": "p"}}, "placements.cut.splits.writr: unknown stage 'writr' (did you mean 'writer'?)"),
        ({"speaker": {"prefill": "p"}}, "splits.speaker: engine module computes no prompts"),
        ({"writer": {"prefill": "speaker"}}, "splits.writer.prefill: the recipe has a stage 'speaker' already"),
    ],
)
def test_what_cannot_be_cut(tmp_path: Path, splits: Any, problem: str) -> None:
    assert any(problem in found for found in find_problems(recipe_of(tmp_path, splits=splits)))


def halves(**second: Any) -> dict[str, Any]:
    stage = recipe_data()["omnictl"]["stages"]["writer"]
    speaker = recipe_data()["omnictl"]["stages"]["speaker"]
    return {
        "stages": {
            "writer-prefill": stage | {"engine_settings": {"kv_role": "producer"}},
            "writer": stage | {"engine_settings": {"kv_role": "consumer"} | second},
            "speaker": speaker,
        },
        "edges": [
            {"source": "writer-prefill", "target": "writer", "payload": "kv_blocks", "mode": "whole"},
            {"source": "writer", "target": "speaker", "payload": "text", "mode": "chunked"},
        ],
        "tasks": {"chat": {"inputs": {"text": "writer-prefill"}, "outputs": {"text": "writer", "audio": "speaker"}}},
    }


def problems(folder: Path, values: dict[str, Any]) -> str:
    return "\n".join(find_problems(recipe_of(folder, splits={}, **values)))


def test_halves_may_be_written_out(tmp_path: Path) -> None:
    assert problems(tmp_path, halves()) == ""


def test_halves_that_differ_are_refused_with_both_values(tmp_path: Path) -> None:
    found = problems(tmp_path, halves(block_size=64, dtype="float16"))
    assert "edges.0: engine_settings.block_size is 32 at writer-prefill and 64 at writer; expected the same" in found
    assert "edges.0: engine_settings.dtype is auto at writer-prefill and float16 at writer" in found


def test_a_half_without_its_other_half_is_refused(tmp_path: Path) -> None:
    values = halves(kv_role=None)
    assert "edges.0: kv_blocks go from a stage of kv_role producer" in problems(tmp_path, values)
    values = halves()
    values["edges"][0]["payload"] = "text"
    assert "kv_role: consumer: expected one edge of kv_blocks to its other half" in problems(tmp_path, values)
    values = halves()
    values["tasks"]["chat"]["inputs"] = {"text": "writer"}
    assert "kv_role: consumer: task chat would go past the other half" in problems(tmp_path, values)
