"""The manifest of an installed weights folder: what is in it and what it was made from.

It is written last and the folder appears under its name in one rename, so a folder without a manifest, or one that
differs from it, is not half installed but damaged. Pure file system; what to do about it is decided by `weights`
and `pulling`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from omnictl.download import file_sha256
from omnictl.recipe_schema import Weights
from runtime.plan import Strict

MANIFEST_NAME = "manifest.json"
ABSENT = "not there"
SCHEMA_VERSION = 1


class ManifestFile(Strict):
    """`mtime_ns` is what lets a check skip the checksum of a file that nobody has touched since."""

    name: str
    size_bytes: int
    mtime_ns: int
    sha256: str


class Manifest(Strict):
    schema_version: int
    weights: str
    license: str
    source: str
    origin: str
    """Checksum of the recipe's entry, as far as it decides what is in the folder."""
    packages: tuple[str, ...]
    convert: str | None
    convert_version: int
    files: tuple[ManifestFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def write_manifest(folder: Path, name: str, weights: Weights) -> Manifest:
    """Record every file of a finished folder, after making sure that all of it is on the disk."""
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        weights=name,
        license=weights.license,
        source=weights.source,
        origin=_origin(weights),
        packages=tuple(package.requirement for package in weights.packages),
        convert=weights.convert,
        convert_version=weights.convert_version,
        files=tuple(_describe(folder, path) for path in sorted(_files(folder))),
    )
    path = folder / MANIFEST_NAME
    path.write_text(manifest.model_dump_json(indent=2) + "\n")
    _settle(path)
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """None when there is no manifest that this version can read."""
    try:
        return Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError):
        return None


def find_problem(folder: Path, weights: Weights, *, full: bool = False) -> str | None:
    """What is wrong with a folder, in one sentence; None when it can be served.

    Sizes always; checksums of files that were touched since they were installed, or of all with `full`.
    """
    if not folder.is_dir():
        return ABSENT
    if weights.provided:
        missing = [name for name in weights.provided if not (folder / name).is_file()]
        return f"{', '.join(missing)} missing" if missing else None
    manifest = read_manifest(folder)
    if manifest is None or manifest.schema_version != SCHEMA_VERSION:
        return f"{MANIFEST_NAME} is missing or unreadable"
    if manifest.origin != _origin(weights):
        return "made from other packages, or in another form, than the recipe names"
    for file in manifest.files:
        if (problem := _file_problem(folder / file.name, file, full=full)) is not None:
            return f"{file.name} {problem}"
    return None


def _file_problem(path: Path, expected: ManifestFile, *, full: bool) -> str | None:
    try:
        found = path.stat()
        if found.st_size != expected.size_bytes:
            return f"has {found.st_size} bytes, expected {expected.size_bytes}"
        if (full or found.st_mtime_ns != expected.mtime_ns) and file_sha256(path) != expected.sha256:
            return "does not have the recorded checksum"
    except FileNotFoundError:
        return "is missing"
    except OSError as exc:
        return f"cannot be read: {exc.strerror}"
    return None


def _origin(weights: Weights) -> str:
    relevant: dict[str, Any] = weights.model_dump(
        mode="json", exclude={"license", "source", "converted_bytes", "provided"}
    )
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)


def _describe(folder: Path, path: Path) -> ManifestFile:
    # Some libraries create files that only their owner may read; a deployment can have another user.
    path.chmod(0o644)
    _settle(path)
    found = path.stat()
    return ManifestFile(
        name=str(path.relative_to(folder)),
        size_bytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        sha256=file_sha256(path),
    )


def _settle(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
