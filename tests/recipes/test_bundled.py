"""Bundled recipes against the runtime that serves them: what a recipe may say is what an engine takes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from omnictl import recipe_schema
from omnictl.graph import find_problems
from omnictl.recipe import Recipe, bundled_dir, find_recipes, load_recipe
from omnictl.recipe_schema import Meta, Model, Omnictl
from runtime.engines import base
from runtime.engines.ar.settings import SET_ELSEWHERE, EngineSettings
from runtime.engines.sim import Fault, SimSettings
from runtime.plan import EngineKind
from runtime.programs import CONVERTERS, PROGRAMS

pytestmark = pytest.mark.usefixtures("no_user_settings")

PATHS = sorted(bundled_dir().glob("*/*.yaml"))
NAMES = [str(path.relative_to(bundled_dir())) for path in PATHS]


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_recipe_is_sound_and_its_parts_exist(path: Path) -> None:
    recipe = load_recipe(str(path))
    _check_parts(recipe)
    if recipe.omnictl.tiny is not None:
        _check_parts(load_recipe(str(path), tiny=True))


def _check_parts(recipe: Recipe) -> None:
    assert find_problems(recipe) == []
    for name, stage in recipe.omnictl.stages.items():
        assert stage.engine in base.ENGINES
        assert stage.engine == EngineKind.SIM or stage.program in PROGRAMS, name
    for name, weights in recipe.omnictl.weights.items():
        assert weights.convert is None or weights.convert in CONVERTERS, name


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_keys_stand_in_the_order_of_public_recipes(path: Path) -> None:
    data = yaml.safe_load(path.read_text())
    assert list(data) == ["meta", "model", "omnictl"]
    for section, model in (("meta", Meta), ("model", Model), ("omnictl", Omnictl)):
        order = list(model.model_fields)
        assert list(data[section]) == sorted(data[section], key=order.index)


def test_every_bundled_recipe_is_found_by_its_names() -> None:
    entries = [entry for entry in find_recipes() if entry.path in PATHS]
    assert len(entries) == len(PATHS)
    for entry in entries:
        for name in (entry.model_id, *entry.short_names):
            assert load_recipe(name).path == entry.path


def test_ar_settings_are_those_of_the_engine() -> None:
    ours, theirs = recipe_schema.ArSettings.model_fields, EngineSettings.model_fields
    assert {name: field.default for name, field in ours.items()} == {name: f.default for name, f in theirs.items()}
    assert recipe_schema.ArSettings.SET_ELSEWHERE == SET_ELSEWHERE


@pytest.mark.parametrize(
    ("ours", "theirs"), [(recipe_schema.SimSettings, SimSettings), (recipe_schema.SimFault, Fault)]
)
def test_sim_settings_are_those_of_the_engine(
    ours: type[recipe_schema.SimSettings] | type[recipe_schema.SimFault], theirs: type[msgspec.Struct]
) -> None:
    assert set(ours.model_fields) == set(theirs.__struct_fields__)
    if ours is recipe_schema.SimSettings:
        assert msgspec.convert(ours().model_dump(mode="json"), theirs) == theirs()


def test_engines_that_a_recipe_may_name_are_those_that_can_be_loaded() -> None:
    stages = (recipe_schema.ArStage, recipe_schema.ModuleStage, recipe_schema.SimStage)
    names = {str(stage.model_fields["engine"].annotation).split("'")[1] for stage in stages}
    assert names == set(base.ENGINES)
