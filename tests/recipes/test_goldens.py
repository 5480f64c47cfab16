"""The plan of every bundled recipe on every listed profile, as the file beside this one has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omnictl.hardware import make_profile
from omnictl.placement import make_plan
from omnictl.recipe import load_recipe
from runtime.errors import PlanError
from tests.conftest import Golden

pytestmark = pytest.mark.usefixtures("no_user_settings")

GOLDENS = Path(__file__).parent / "goldens"
GPUS = [f"{kind}{count}" for kind in ("h100", "h200", "l40s") for count in ("", "x2", "x4")]
"""80, 141 and 48 GB."""
CASES = [
    *(("sidekick", profile) for profile in ("cpu-2x24", "h100")),
    ("sim-chain", "cpu-2x24"),
    *(("qwen3-omni", profile) for profile in GPUS if profile != "l40s"),
    *(("qwen3-omni-thinking", profile) for profile in ("h100", "h200x2", "l40sx4")),
    *(("qwen3-omni-captioner", profile) for profile in ("h100x4", "h200", "l40sx2")),
    *(("qwen2.5-omni", profile) for profile in ("h100", "h100x2", "h200", "l40s", "l40sx2")),
    *(("qwen2.5-omni-3b", profile) for profile in ("h100", "h100x2", "l40s", "rtx4090")),
]
PLACEMENTS = {
    "h100": "one-gpu-fp8",
    "h100x2": "two-gpus",
    "h100x4": "four-gpus",
    "h200": "one-gpu",
    "h200x2": "two-gpus-large",
    "h200x4": "four-gpus-large",
    "l40sx2": "two-gpus-fp8",
    "l40sx4": "four-gpus-fp8",
}


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_the_plan_equals_its_golden(golden: Golden, name: str, profile: str) -> None:
    plan = make_plan(load_recipe(name), make_profile(profile))
    text = json.dumps(plan.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    golden(GOLDENS / f"{name}@{profile}.json", text)


def test_a_thinker_that_is_cut_in_two_has_a_gpu_for_each_half() -> None:
    recipe = load_recipe("qwen3-omni", overrides=["placement=four-gpus-prefill"])
    plan = make_plan(recipe, make_profile("h100x4"))
    devices = {process.name: process.devices for process in plan.processes}
    assert devices["prefill"] == ("cuda:0",)
    assert devices["thinker"] == ("cuda:1",)
    assert set(plan.tasks["chat"].inputs.values()) == {"thinker-prefill"}
    assert [edge.name for edge in plan.edges_into("thinker")] == ["thinker-prefill->thinker"]


@pytest.mark.parametrize(("profile", "placement"), PLACEMENTS.items())
def test_each_number_and_size_of_gpus_has_its_placement(profile: str, placement: str) -> None:
    """The same on a machine of the profile's name and where `--gpus` says the number; all of the GPUs are used."""
    kind, count = profile.removesuffix("x2").removesuffix("x4"), int(profile[-1]) if "x" in profile else 1
    recipe = load_recipe("qwen3-omni")
    plan = make_plan(recipe, make_profile(kind, count), gpus=count)
    assert plan.placement == placement
    assert len({device for process in plan.processes for device in process.devices}) == count
    assert plan == make_plan(recipe, make_profile(profile)), "to the last reason"


@pytest.mark.parametrize(
    ("profile", "problem", "hint"),
    [
        (
            "rtx4090",
            "placement one-gpu-fp8: cuda:0: 76 GiB needed, 23.49 GiB free (of 23.99 GiB, 512 MiB in use): 52.52 GiB "
            "short (stage thinker 57.58 GiB,",
            "nearest is placement two-gpus-fp8: cuda:0 needs 61 GiB free: there are 23.99 GiB in all; use a larger",
        ),
        (
            "rtx4090x2",
            "placement two-gpus-fp8: cuda:0: 43.58 GiB needed, 23.49 GiB free (of 23.99 GiB, 512 MiB in use): 20.09 "
            "GiB short (stage thinker 42.58 GiB, reserve of thinker 1 GiB)",
            "nearest is placement two-gpus-fp8: cuda:0 needs 43.58 GiB free: there are 23.99 GiB in all; use a larger",
        ),
        (
            "l40s",
            "placement one-gpu-fp8: cuda:0: 76 GiB needed, 44.49 GiB free",
            "2 GPUs like NVIDIA L40S would fit, with placement two-gpus-fp8",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_numbers(profile: str, problem: str, hint: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_plan(load_recipe("qwen3-omni"), make_profile(profile))
    assert any(found.startswith(problem) for found in caught.value.problems), caught.value.problems
    assert str(caught.value.hint).startswith(hint)


def test_there_is_no_golden_without_a_case() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == {f"{name}@{profile}" for name, profile in CASES}
