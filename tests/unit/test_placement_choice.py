"""Which of a recipe's placements is used, and what is told when none can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omnictl.hardware import make_profile
from omnictl.placement import make_plan
from omnictl.units import GIB
from tests.recipe_data import make_recipe, recipe_data
from tests.unit.test_placement import CPU, load, refuse

pytestmark = pytest.mark.usefixtures("no_user_settings")


def test_a_placement_for_more_gpus_waits_for_them() -> None:
    """Both would fit on one GPU; which is used goes by their number alone."""
    data = recipe_data()
    cuda = data["omnictl"]["placements"]["cuda"]
    data["omnictl"]["placements"] = {"two": {"min_gpus": 2, **cuda}, "one": {"min_gpus": 1, **cuda}}
    recipe = make_recipe(data)
    plan = make_plan(recipe, make_profile("h100"))
    assert plan.placement == "one"
    assert plan.provenance["placement"] == "the first that fits; placement two: for 2 GPUs or more; 1 can be used"
    assert make_plan(recipe, make_profile("h100x2")).placement == "two"
    data["omnictl"]["placement"] = "two"
    assert refuse(make_recipe(data), make_profile("h100")).problems == (
        "placement two: for 2 GPUs or more; 1 can be used",
    )


def test_the_nearest_placement_is_told_when_none_fits() -> None:
    data = recipe_data()
    data["omnictl"]["stages"]["writer"]["activation"] = "90 GiB"
    cuda = data["omnictl"]["placements"]["cuda"]
    near = cuda | {"stages": {}}
    data["omnictl"]["placements"] = {"far": cuda, "near": near}
    recipe = make_recipe(data)
    far = recipe.placed["far"].values.stages
    values = recipe.placed["far"].values.model_copy(
        update={"stages": far | {"writer": far["writer"].model_copy(update={"cache": 20 * GIB})}}
    )
    recipe = replace(recipe, placed={**recipe.placed, "far": replace(recipe.placed["far"], values=values)})
    error = refuse(recipe, make_profile("h100"))
    assert len(error.problems) == 2
    assert str(error.hint).startswith("nearest is placement near: cuda:0 needs 93.")


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("quantization=fp8", "quantization: 'fp8': vLLM has no kernels for it on a CPU"),
        ("kv_cache_dtype=fp8", "kv_cache_dtype: 'fp8': on a CPU it needs AVX-512 or AMX"),
        ("max_num_seqs=9", "max_num_seqs: 9 is more than the 8 slots of a replica"),
    ],
)
def test_what_the_device_or_the_stage_cannot_do_is_refused(tmp_path: Path, setting: str, problem: str) -> None:
    error = refuse(load(tmp_path, f"stages.writer.engine_settings.{setting}"), CPU)
    assert error.problems == (f"placement cpu: stages.writer.engine_settings.{problem}",)
