"""Recipes with a tiny build: what it replaces, how it is overridden, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from omnictl import graph, pulling
from omnictl.hardware import make_profile
from omnictl.placement import make_plan
from omnictl.recipe import Recipe, load_recipe
from omnictl.weights import ensure_weights, find_problems
from runtime.errors import ConfigError
from tests.recipe_data import recipe_data, write_recipe

pytestmark = pytest.mark.usefixtures("no_user_settings")

BUILT = {"license": "none", "source": "random numbers", "convert": "acme.tiny"}
TINY: dict[str, Any] = {
    "weights": {"tiny/parrot": BUILT},
    "context_length": 256,
    "stages": {
        "writer": {"weights": "tiny/parrot", "parameters": "1M", "cache": "8 MiB", "cache_elements_per_token": 64},
    },
    "placements": {"here": {"processes": {"all": {"stages": ["writer", "speaker"], "reserve": "100 MiB"}}}},
}


def recipe(folder: Path, *overrides: str, tiny: bool = True, **changes: Any) -> Recipe:
    data = recipe_data()
    data["omnictl"]["weights"] = {"acme/parrot": {"license": "MIT", "source": "acme", "provided": ["config.json"]}}
    data["omnictl"]["stages"]["writer"]["weights"] = "acme/parrot"
    data["omnictl"]["tiny"] = TINY | changes
    return load_recipe(str(write_recipe(folder, data)), overrides=overrides, tiny=tiny)


def test_it_takes_the_place_of_weights_placements_and_context(tmp_path: Path) -> None:
    plan = make_plan(recipe(tmp_path), make_profile("cpu-2x24"))
    writer = plan.stage("writer")
    assert (plan.placement, writer.weights, writer.engine_settings["max_model_len"]) == ("here", "tiny/parrot", 256)
    assert (writer.memory.cache_bytes, plan.provenance["stages.writer.memory.cache_bytes"]) == (8 << 20, "tiny")
    assert writer.program_settings["greeting"] == "hello", "what the build does not change stays"
    real = make_plan(recipe(tmp_path, tiny=False), make_profile("cpu-2x24"))
    assert (real.placement, real.stage("writer").weights) == ("cpu", "acme/parrot")
    assert real.served_names == plan.served_names


def test_its_values_can_be_overridden_and_its_placement_knows_better(tmp_path: Path) -> None:
    here = TINY["placements"]["here"] | {"stages": {"writer": {"slots": 3, "cache": "9 MiB"}}}
    loaded = recipe(tmp_path, "stages.writer.slots=5", placements={"here": here})
    plan = make_plan(loaded, make_profile("cpu-2x24"))
    assert (plan.stage("writer").slots, plan.stage("writer").memory.cache_bytes) == (5, 9 << 20)
    assert plan.provenance["stages.writer.memory.cache_bytes"] == "placement here"


def test_a_recipe_without_one_refuses(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, recipe_data())
    with pytest.raises(ConfigError, match="recipe parrot has no tiny build"):
        load_recipe(str(path), tiny=True)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"stages": {"riter": {"slots": 1}}}, r"tiny stages\.riter.*did you mean 'writer'"),
        ({"stages": {"writer": {"slots": 0}}}, r"tiny stages\.writer\.slots.*greater than or equal to 1"),
        ({"weights": {}}, r"omnictl\.tiny\.weights"),
        ({"size": 1}, r"omnictl\.tiny\.size: unknown key"),
    ],
)
def test_a_mistake_in_it_is_named(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        recipe(tmp_path, **changes)


def test_weights_are_built_by_a_converter_or_made_or_provided(tmp_path: Path) -> None:
    assert graph.find_problems(recipe(tmp_path)) == []
    neither = {"tiny/parrot": {"license": "none", "source": "nowhere"}}
    (problem,) = graph.find_problems(recipe(tmp_path, weights=neither))
    assert problem.startswith("weights.tiny/parrot: packages and files and licenses missing")
    both = {"tiny/parrot": BUILT | {"provided": ["config.json"]}}
    (problem,) = graph.find_problems(recipe(tmp_path, weights=both))
    assert problem.startswith("weights.tiny/parrot.provided: ")


def test_it_is_built_once_and_again_when_its_version_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[str] = []

    def build(converter: str, folder: Path) -> None:
        assert list(folder.iterdir()) == []
        built.append(converter)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(pulling, "convert", build)
    root = tmp_path / "weights"

    def states(**changes: Any) -> list[str]:
        loaded = recipe(tmp_path, weights={"tiny/parrot": BUILT | changes})
        found = [state.state for state in ensure_weights(loaded, root=root)]
        assert find_problems(loaded, root=root) == {}
        return found

    assert states() == ["pulled"]
    assert states() == ["cached"]
    assert states(convert_version=2) == ["repaired"]
    (root / "tiny/parrot/config.json").unlink()
    assert states(convert_version=2) == ["repaired"]
    shutil.rmtree(root / "tiny")
    assert states(convert_version=2) == ["pulled"]
    assert built == ["acme.tiny"] * 4
    assert "tiny/parrot: not there; building random numbers" in capsys.readouterr().err
