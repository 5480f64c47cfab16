"""What programs share while they load: strict settings, files that must be there, ONNX sessions.

Knows nothing of what the models do. Every failure here ends the start of a stage with an error that names the
stage, the file or key, and the next step.
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from pydantic import ValidationError

from runtime.engines.base import LoadContext
from runtime.errors import ConfigError, EnvironmentProblem, WeightsError
from runtime.plan import Strict

Settings = TypeVar("Settings", bound=Strict)


def read_settings(model: type[Settings], context: LoadContext) -> Settings:
    """The stage's `program_settings` as `model`; ConfigError that lists every wrong key and value."""
    try:
        return model(**context.stage.program_settings)
    except ValidationError as exc:
        problems = tuple(_problem(model, error) for error in exc.errors())
    raise ConfigError(
        f"stage {context.stage.name}: program_settings: {'; '.join(problems)}",
        hint=f"known settings: {', '.join(sorted(model.model_fields))}",
        problems=problems,
    )


def _problem(model: type[Strict], error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] != "extra_forbidden":
        return f"{key}: {error['msg']}, got {error['input']!r}"
    near = difflib.get_close_matches(key, model.model_fields, n=1)
    return f"{key}: unknown key" + (f" (did you mean {near[0]!r}?)" if near else "")


def require_files(context: LoadContext, *names: str) -> list[Path]:
    """Paths of files in the stage's weights folder; WeightsError naming the first that is missing or empty."""
    if context.weights_dir is None:
        raise WeightsError(
            f"stage {context.stage.name}: the plan names no weights; the program needs {', '.join(names)}"
        )
    paths = [context.weights_dir / name for name in names]
    for path in paths:
        if not path.is_file() or path.stat().st_size == 0:
            raise WeightsError(
                f"stage {context.stage.name}: {path} is missing or empty",
                hint="fetch the weights again with `omnictl pull`",
            )
    return paths


def require_module(name: str, stage: str) -> ModuleType:
    """Import a library that the stage cannot do without; EnvironmentProblem naming it."""
    try:
        return importlib.import_module(name)
    except ImportError as exc:
        raise EnvironmentProblem(
            f"stage {stage}: the library {name!r} cannot be imported: {exc}",
            hint="install the runtime's libraries: pip install 'omnictl-serve[cpu]'",
        ) from exc


def open_session(path: Path, num_threads: int, stage: str) -> Any:
    """An onnxruntime session on the CPU. WeightsError when the file is not a model.

    The memory arena is off: inputs have another length on every call, and an arena would keep the sum of the
    largest blocks it ever saw, for a saving that is lost in the noise at these sizes.
    """
    runtime = require_module("onnxruntime", stage)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 3
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as exc:  # onnxruntime's errors have no common base class
        raise WeightsError(
            f"stage {stage}: {path} cannot be loaded: {exc}", hint="fetch the weights again with `omnictl pull`"
        ) from exc
