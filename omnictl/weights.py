"""The weights of a recipe on this machine: are they there and whole, and if not, get them.

`pulling` does the work; here is what `pull`, `up` and `doctor` ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omnictl import settings
from runtime.errors import WeightsError

if TYPE_CHECKING:
    from omnictl.download import DownloadLimits
    from omnictl.recipe import Recipe
    from omnictl.recipe_schema import Weights


@dataclass(frozen=True, slots=True)
class WeightsState:
    """One folder after `ensure_weights`. `state`: "cached" it was whole, "pulled" absent, "repaired" damaged."""

    name: str
    state: str
    folder: Path
    size_bytes: int
    license: str
    source: str
    problem: str | None


def find_problems(recipe: Recipe, *, root: Path | None = None, full: bool = False) -> dict[str, str]:
    """Weights of the recipe that cannot be served -> why. Reads only; with `full`, every byte."""
    from omnictl.manifest import find_problem

    root = root or settings.weights_dir()
    checked = {name: find_problem(root / name, entry, full=full) for name, entry in recipe.omnictl.weights.items()}
    return {name: problem for name, problem in checked.items() if problem is not None}


def ensure_weights(
    recipe: Recipe, *, root: Path | None = None, full: bool = False, limits: DownloadLimits | None = None
) -> list[WeightsState]:
    """Make sure that all weights of a recipe are on disk, fetching what is missing or damaged; how each one was.

    Touches neither the network nor the disk when all are whole. WeightsError when they cannot be had; what has
    arrived by then is kept for the next call, and no folder is left half made.
    """
    root = root or settings.weights_dir()
    problems = find_problems(recipe, root=root, full=full)
    _require_provided(recipe, root, problems)
    if problems:
        from omnictl.download import DownloadLimits
        from omnictl.progress import show_progress
        from omnictl.pulling import Pull

        wanted = {name: recipe.omnictl.weights[name] for name in problems}
        with show_progress() as progress:
            Pull(root, progress, limits or DownloadLimits()).run(wanted, full=full)
    return [_state(name, entry, root, problems) for name, entry in recipe.omnictl.weights.items()]


def _require_provided(recipe: Recipe, root: Path, problems: Mapping[str, str]) -> None:
    """WeightsError for a folder that nobody but the user can fill."""
    for name, problem in problems.items():
        entry = recipe.omnictl.weights[name]
        if entry.provided:
            raise WeightsError(
                f"weights {name}: {problem}; {entry.source} ({entry.license}) is not in a package index",
                hint=f"put its files, under their own names, into {root / name}",
            )


def _state(name: str, entry: Weights, root: Path, problems: Mapping[str, str]) -> WeightsState:
    from omnictl.manifest import ABSENT, read_manifest

    problem = problems.get(name)
    state = "cached" if problem is None else "pulled" if problem == ABSENT else "repaired"
    folder = root / name
    manifest = None if entry.provided else read_manifest(folder)
    size_bytes = manifest.size_bytes if manifest else sum(p.stat().st_size for p in folder.iterdir() if p.is_file())
    return WeightsState(name, state, folder, size_bytes, entry.license, entry.source, problem)
