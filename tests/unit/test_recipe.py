"""Recipes: found by a fixed order of rules, overridden in layers, checked strictly, each value with its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnictl import recipe as recipes
from omnictl.recipe import load_recipe
from runtime.errors import ConfigError, ModelNotFound
from tests.recipe_data import MODEL_ID, recipe_data, write_recipe

pytestmark = pytest.mark.usefixtures("no_user_settings")

Write = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's recipe folder, with one recipe in it."""
    folder = tmp_path / "recipes"
    write_recipe(folder, recipe_data())
    monkeypatch.setenv("OMNICTL_RECIPE_DIRS", str(folder))
    return folder


@pytest.fixture
def write_user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "user.yaml"
        path.write_text(text)
        monkeypatch.setenv("OMNICTL_CONFIG", str(path))
        return path

    return write


def problems_of(error: ConfigError) -> str:
    return "\n".join(error.problems or (error.message,))


def refuse(*overrides: str, name: str = "parrot") -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(name, overrides=overrides)
    return problems_of(caught.value)


# ---- finding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "matched"), [("parrot", "short name"), (MODEL_ID, "model id"), ("{folder}/acme/parrot.yaml", "file")]
)
def test_every_name_of_a_recipe_says_by_which_rule_it_was_found(folder: Path, name: str, matched: str) -> None:
    loaded = load_recipe(name.format(folder=folder))
    assert (loaded.name, loaded.matched) == ("parrot", matched)
    assert loaded.path == folder / "acme" / "parrot.yaml"


def test_a_short_name_may_say_a_version(folder: Path) -> None:
    data = recipe_data()
    data["meta"]["slug"], data["omnictl"]["short_names"] = "parrot2.5", ["parrot2.5-7b"]
    write_recipe(folder, data)
    assert load_recipe("parrot2.5-7b").model.model_id == MODEL_ID


def test_a_model_id_goes_before_a_short_name(folder: Path) -> None:
    other = recipe_data()
    other["model"]["model_id"] = "acme/other"
    other["omnictl"]["short_names"] = ["other", "parrot-2"]
    write_recipe(folder, other, "acme/other")
    assert load_recipe("acme/other").path.stem == "other"
    assert load_recipe("parrot-2").path.stem == "other"


def test_an_unknown_name_is_an_error_with_the_nearest_and_the_candidates(folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no recipe is called 'parot' \(did you mean 'parrot'\?\)") as caught:
        load_recipe("parot")
    assert str(folder) in str(caught.value.hint)
    with pytest.raises(ModelNotFound, match="known: acme/parrot, .*sidekick"):
        load_recipe("xyzzy")


@pytest.mark.parametrize("name", ["./missing.yaml", "/etc", ".", "~/nothing.yml"])
def test_a_path_that_is_no_file_is_never_taken_for_a_name(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        load_recipe(name)


def test_a_file_that_states_another_model_than_its_path_is_refused(folder: Path) -> None:
    write_recipe(folder, recipe_data(), "acme/renamed")
    assert "expected 'acme/renamed' as its path says, found 'acme/parrot'" in refuse(name="acme/renamed")


def test_a_short_name_of_two_recipes_in_one_folder_is_refused(folder: Path) -> None:
    other = recipe_data()
    other["model"]["model_id"] = "acme/twin"
    write_recipe(folder, other, "acme/twin")
    assert "belongs to" in refuse()


def test_a_users_recipe_hides_the_bundled_one(folder: Path) -> None:
    mine = recipe_data()
    mine["model"]["model_id"] = "omnictl/sidekick"
    mine["omnictl"]["short_names"] = ["sidekick"]
    path = write_recipe(folder, mine, "omnictl/sidekick")
    assert load_recipe("sidekick").path == load_recipe("omnictl/sidekick").path == path


def test_a_broken_file_does_not_hide_the_others(folder: Path) -> None:
    (folder / "acme" / "broken.yaml").write_text("omnictl: [")
    assert load_recipe("parrot").name == "parrot"
    assert "acme/broken" in [entry.model_id for entry in recipes.find_recipes()]


def test_recipes_are_found_in_a_checkout_and_in_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (recipes.bundled_dir() / "omnictl" / "sidekick.yaml").is_file()
    installed = tmp_path / "site-packages" / "omnictl"
    write_recipe(installed / "_recipes", recipe_data())
    monkeypatch.setattr(recipes, "__file__", str(installed / "recipe.py"))
    assert load_recipe("parrot").path == installed / "_recipes" / "acme" / "parrot.yaml"


# ---- strictness ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "line 2, column 1"),
        ("a: 1\na: 2\n", "line 2, column 1: key 'a' appears twice"),
        ("- a\n", "expected a mapping at the top, found list"),
        ("1: a\n", "key '1' is not text"),
        ("a: &x [*x]\n", "cannot be used"),
        ("a: !!python/name:os.system\n", "could not determine a constructor"),
        ("a: 1e999\n", "too large"),
        (f"a: {'9' * 5000}\n", "not YAML"),
        ("", "meta: missing"),
    ],
)
def test_a_file_that_is_no_recipe_is_an_error_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert expected in refuse(name=str(path))
    assert str(path) in refuse(name=str(path))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"meta: \xff\xfe")
    assert "not UTF-8 at byte 6" in refuse(name=str(path))


def change(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        data = data[int(key)] if isinstance(data, list) else data[key]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("omnictl.stages.writer.slot", 4, "omnictl.stages.writer.slot: unknown key (did you mean 'slots'?)"),
        ("omnictl.stages.writer.slots", "4", "omnictl.stages.writer.slots: input should be a valid integer, found '4'"),
        ("omnictl.stages.writer.slots", True, "found True"),
        ("omnictl.stages.writer.slots", 4.5, "found 4.5"),
        ("omnictl.stages.writer.cache", "1 Gb", "expected a size such as 192 MiB or 1.5 GB, found '1 Gb'"),
        ("omnictl.stages.writer.parameters", "many", "expected a count such as 135M or 7B, found 'many'"),
        (
            "omnictl.stages.writer.engine",
            "arr",
            "omnictl.stages.writer.engine: unknown value 'arr' (did you mean 'ar'?)",
        ),
        ("omnictl.stages.writer.engine", "diffusion", "unknown value 'diffusion'; known: ar, module, sim"),
        (
            "omnictl.stages.writer.engine_settings",
            {"max_model_length": 5},
            "omnictl.stages.writer.engine_settings.max_model_length: unknown key (did you mean 'max_model_len'?)",
        ),
        ("omnictl.stages.speaker.engine_settings", {"dtype": "float32"}, "engine_settings.dtype: unknown key"),
        ("omnictl.edges.0.mode", "chunk", "omnictl.edges.0.mode: unknown value 'chunk' (did you mean 'chunked'?)"),
        ("omnictl.tasks.chats", {}, "omnictl.tasks.chats: unknown value 'chats' (did you mean 'chat'?)"),
        ("omnictl.placements.cpu.processes.writer.gpus", 2, "less than or equal to 1, found 2"),
        ("model.min_vllm_version", 0.32, "model.min_vllm_version: input should be a valid string, found 0.32"),
        ("meta.date_added", "soon", "meta.date_added: input should be a valid date"),
        ("meta.hardware", {"cpu": "probably"}, "unknown value 'probably'; known: unsupported, verified"),
        ("metta", {}, "metta: unknown key (did you mean 'meta'?)"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_key_and_the_nearest(
    tmp_path: Path, path: str, value: Any, expected: str
) -> None:
    data = recipe_data()
    change(data, path, value)
    assert expected in refuse(name=str(write_recipe(tmp_path, data)))


def test_all_mistakes_are_told_at_once(folder: Path) -> None:
    told = refuse("stages.writer.slot=4", "stages.speaker.slots=0", "edges.3.mode=whole", "stages.writer.cache=big")
    for place in ("stages.writer.slot", "stages.speaker.slots", "edges.3", "stages.writer.cache"):
        assert f"--set {place}" in told


def test_models_are_frozen(folder: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe("parrot").omnictl.stages["writer"].slots = 5


# ---- overrides ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.writr.slots=4", "--set stages.writr.slots: unknown key 'writr' (did you mean 'writer'?)"),
        ("stages.writer.slotz=4", "--set stages.writer.slotz: unknown key 'slotz' (did you mean 'slots'?)"),
        ("stage.writer.slots=4", "unknown key 'stage' (did you mean 'stages'?)"),
        ("modl.context_length=4", "unknown key 'modl' (did you mean 'model'?)"),
        ("stages.9.slots=4", "unknown key '9'; known: speaker, writer"),
        ("edges.1.mode=whole", "unknown key '1'; known: 0"),
        ("stages.writer.slots.x=4", "unknown key 'x'"),
        ("stages.writer.engine_settings.dtyp=float32", "unknown key 'dtyp' (did you mean 'dtype'?)"),
        ("stages.writer.engine_settings.block_size=16", "a multiple of 32, found 16"),
        ("stages.writer.engine_settings.tensor_parallel_size=2", "has no effect here: a replica runs on one device;"),
        ("stages.writer.engine_settings.gpu_memory_utilization=0.9", "has no effect here: the stage's cache budget"),
        ("stages.writer.engine_settings={seed: 1}", "seed: has no effect here: every request has a seed of its own"),
        ("stages.writer.engine_settings.dtype=bf16", "unknown value 'bf16' (did you mean 'bfloat16'?)"),
        ("stages.writer.program_settings.temprature=1", "unknown key 'temprature' (did you mean 'temperature'?)"),
        ("stages.writer.program_settings.temperature=hot", "expected a number such as 0.5, found 'hot'"),
        ("stages.writer.program_settings.polite=1", "expected true or false such as True, found 1"),
        ("stages.writer.slots=[", "--set stages.writer.slots: '['"),
        ("stages.writer.slots", "expected KEY=VALUE"),
        ("=4", "expected KEY=VALUE"),
        ("stages..slots=4", "expected KEY=VALUE"),
        ("limits.max_queued=-1", "greater than or equal to 0, found -1"),
    ],
)
def test_an_override_that_leads_nowhere_is_refused_with_the_nearest_name(
    folder: Path, override: str, expected: str
) -> None:
    assert expected in refuse(override)


def test_a_refused_override_changes_nothing_on_its_way(folder: Path) -> None:
    """The path goes through a key that is unset in the file; the mistake must not leave half of it behind."""
    assert refuse("stages.speaker.engine_settings.x=1").count("\n") == 0


def test_an_override_is_the_same_as_the_file_changed(folder: Path, tmp_path: Path) -> None:
    data = recipe_data()
    data["omnictl"]["stages"]["writer"]["engine_settings"] = {"max_num_seqs": 10}
    by_file = load_recipe(str(write_recipe(tmp_path / "other", data)))
    by_set = load_recipe("parrot", overrides=["stages.writer.engine_settings.max_num_seqs=10"])
    assert by_set.omnictl == by_file.omnictl
    assert load_recipe("parrot", overrides=["omnictl.stages.writer.engine_settings.max_num_seqs=10"]) == by_set


def test_unset_true_and_false_are_three_states(folder: Path) -> None:
    key = "stages.writer.engine_settings.enable_prefix_caching"

    def state(*overrides: str) -> tuple[object, str]:
        placed = load_recipe("parrot", overrides=overrides).placed["cpu"]
        return placed.values.stages["writer"].engine_settings.enable_prefix_caching, placed.source(key)

    assert state() == (True, "default")
    assert state(f"{key}=true") == (True, "--set")
    assert state(f"{key}=false") == (False, "--set")
    assert state(f"{key}=false", f"{key}=null") == (True, "default, unset by --set")
    assert "found 'yes'" in refuse(f"{key}=yes")


def test_the_later_of_two_overrides_wins(folder: Path) -> None:
    loaded = load_recipe("parrot", overrides=["stages.writer.slots=3", "stages.writer.slots=5"])
    assert loaded.omnictl.stages["writer"].slots == 5


def test_a_mapping_can_be_set_as_a_whole_and_then_in_part(folder: Path) -> None:
    overrides = ["stages.writer.engine_settings={max_num_seqs: 3, block_size: 16}"]
    overrides += ["stages.writer.engine_settings.block_size=64"]
    settings = load_recipe("parrot", overrides=overrides).omnictl.stages["writer"].engine_settings
    assert (settings.max_num_seqs, settings.block_size) == (3, 64)


# ---- layers -------------------------------------------------------------------------------------------------

SLOTS = "stages.writer.slots"


def slots(placement: str, *overrides: str) -> tuple[int, str]:
    placed = load_recipe("parrot", overrides=overrides).placed[placement]
    return placed.values.stages["writer"].slots, placed.source(SLOTS)


def test_each_layer_beats_those_below_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, write_user_file: Callable[[str], Path]
) -> None:
    assert slots("cpu") == (8, "default")
    assert slots("cuda") == (64, "placement cuda")
    data = recipe_data()
    data["omnictl"]["stages"]["writer"]["slots"] = 2
    write_recipe(folder, data)
    assert (slots("cpu"), slots("cuda")) == ((2, "recipe"), (64, "placement cuda"))
    write_user_file("recipes: {parrot: {stages: {writer: {slots: 3}}}}")
    assert slots("cpu") == slots("cuda") == (3, "user file")
    monkeypatch.setenv("OMNICTL_SET", f"{SLOTS}=4; stages.speaker.slots=7")
    assert slots("cpu") == slots("cuda") == (4, "OMNICTL_SET")
    assert slots("cuda", f"{SLOTS}=5") == (5, "--set")
    assert slots("cuda", f"{SLOTS}=null") == (8, "default, unset by --set")


def test_a_placement_that_changes_what_is_not_there_is_refused(folder: Path) -> None:
    data = recipe_data()
    data["omnictl"]["placements"]["cuda"]["stages"] = {"writer": {"slot": 3}}
    write_recipe(folder, data)
    assert "placement cuda stages.writer.slot: unknown key 'slot' (did you mean 'slots'?)" in refuse()


def test_mistakes_in_the_environment_and_the_user_file_name_their_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, write_user_file: Callable[[str], Path]
) -> None:
    write_user_file("recipes: {acme/parrot: {stages.writer.slotz: 3}}")
    assert "user file stages.writer.slotz: unknown key 'slotz' (did you mean 'slots'?)" in refuse()
    write_user_file("recipes: {parot: {stages.writer.slots: 3}}")
    assert "recipes.parot: unknown recipe (did you mean 'parrot'?)" in refuse()
    write_user_file("recipes: {sidekick: {stages.ear.slots: 3}}")
    monkeypatch.setenv("OMNICTL_SET", "stages.writer.slots=many")
    assert "OMNICTL_SET stages.writer.slots: input should be a valid integer, found 'many'" in refuse()
