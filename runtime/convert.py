"""Turns fetched weight files into what programs load: `python -P -m runtime.convert NAME FOLDER`.

The tool runs it in a process of its own, because converters need the heavy libraries that the tool never imports.
Works in place. A failure is one JSON document on stdout, {"error": fields of the error}; the libraries' chatter
goes to stderr.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
from pathlib import Path

from runtime.engines.base import resolve
from runtime.errors import ConfigError, EnvironmentProblem, OmniError, WeightsError
from runtime.lifeline import die_with_parent
from runtime.programs import CONVERTERS


def convert(name: str, folder: Path) -> None:
    """Run the converter `name` on a folder.

    ConfigError when there is no such converter, EnvironmentProblem when a library is missing, WeightsError otherwise.
    """
    if name not in CONVERTERS:
        near = difflib.get_close_matches(name, CONVERTERS, n=1)
        raise ConfigError(
            f"unknown converter {name!r}" + (f" (did you mean {near[0]!r}?)" if near else ""),
            hint=f"known converters: {', '.join(sorted(CONVERTERS))}",
        )
    try:
        resolve(CONVERTERS[name])(folder)
    except OmniError:
        raise
    except ImportError as exc:
        raise EnvironmentProblem(
            f"converter {name}: {exc}", hint="install what runs models: pip install 'omnictl-serve[cpu]'"
        ) from exc
    except Exception as exc:
        raise WeightsError(f"converter {name} failed: {type(exc).__name__}: {exc}") from exc


def main() -> int:
    if len(sys.argv) != 3:
        sys.stderr.write("usage: python -P -m runtime.convert NAME FOLDER\n")
        return ConfigError.exit_code
    die_with_parent(os.getppid())
    try:
        convert(sys.argv[1], Path(sys.argv[2]))
    except OmniError as exc:
        json.dump({"error": exc.to_fields()}, sys.stdout)
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
