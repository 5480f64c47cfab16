"""Settings of the tool: from the environment, then from the user file, then a default. Read here only.

The user file is OMNICTL_CONFIG, default omnictl/config.yaml below $XDG_CONFIG_HOME or ~/.config:

    home: ~/models                     # also weights_dir, state_dir, shm_dir
    recipe_dirs: [~/my-recipes]        # folders of <org>/<model>.yaml
    recipes:
      MODEL: {stages.thinker.slots: 4}

The runtime has its own copy of what it needs (`runtime.settings`): the tool imports nothing else of it.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError

PREFIX = "OMNICTL_"
API_KEY_VARIABLE = "OMNICTL_API_KEY"
API_KEY_FILE_VARIABLE = "OMNICTL_API_KEY_FILE"
CONFIG_VARIABLE = "OMNICTL_CONFIG"
RECIPE_DIRS_VARIABLE = "OMNICTL_RECIPE_DIRS"
SET_VARIABLE = "OMNICTL_SET"
DIR_VARIABLES = {
    "home": "OMNICTL_HOME",
    "weights_dir": "OMNICTL_WEIGHTS_DIR",
    "state_dir": "OMNICTL_STATE_DIR",
    "shm_dir": "OMNICTL_SHM_DIR",
}
MEDIA_VARIABLES = tuple(
    f"OMNICTL_MEDIA_{name}"
    for name in ("MAX_BYTES", "MAX_AUDIOS", "MAX_IMAGES", "MAX_VIDEOS", "FETCH", "FETCH_TIMEOUT_S", "PRIVATE_HOSTS")
)
"""Read by the server alone."""
VARIABLES = (
    *DIR_VARIABLES.values(),
    API_KEY_VARIABLE,
    API_KEY_FILE_VARIABLE,
    CONFIG_VARIABLE,
    RECIPE_DIRS_VARIABLE,
    SET_VARIABLE,
    *MEDIA_VARIABLES,
)
USER_FILE = "user file"

DEFAULT_HOST = "127.0.0.1"
FIRST_PORT = 8091
"""Where the search for a free port begins. The only place where the number stands."""


@dataclass(frozen=True, slots=True)
class UserFile:
    """What the user file says; everything is unset when there is none."""

    dirs: Mapping[str, Path] = field(default_factory=dict)
    recipe_dirs: tuple[Path, ...] = ()
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def home_dir() -> Path:
    """Weights, downloads and conversions: OMNICTL_HOME, default ~/.cache/omnictl."""
    return _directory("home") or _expand("~/.cache/omnictl")


def weights_dir() -> Path:
    """OMNICTL_WEIGHTS_DIR, default `weights` below the home."""
    return _directory("weights_dir") or home_dir() / "weights"


def state_dir() -> Path:
    """Deployments, one folder each: OMNICTL_STATE_DIR, default omnictl below $XDG_STATE_HOME or ~/.local/state."""
    return _directory("state_dir") or _expand(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "omnictl"


def shm_dir() -> Path:
    """Where the runtime's arenas live: OMNICTL_SHM_DIR, default /dev/shm."""
    return _directory("shm_dir") or Path("/dev/shm")


def recipe_dirs() -> tuple[Path, ...]:
    """The user's recipe folders: OMNICTL_RECIPE_DIRS, separated by ':', or the user file's. ConfigError if missing."""
    if text := os.environ.get(RECIPE_DIRS_VARIABLE):
        source, dirs = RECIPE_DIRS_VARIABLE, tuple(_expand(part) for part in text.split(os.pathsep) if part)
    else:
        source, dirs = f"{user_file_path()}: recipe_dirs", user_file().recipe_dirs
    for folder in dirs:
        if not folder.is_dir():
            raise ConfigError(f"{source}: {folder} is not a folder")
    return dirs


def environment_overrides() -> list[str]:
    """Recipe overrides `a.b=c` from OMNICTL_SET, separated by ';'."""
    check_environment()
    return [part.strip() for part in os.environ.get(SET_VARIABLE, "").split(";") if part.strip()]


def recipe_overrides() -> Mapping[str, Mapping[str, Any]]:
    """Recipe name -> values, from the user file."""
    return user_file().recipes


def runtime_environment() -> dict[str, str]:
    """The variables that tell the runtime what the user file says; it reads the environment only."""
    return {
        DIR_VARIABLES["home"]: str(home_dir().absolute()),
        DIR_VARIABLES["weights_dir"]: str(weights_dir().absolute()),
        DIR_VARIABLES["shm_dir"]: str(shm_dir().absolute()),
    }


def check_environment() -> None:
    """Refuse a variable that is nearly one of ours. Others with our prefix are let be: orchestrators inject some."""
    known = [name.removeprefix(PREFIX) for name in VARIABLES]
    for name in os.environ:
        if not name.startswith(PREFIX) or name in VARIABLES:
            continue
        if near := difflib.get_close_matches(name.removeprefix(PREFIX), known, n=1, cutoff=0.85):
            raise ConfigError(f"environment: unknown variable {name} (did you mean {PREFIX}{near[0]}?)")


def user_file_path() -> Path:
    if chosen := os.environ.get(CONFIG_VARIABLE):
        return _expand(chosen)
    return _expand(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "omnictl" / "config.yaml"


def user_file() -> UserFile:
    """Read the user file. ConfigError when it holds a mistake, or is named by OMNICTL_CONFIG and not there."""
    path = user_file_path()
    if not os.path.exists(path) and not os.environ.get(CONFIG_VARIABLE):
        return UserFile()
    from omnictl.yaml_file import read_yaml

    data = read_yaml(path)
    known = (*DIR_VARIABLES, "recipe_dirs", "recipes")
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            expected = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{path}: {key}: unknown key ({expected})")
    return UserFile(
        dirs={key: _user_path(path, key, data[key]) for key in DIR_VARIABLES if data.get(key) is not None},
        recipe_dirs=tuple(_user_path(path, "recipe_dirs", value) for value in _list(path, data.get("recipe_dirs"))),
        recipes=_recipes(path, data.get("recipes")),
    )


def _expand(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ConfigError(f"{text}: there is no home directory", hint="set HOME, or OMNICTL_HOME and its kin") from None


def _directory(key: str) -> Path | None:
    check_environment()
    if chosen := os.environ.get(DIR_VARIABLES[key]):
        return _expand(chosen)
    return user_file().dirs.get(key)


def _user_path(path: Path, key: str, value: Any) -> Path:
    folder = _expand(value) if isinstance(value, str) else None
    if folder is None or not folder.is_absolute():
        raise ConfigError(f"{path}: {key}: expected an absolute path, or one from ~, found {value!r}")
    return folder


def _list(path: Path, value: Any) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"{path}: recipe_dirs: expected a list of folders, found {value!r}")
    return value or []


def _recipes(path: Path, value: Any) -> Mapping[str, Mapping[str, Any]]:
    recipes = value or {}
    if not isinstance(recipes, Mapping) or not all(isinstance(values, Mapping) for values in recipes.values()):
        raise ConfigError(f"{path}: recipes: expected recipe names with mappings of values, found {value!r}")
    return recipes
