"""Entry point of `omnictl` and of `python -m omnictl`: makes sure that `runtime` is ours before it is imported.

The name is a common one. A foreign package that hides ours would end in an import error deep inside, here or in
the server, so it is looked for first. Imports nothing of ours itself.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

EXIT_ENVIRONMENT = 5
"""As runtime.errors.EnvironmentProblem, which cannot be imported yet."""


def runtime_location() -> Path | None:
    """Where the package `runtime` lies that would be imported; None when there is none."""
    spec = importlib.util.find_spec("runtime")
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return Path(spec.origin).resolve() if spec.origin else None


def main() -> None:
    found, ours = runtime_location(), Path(__file__).resolve().parent.parent / "runtime"
    if found != ours:
        sys.stderr.write(
            f"error: the package 'runtime' of omnictl at {ours} is hidden by {found or 'nothing at all'}\n"
        )
        sys.stderr.write("hint: take its folder out of PYTHONPATH, or uninstall the package that brought it\n")
        sys.exit(EXIT_ENVIRONMENT)
    from omnictl.cli import main as run

    run()


if __name__ == "__main__":
    main()
