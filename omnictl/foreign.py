"""Whether the package `runtime` that would be imported is ours: the name is a common one.

A foreign package that hides ours would end in an import error deep inside, so it is looked for before anything
of `runtime` is imported. Imports nothing of ours itself.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

OURS = Path(__file__).resolve().parent.parent / "runtime"


def runtime_location() -> Path | None:
    """Where the package `runtime` lies that would be imported; None when there is none."""
    spec = importlib.util.find_spec("runtime")
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None
