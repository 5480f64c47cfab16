"""Weights that nothing here fetches: the recipe names files, the user puts them there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omnictl import graph
from omnictl.recipe import Recipe
from omnictl.weights import ensure_weights, find_problems
from runtime.errors import WeightsError
from tests.recipe_data import make_recipe, recipe_data

NAME = "acme/large"
PROVIDED: dict[str, Any] = {
    "license": "Apache-2.0",
    "source": "acme/large as published",
    "provided": ["config.json", "model.safetensors"],
}


def recipe(**changes: Any) -> Recipe:
    data = recipe_data()
    data["omnictl"]["weights"] = {NAME: PROVIDED | changes}
    data["omnictl"]["stages"]["writer"]["weights"] = NAME
    return make_recipe(data)


def test_what_is_missing_is_named_with_the_place_for_it(tmp_path: Path) -> None:
    assert find_problems(recipe(), root=tmp_path) == {NAME: "not there"}
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert find_problems(recipe(), root=tmp_path) == {NAME: "model.safetensors missing"}
    with pytest.raises(
        WeightsError, match=r"acme/large: model\.safetensors missing; acme/large as published"
    ) as caught:
        ensure_weights(recipe(), root=tmp_path)
    assert str(folder) in str(caught.value.hint)
    assert [path.name for path in tmp_path.iterdir()] == ["acme"], "a pull was begun"


def test_what_is_there_is_served(tmp_path: Path) -> None:
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    (state,) = ensure_weights(recipe(), root=tmp_path)
    assert (state.state, state.size_bytes, state.problem) == ("cached", 102, None)


def test_a_recipe_says_one_way_to_have_them() -> None:
    assert graph.find_problems(recipe()) == []
    (neither,) = graph.find_problems(recipe(provided=[]))
    assert neither == f"weights.{NAME}: packages and files and licenses missing; or name the files that are `provided`"
    (both,) = graph.find_problems(recipe(licenses=["LICENSE"]))
    assert both == f"weights.{NAME}.provided: the folder is made from packages; it cannot be provided as well"
