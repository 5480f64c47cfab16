"""Which packages are installed, against what this distribution asks for. Reads metadata, imports nothing.

`up` asks before it spends anything, so that a missing or partly upgraded engine is named with the one command
that mends it, not by an import error deep inside a worker. `doctor` and `version` show the same facts.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.errors import EnvironmentProblem

DISTRIBUTION = "omnictl-serve"
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^]]*\])?(?P<operator>==|>=)?(?P<version>[\w.+]*)")
_EXTRA = re.compile(r"extra == ['\"](?P<extra>[\w-]+)['\"]")


@dataclass(frozen=True, slots=True)
class Requirement:
    """One package of an extra. `installed` is None when it is missing; `operator` is "==", ">=" or ""."""

    name: str
    operator: str
    version: str
    installed: str | None

    @property
    def problem(self) -> str | None:
        if self.installed is None:
            return f"{self.name} is not installed; required: {self.wanted}"
        if self._is_satisfied(self.installed):
            return None
        return f"{self.name} {self.installed} is installed; required: {self.wanted}"

    @property
    def wanted(self) -> str:
        return f"{self.operator}{self.version}" or "any version"

    def _is_satisfied(self, installed: str) -> bool:
        if self.operator == "==":
            # A local part (2.13.0+cpu) tells the build, not the version.
            return installed.partition("+")[0] == self.version
        return not self.operator or _release(installed) >= _release(self.version)


def own_version() -> str:
    return installed_version(DISTRIBUTION) or "unknown (not installed as a package)"


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def engine_extra() -> str:
    """The extra that this environment was installed with: cuda when CUDA's vllm is there, else cpu."""
    return "cuda" if installed_version("vllm") is not None else "cpu"


def requirements(extra: str) -> list[Requirement]:
    """What the extra asks for and what is there, by name."""
    try:
        texts = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = []
    for text in texts:
        marker = _EXTRA.search(text)
        match = _REQUIREMENT.match(text)
        if match is not None and marker is not None and marker["extra"] == extra:
            name = match["name"]
            found.append(Requirement(name, match["operator"] or "", match["version"], installed_version(name)))
    return sorted(found, key=lambda requirement: requirement.name)


def install_command(extra: str | None = None) -> str:
    return f"pip install '{DISTRIBUTION}[{extra or engine_extra()}]=={own_version()}' (in a checkout: make install)"


def require_imports(recipe: str, modules: Iterable[str]) -> None:
    """EnvironmentProblem naming every module that a recipe needs and that is missing or of a wrong version."""
    wanted = tuple(modules)
    if not wanted:
        return
    problems = [f"module {module!r} is missing" for module in missing_modules(wanted)]
    present = [r for r in requirements(engine_extra()) if r.installed is not None]
    problems += [r.problem for r in present if r.problem is not None]
    if problems:
        message = f"recipe {recipe!r} cannot run in this environment"
        raise EnvironmentProblem(message, problems=tuple(problems), hint=install_command())


def missing_modules(modules: Iterable[str]) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version's release part: 2.13.0+cpu -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
