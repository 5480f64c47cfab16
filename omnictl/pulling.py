"""One pull of weights, from the lock to the last rename.

A weights folder appears in one rename, complete and with its manifest, or not at all. Everything unfinished lies in
`.pull` below the weights root: partial downloads, which the next pull continues, and the folder in the making, which
it throws away. One pull at a time works there. Called by `weights`.
"""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from omnictl import settings
from omnictl.download import DownloadLimits
from omnictl.locks import exclusive
from omnictl.manifest import find_problem, write_manifest
from omnictl.packages import Packages
from omnictl.units import format_bytes
from omnictl.unpack import unpack
from runtime.errors import OmniError, WeightsError, from_fields

if TYPE_CHECKING:
    from omnictl.progress import Progress
    from omnictl.recipe_schema import Weights, WeightsPackage

LOCK_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 900.0
UNPACKED_SHARE = 1.25
"""Bytes of files for each byte of a package: what weights compress to, with some room."""


class Pull:
    """Work in the weights root `root`; `limits` bound each transfer."""

    def __init__(self, root: Path, progress: Progress, limits: DownloadLimits) -> None:
        self._root = root
        self._progress = progress
        self._work = root / ".pull"
        self._downloads = self._work / "downloads"
        self._staging = self._work / "staging"
        self._replaced = self._work / "replaced"
        self._packages = Packages(self._downloads, progress, limits)

    def run(self, wanted: Mapping[str, Weights], *, full: bool) -> None:
        """Have every one of the wanted folders whole. WeightsError when that cannot be."""
        with _disk_faults(self._root):
            self._downloads.mkdir(parents=True, exist_ok=True)
            with exclusive(self._work / "lock", LOCK_TIMEOUT_S, self._progress.say, WeightsError):
                self._sweep()
                try:
                    self._run_locked(wanted, full=full)
                except KeyboardInterrupt:
                    self._progress.say("interrupted; what has arrived is kept and the same command continues there")
                    raise
                finally:
                    self._sweep()

    def _run_locked(self, wanted: Mapping[str, Weights], *, full: bool) -> None:
        missing = {}
        for name, entry in wanted.items():
            # Asked again under the lock: another pull may have done the work while this one waited.
            if (problem := find_problem(self._root / name, entry, full=full)) is not None:
                doing = "fetching" if entry.packages else "building"
                self._progress.say(f"{name}: {problem}; {doing} {entry.source} ({entry.license})")
                missing[name] = entry
        self._check_space(missing)
        self._packages.fetch(_packages(missing).values())
        while missing:
            name = next(iter(missing))
            entry = missing.pop(name)
            self._install(name, entry)
            still_needed = _packages(missing)
            self._packages.drop(p for p in entry.packages if p.requirement not in still_needed)

    def _check_space(self, missing: Mapping[str, Weights]) -> None:
        needed_bytes = sum(entry.converted_bytes for entry in missing.values())
        for package in _packages(missing).values():
            needed_bytes += round(package.size_bytes * (1 + UNPACKED_SHARE)) - self._packages.kept_bytes(package)
        free_bytes = shutil.disk_usage(self._work).free
        if needed_bytes > free_bytes:
            raise WeightsError(
                f"{self._root}: {format_bytes(free_bytes)} free, but fetching {', '.join(missing)} takes "
                f"{format_bytes(needed_bytes)}",
                hint=f"free some space, or choose another disk with {settings.DIR_VARIABLES['weights_dir']}",
            )

    def _install(self, name: str, entry: Weights) -> None:
        folder = self._staging / name
        folder.mkdir(parents=True)
        unpack(entry, {p.requirement: self._packages.path(p) for p in entry.packages}, folder)
        if entry.convert is not None:
            with self._progress.work(f"{name}: {'converting' if entry.packages else 'building'}"):
                convert(entry.convert, folder)
        write_manifest(folder, name, entry)
        self._publish(name, folder)
        self._progress.say(f"{name}: ready in {self._root / name}")

    def _publish(self, name: str, folder: Path) -> None:
        """Put a finished folder in its place; a deployment that has the old one open keeps its files."""
        place = self._root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            old = self._replaced / name
            old.parent.mkdir(parents=True, exist_ok=True)
            place.rename(old)
        folder.rename(place)

    def _sweep(self) -> None:
        """Remove folders in the making, of this pull or of one that died, and those that were replaced."""
        for folder in (self._staging, self._replaced):
            shutil.rmtree(folder, ignore_errors=True)


def _packages(entries: Mapping[str, Weights]) -> dict[str, WeightsPackage]:
    """The packages of some weights by requirement: two folders can be made from one."""
    return {package.requirement: package for entry in entries.values() for package in entry.packages}


def convert(converter: str, folder: Path) -> None:
    """Run a converter of the runtime on a folder, in a process that ends with this one.

    OmniError as the converter reports it; WeightsError when it ends without a report or not in time.
    """
    command = [sys.executable, "-P", "-m", "runtime.convert", converter, str(folder)]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CONVERT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise WeightsError(f"converter {converter} did not end within {CONVERT_TIMEOUT_S:.0f} s") from None
    if result.returncode != 0:
        raise _reported(result.stdout) or WeightsError(
            f"converter {converter} ended with code {result.returncode}: {result.stderr.strip()[-300:] or 'no output'}"
        )


def _reported(text: str) -> OmniError | None:
    try:
        return from_fields(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return None


@contextmanager
def _disk_faults(root: Path) -> Iterator[None]:
    """What the disk can do to a pull, in words that name the place and the way out."""
    try:
        yield
    except OSError as exc:
        full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
        raise WeightsError(
            f"{exc.filename or root}: {exc.strerror or exc}",
            hint="free some space; what has arrived is kept and the same command continues there"
            if full
            else f"another place for weights is chosen with {settings.DIR_VARIABLES['weights_dir']}",
        ) from exc
