"""Entry point of `omnictl` and of `python -m omnictl`: checks that `runtime` is ours before it is imported."""

from __future__ import annotations

import sys

from omnictl.foreign import OURS, runtime_location

EXIT_ENVIRONMENT = 5
"""As runtime.errors.EnvironmentProblem, which cannot be imported yet."""


def main() -> None:
    found = runtime_location()
    if found != OURS:
        sys.stderr.write(
            f"error: the package 'runtime' of omnictl at {OURS} is hidden by {found or 'nothing at all'}\n"
        )
        sys.stderr.write("hint: take its folder out of PYTHONPATH, or uninstall the package that brought it\n")
        sys.exit(EXIT_ENVIRONMENT)
    from omnictl.cli import main as run

    run()


if __name__ == "__main__":
    main()
