"""Recipes: found by short name, model id or file, overridden, validated, with the source of every value.

Layers, strongest first: command line > environment > user file > recipe's placement > its tiny build where that is
wanted > recipe > default. All but the last are laid over the raw file before it is validated, so an override is checked
like the file itself.
Placing a recipe on hardware is `placement`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omnictl import overrides as layers
from omnictl import schema, settings, splits
from omnictl.overrides import Override
from omnictl.recipe_schema import Meta, Model, Omnictl, RecipeFile
from omnictl.yaml_file import read_yaml
from runtime.errors import ConfigError, ModelNotFound

DEFAULT = "default"
FROM_RECIPE = "recipe"
TINY = "tiny"
"""The section of a recipe that says what differs in its tiny build, and the source of those values."""
FILE_ENDINGS = (".yaml", ".yml")
BY_FILE, BY_MODEL_ID, BY_SHORT_NAME = "file", "model id", "short name"


@dataclass(frozen=True, slots=True)
class Placed:
    """A recipe's values where one of its placements is used. `sources`: dotted path -> where the value came from."""

    values: Omnictl
    sources: Mapping[str, str]

    def source(self, path: str) -> str:
        """The source of a value, or of the mapping or list that holds it."""
        while path not in self.sources and "." in path:
            path = path.rpartition(".")[0]
        return self.sources.get(path, DEFAULT)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A loaded recipe. `omnictl` holds the values before a placement is chosen, `placed` those with each of them."""

    meta: Meta
    model: Model
    omnictl: Omnictl
    placed: Mapping[str, Placed]
    path: Path
    matched: str

    @property
    def name(self) -> str:
        return self.omnictl.short_names[0]


@dataclass(frozen=True, slots=True)
class RecipeEntry:
    """A recipe file in a recipe folder; `short_names` is empty when the file cannot be read."""

    model_id: str
    path: Path
    short_names: tuple[str, ...]


def load_recipe(name: str, *, overrides: Sequence[str] = (), tiny: bool = False) -> Recipe:
    """Find, override and validate a recipe. `overrides` are `a.b=c` texts of the command line. `tiny`: as it is served
    with its tiny build.

    Raises ModelNotFound with the nearest name, or ConfigError with every problem of the file and the overrides, also
    when it has no tiny build.
    """
    path, matched = resolve(name)
    data = read_yaml(path)
    base = _made_tiny(path, data) if tiny else []
    texts = [(text, settings.SET_VARIABLE) for text in settings.environment_overrides()]
    texts += [(text, layers.COMMAND_LINE) for text in overrides]
    chosen = [*_user_overrides(path, data), *(layers.parse_override(text, source) for text, source in texts)]
    return _build(path, matched, data, base, chosen)


def _made_tiny(path: Path, data: dict[str, Any]) -> list[Override]:
    """Put the sections of the tiny build into their places in `data`; what is to be laid over its stages."""
    file, _, problems = _validate(path, data, ())
    if file is None:
        raise _invalid(path, problems)
    values = file.omnictl
    if values.tiny is None:
        raise ConfigError(
            f"recipe {values.short_names[0]} has no tiny build",
            hint="serve it without --tiny, or choose a recipe that has a section `tiny`",
        )
    raw = data[layers.SECTION].pop(TINY)
    data[layers.SECTION] |= {section: raw[section] for section in ("weights", "placements")}
    data["model"]["context_length"] = raw["context_length"]
    return list(layers.flatten({"stages": raw.get("stages", {})}, TINY))


def resolve(name: str) -> tuple[Path, str]:
    """The file that a name stands for, and the rule that matched: file, then model id, then short name."""
    if name.endswith(FILE_ENDINGS) or name.startswith((".", "/", "~")):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ModelNotFound(f"recipe {name!r}: no such file", hint="omnictl recipes list shows recipes by name")
        return path, BY_FILE
    entries = find_recipes()
    by_id = {entry.model_id: entry.path for entry in reversed(entries)}
    if name in by_id:
        return by_id[name], BY_MODEL_ID
    if matches := [entry.path for entry in entries if name in entry.short_names]:
        if len(matches) > 1 and matches[0].parent.parent == matches[1].parent.parent:
            raise ConfigError(f"short name {name!r} belongs to {matches[0]} and {matches[1]}", hint="use a model id")
        return matches[0], BY_SHORT_NAME
    known = {*by_id, *(short for entry in entries for short in entry.short_names)}
    raise ModelNotFound(
        f"no recipe is called {name!r}{schema.nearest(name, known)}",
        hint=f"omnictl recipes list; searched {', '.join(map(str, recipe_dirs()))}",
        param="name",
    )


def recipe_dirs() -> tuple[Path, ...]:
    """Folders of <org>/<model>.yaml files. The user's come first: a recipe there hides one of the same name."""
    return (*settings.recipe_dirs(), bundled_dir())


def bundled_dir() -> Path:
    """`_recipes` in an installed package, else the checkout's `recipes`."""
    package = Path(__file__).resolve().parent
    installed = package / "_recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def find_recipes() -> list[RecipeEntry]:
    """Every recipe file of every folder, also broken ones, without those that an earlier folder hides."""
    found: dict[str, RecipeEntry] = {}
    for folder in recipe_dirs():
        for path in sorted(folder.glob("*/*.yaml")):
            model_id = f"{path.parent.name}/{path.stem}"
            found.setdefault(model_id, RecipeEntry(model_id, path, _short_names(path)))
    return list(found.values())


def _short_names(path: Path) -> tuple[str, ...]:
    try:
        names = read_yaml(path).get(layers.SECTION, {}).get("short_names", ())
    except (ConfigError, AttributeError):
        return ()
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _user_overrides(path: Path, data: Mapping[str, Any]) -> Iterator[Override]:
    """What the user file says under `recipes` about this recipe. A name there that no recipe has is an error."""
    wanted = settings.recipe_overrides()
    if not wanted:
        return
    model = data.get("model")
    own = {*_short_names(path), str(model.get("model_id")) if isinstance(model, Mapping) else ""}
    known = own.union(*({entry.model_id, *entry.short_names} for entry in find_recipes()))
    for name, values in wanted.items():
        if name not in known:
            raise ConfigError(f"{settings.user_file()}: recipes.{name}: unknown recipe{schema.nearest(name, known)}")
        if name in own:
            yield from layers.flatten(values, settings.USER_FILE)


def _build(
    path: Path, matched: str, data: dict[str, Any], base: Sequence[Override], chosen: Sequence[Override]
) -> Recipe:
    """Overrides of `base` are weaker than those of a placement, those that were chosen stronger."""
    file, _, problems = _validate(path, data, [*base, *chosen])
    if file is None:
        raise _invalid(path, problems)
    placed = {}
    for name, placement in file.omnictl.placements.items():
        own = layers.flatten({"stages": placement.stages}, f"placement {name}") if placement.stages else ()
        variant, sources, found = _validate(path, data, [*base, *own, *chosen])
        problems += [problem for problem in found if problem not in problems]
        if variant is not None:
            placed[name] = Placed(*splits.cut(variant.omnictl, sources, name))
    expected_id = f"{path.parent.name}/{path.stem}"
    if matched != BY_FILE and file.model.model_id != expected_id:
        problems.append(
            f"{path}: model.model_id: expected {expected_id!r} as its path says, found {file.model.model_id!r}"
        )
    if problems:
        raise _invalid(path, problems)
    return Recipe(file.meta, file.model, file.omnictl, placed, path, matched)


def _validate(
    path: Path, raw: dict[str, Any], chosen: Iterable[Override]
) -> tuple[RecipeFile | None, dict[str, str], list[str]]:
    """Lay overrides over the raw file: the models, the source of each value, and every problem."""
    data = copy.deepcopy(raw)
    applied, problems = layers.apply(RecipeFile, data, chosen)
    file, found = schema.validate(RecipeFile, data)
    for place, text in found:
        override = _covering(place, applied)
        where = f"{override.source} {layers.short(place)}" if override else f"{path}: {schema.dotted(place) or 'file'}"
        problems.append(f"{where}: {text}")
    sources = _sources(data, applied) if file is not None else {}
    return cast("RecipeFile | None", file), sources, problems


def _covering(place: schema.Path, applied: Mapping[schema.Path, Override]) -> Override | None:
    """The override that set the value at a place: its own, that of what holds it, or that of an item of it."""
    for end in range(len(place), 0, -1):
        if place[:end] in applied:
            return applied[place[:end]]
    return next((override for path, override in applied.items() if path[: len(place)] == place), None)


def _sources(data: dict[str, Any], applied: Mapping[schema.Path, Override]) -> dict[str, str]:
    sources = {}
    for place in _leaves(data):
        override = _covering(place, applied)
        sources[layers.short(place)] = override.source if override else FROM_RECIPE
    for place, override in applied.items():
        if override.value is None:
            sources[layers.short(place)] = f"{DEFAULT}, unset by {override.source}"
    return sources


def _leaves(value: Any, prefix: schema.Path = ()) -> Iterator[schema.Path]:
    """Paths of plain values; a list of plain values counts as one."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        items = enumerate(value)
    children = [leaf for key, child in items for leaf in _leaves(child, (*prefix, str(key)))]
    yield from children or [prefix]


def _invalid(path: Path, problems: Sequence[str]) -> ConfigError:
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError(f"recipe {path}: {len(problems)} problems", problems=tuple(problems))
