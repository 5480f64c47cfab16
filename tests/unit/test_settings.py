"""Settings: the environment goes before the user file, which goes before the default; mistakes are loud."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnictl import settings
from runtime.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_user_settings")


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "user.yaml"
    monkeypatch.setenv("OMNICTL_CONFIG", str(path))
    return path


def test_defaults_are_below_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert settings.weights_dir() == Path("/home/ada/.cache/omnictl/weights")
    assert settings.state_dir() == Path("/home/ada/.local/state/omnictl")
    assert settings.shm_dir() == Path("/dev/shm")
    assert settings.recipe_dirs() == ()


def test_the_environment_goes_before_the_user_file(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user_file.write_text("home: /file/home\nstate_dir: /file/state\n")
    assert settings.weights_dir() == Path("/file/home/weights")
    assert settings.state_dir() == Path("/file/state")
    monkeypatch.setenv("OMNICTL_HOME", "/environment/home")
    assert settings.weights_dir() == Path("/environment/home/weights")
    monkeypatch.setenv("OMNICTL_WEIGHTS_DIR", "/environment/weights")
    assert settings.weights_dir() == Path("/environment/weights")


def test_the_runtime_is_told_what_the_user_file_says(user_file: Path) -> None:
    user_file.write_text("weights_dir: /file/weights\nshm_dir: /file/shm\nhome: /file/home\n")
    assert settings.runtime_environment() == {
        "OMNICTL_HOME": "/file/home",
        "OMNICTL_WEIGHTS_DIR": "/file/weights",
        "OMNICTL_SHM_DIR": "/file/shm",
    }


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICTL_SHM_DIR", "")
    monkeypatch.setenv("OMNICTL_CONFIG", "")
    assert settings.shm_dir() == Path("/dev/shm")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hom: /x", r"hom: unknown key \(did you mean 'home'\?\)"),
        ("colour: red", "colour: unknown key .known: home, weights_dir"),
        ("home: models", "home: expected an absolute path, or one from ~, found 'models'"),
        ("home: 5", "found 5"),
        ("recipe_dirs: /x", "recipe_dirs: expected a list of folders, found '/x'"),
        ("recipe_dirs: [x]", "recipe_dirs: expected an absolute path"),
        ("recipes: [sidekick]", "recipes: expected recipe names with mappings of values"),
        ("recipes: {sidekick: 5}", "recipes: expected recipe names with mappings of values"),
        ("home: [", "line 2, column 1"),
    ],
)
def test_a_mistake_in_the_user_file_is_named(user_file: Path, text: str, expected: str) -> None:
    user_file.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        settings.home_dir()
    assert str(user_file) in caught.value.message


def test_a_user_file_that_was_asked_for_must_be_there(user_file: Path) -> None:
    with pytest.raises(ConfigError, match="user.yaml: cannot be read: No such file"):
        settings.home_dir()


def test_a_recipe_folder_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICTL_RECIPE_DIRS", f"{tmp_path}:{tmp_path}/missing")
    with pytest.raises(ConfigError, match="OMNICTL_RECIPE_DIRS: .*/missing is not a folder"):
        settings.recipe_dirs()


@pytest.mark.parametrize("name", ["OMNICTL_WEIGTHS_DIR", "OMNICTL_RECIPES_DIRS", "OMNICTL_SHMDIR"])
def test_a_variable_that_is_nearly_ours_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/x")
    with pytest.raises(ConfigError, match=rf"unknown variable {name} \(did you mean OMNICTL_"):
        settings.weights_dir()


def test_variables_that_an_orchestrator_injects_for_a_service_of_our_name_are_let_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMNICTL_SERVICE_HOST", "OMNICTL_PORT", "OMNICTL_PORT_8091_TCP", "OMNICTL_SERVICE_PORT"):
        monkeypatch.setenv(name, "tcp://10.0.0.1:8091")
    settings.check_environment()


def test_every_directory_setting_is_documented() -> None:
    text = settings.__doc__ or ""
    assert all(key in text for key in settings.DIR_VARIABLES)


def test_without_a_home_directory_there_is_an_error_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICTL_STATE_DIR", "~nobody-of-this-name/state")
    with pytest.raises(ConfigError, match="there is no home directory"):
        settings.state_dir()
