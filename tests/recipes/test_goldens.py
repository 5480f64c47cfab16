"""The plan of every bundled recipe on every listed profile, as the file beside this one has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omnictl.hardware import make_profile
from omnictl.placement import make_plan
from omnictl.recipe import load_recipe
from tests.conftest import Golden

pytestmark = pytest.mark.usefixtures("no_user_settings")

GOLDENS = Path(__file__).parent / "goldens"
CASES = [("sidekick", "cpu-2x24"), ("sidekick", "h100"), ("sim-chain", "cpu-2x24"), ("qwen3-omni", "h100x2")]


@pytest.mark.parametrize(("name", "profile"), CASES)
def test_the_plan_equals_its_golden(golden: Golden, name: str, profile: str) -> None:
    plan = make_plan(load_recipe(name), make_profile(profile))
    text = json.dumps(plan.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"
    golden(GOLDENS / f"{name}@{profile}.json", text)


def test_there_is_no_golden_without_a_case() -> None:
    assert {path.stem for path in GOLDENS.iterdir()} == {f"{name}@{profile}" for name, profile in CASES}
