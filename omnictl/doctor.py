"""What could keep a deployment from working here: each fact judged, with the remedy.

A check that cannot be made is a finding itself: `doctor` is run where things are broken. Changes nothing.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from omnictl import installed, settings
from omnictl.foreign import runtime_location
from omnictl.ports import first_free_port, is_bound
from omnictl.state import State, Store
from omnictl.units import GIB, MIB, format_bytes
from runtime.errors import OmniError

MIN_FREE_MEMORY_BYTES = 2 * GIB
MIN_FREE_DISK_BYTES = 2 * GIB
MIN_SHM_BYTES = 256 * MIB
"""A container's default of 64 MiB is less than what a few requests with audio have in flight."""
MIN_OPEN_FILES = 1024
DECODERS = ("pcm_s16le", "mp3float", "flac", "vorbis", "opus", "aac")
ENCODERS = ("libmp3lame", "flac", "libopus", "aac")
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
LOCAL_NAMES = ("localhost", "127.0.0.1", "*")


class Level(StrEnum):
    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    group: str
    name: str
    level: Level
    detail: str
    remedy: str = ""

    def to_document(self) -> dict[str, Any]:
        return asdict(self) | {"level": str(self.level)}


Judged = Iterator[tuple[str, Level, str, str]]
"""name, level, detail, remedy"""


def examine() -> list[Finding]:
    """Every check, grouped."""
    found = []
    for group, checks in CHECKS.items():
        for check in checks:
            found += [Finding(group, *judged) for judged in _made(check)]
    return found


def _made(check: Callable[[], Judged]) -> Judged:
    """What a check finds; its own failure is a finding too, whatever it is."""
    name = check.__name__.strip("_").replace("_", " ")
    try:
        yield from check()
    except OmniError as error:
        yield name, Level.FAIL, error.message, error.hint or ""
    except Exception as error:
        yield name, Level.FAIL, f"cannot be checked: {type(error).__name__}: {error}", ""


# ---- environment ------------------------------------------------------------------------------------


def _python() -> Judged:
    yield "python", Level.OK, f"{platform.python_version()} at {sys.executable}", ""


def _packages() -> Judged:
    extra = installed.engine_extra()
    for requirement in installed.requirements(extra):
        problem = requirement.problem
        if problem is not None:
            yield requirement.name, Level.FAIL, problem, installed.install_command(extra)
        elif requirement.operator == "==":
            yield requirement.name, Level.OK, f"{requirement.installed} (required: {requirement.wanted})", ""


def _runtime_package() -> Judged:
    # A foreign one is refused at the start of every command, this one too: see omnictl.__main__.
    yield "runtime package", Level.OK, str(runtime_location()), ""


def _settings() -> Judged:
    settings.check_environment()
    settings.user_file()
    yield "settings", Level.OK, f"user file {settings.user_file_path()}", ""


# ---- machine ----------------------------------------------------------------------------------------


def _hardware() -> Judged:
    from omnictl.hardware import probe

    machine = probe()
    free = f"{format_bytes(machine.cpu.free_bytes)} of {format_bytes(machine.cpu.total_bytes)} free"
    is_little = machine.cpu.free_bytes < MIN_FREE_MEMORY_BYTES
    yield "memory", Level.WARN if is_little else Level.OK, free, "end other programs" if is_little else ""
    yield "cpu", Level.OK, f"{machine.cpu.num_cores} cores, {machine.cpu.name}", ""
    for gpu in machine.gpus:
        yield f"gpu {gpu.index}", Level.OK, f"{gpu.name}, {format_bytes(gpu.free_bytes)} free", ""
    for finding in machine.findings:
        yield finding.subject, Level.OK if finding.level == "info" else Level.WARN, finding.text, ""


def _shared_memory() -> Judged:
    folder = settings.shm_dir()
    if not os.access(folder, os.W_OK | os.X_OK):
        yield "shared memory", Level.FAIL, f"{folder} cannot be written", "set OMNICTL_SHM_DIR to a folder in memory"
        return
    usage = shutil.disk_usage(folder)
    detail = f"{folder}: {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
    is_little = usage.free < MIN_SHM_BYTES
    remedy = "docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm" if is_little else ""
    yield "shared memory", Level.WARN if is_little else Level.OK, detail, remedy


def _disk() -> Judged:
    for name, folder in (("weights", settings.weights_dir()), ("state", Store().root)):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        detail = f"{folder}: {format_bytes(shutil.disk_usage(existing).free)} free"
        if not os.access(existing, os.W_OK | os.X_OK):
            variable = settings.DIR_VARIABLES[f"{name}_dir"]
            yield f"{name} folder", Level.FAIL, f"{existing} cannot be written", f"set {variable} to another folder"
        elif shutil.disk_usage(existing).free < MIN_FREE_DISK_BYTES:
            yield f"{name} folder", Level.WARN, detail, "free some space"
        else:
            yield f"{name} folder", Level.OK, detail, ""


def _open_files() -> Judged:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_little = soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES
    remedy = f"ulimit -n {MIN_OPEN_FILES}" if is_little else ""
    yield "open files", Level.WARN if is_little else Level.OK, f"limit {soft}", remedy


# ---- network ----------------------------------------------------------------------------------------


def _ports() -> Judged:
    host, first = settings.DEFAULT_HOST, settings.FIRST_PORT
    if not is_bound(host, first):
        yield "port", Level.OK, f"{first} is free", ""
    else:
        yield "port", Level.OK, f"{first} is taken; the next `up` gets {first_free_port(host, ())}", ""


def _proxies() -> Judged:
    found = {name: value for name in PROXY_VARIABLES if (value := _either_case(name))}
    if not found:
        yield "proxy", Level.OK, "none set", ""
        return
    detail = ", ".join(f"{name}={_without_password(value)}" for name, value in found.items())
    exempt = [part.strip() for part in _either_case("NO_PROXY").split(",")]
    if any(name in exempt for name in LOCAL_NAMES):
        yield "proxy", Level.OK, detail, ""
    else:
        problem = f"{detail}: curl and SDKs will send requests for this machine there too"
        yield "proxy", Level.WARN, problem, "export NO_PROXY=localhost,127.0.0.1"


def _either_case(name: str) -> str:
    return os.environ.get(name) or os.environ.get(name.lower()) or ""


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//***@", url)


# ---- media, models and deployments ------------------------------------------------------------------


def _codecs() -> Judged:
    try:
        import av
    except ImportError as error:
        yield "decoders", Level.FAIL, f"no sound can be read or written: {error}", installed.install_command()
        return
    for name, mode, kinds in (("decoders", "r", DECODERS), ("encoders", "w", ENCODERS)):
        missing = [kind for kind in kinds if not _has_codec(av, kind, mode)]
        if missing:
            yield name, Level.FAIL, f"missing: {', '.join(missing)}", "pip install --force-reinstall av"
        else:
            yield name, Level.OK, ", ".join(kinds), ""


def _has_codec(av: Any, kind: str, mode: str) -> bool:
    try:
        av.codec.Codec(kind, mode)
    except ValueError:
        return False
    return True


def _recipes() -> Judged:
    from omnictl.recipe import find_recipes, load_recipe
    from omnictl.weights import find_problems

    for entry in find_recipes():
        try:
            recipe = load_recipe(entry.model_id)
        except OmniError as error:
            yield entry.model_id, Level.WARN, error.message, f"omnictl recipes validate {entry.path}"
            continue
        if missing := installed.missing_modules(recipe.omnictl.imports):
            yield recipe.name, Level.WARN, f"needs missing modules: {', '.join(missing)}", installed.install_command()
        elif problems := find_problems(recipe):
            detail = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
            yield recipe.name, Level.WARN, f"weights {detail}", f"omnictl pull {recipe.name}"
        else:
            yield recipe.name, Level.OK, "weights and modules are there", ""


def _deployments() -> Judged:
    store = Store()
    for name in store.names():
        try:
            deployment = store.load(name)
        except OmniError as error:
            yield name, Level.WARN, error.message, f"omnictl down {name}"
            continue
        if deployment.observed in (State.DEAD, State.FAILED):
            detail = f"{deployment.observed} (started {deployment.started_at})"
            yield name, Level.WARN, detail, f"omnictl logs --name {name}; omnictl down {name}"
        else:
            yield name, Level.OK, f"{deployment.observed} at {deployment.url}", ""


CHECKS: Mapping[str, tuple[Callable[[], Judged], ...]] = {
    "environment": (_python, _packages, _runtime_package, _settings),
    "machine": (_hardware, _shared_memory, _disk, _open_files),
    "network": (_ports, _proxies),
    "media": (_codecs,),
    "recipes": (_recipes,),
    "deployments": (_deployments,),
}
