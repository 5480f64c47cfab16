"""API keys of a deployment: OMNICTL_API_KEY, and the lines of a key file. The server reads the same two places.

The tool tells the server where they are, and remembers the file's path, but never writes a key anywhere.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

from omnictl import settings
from omnictl.state import Deployment
from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys that open a deployment; empty when it needs none. `file`: absolute path."""

    keys: tuple[str, ...] = field(default=(), repr=False)
    file: str | None = None

    @property
    def sha256(self) -> str | None:
        """To recognise the same set of keys; None for an empty one."""
        return hashlib.sha256("\n".join(sorted(self.keys)).encode()).hexdigest() if self.keys else None


def read_api_keys(file: Path | None) -> ApiKeys:
    """ConfigError when the file cannot be read or holds no key."""
    keys = [os.environ.get(settings.API_KEY_VARIABLE, "")]
    if file is not None:
        try:
            found = [line for line in file.read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file}: cannot be read: {error}") from None
        if not found:
            raise ConfigError(f"--api-key-file {file}: holds no key; expected one a line")
        keys += found
    return ApiKeys(tuple(key.strip() for key in keys if key.strip()), str(file.absolute()) if file else None)


def key_for(deployment: Deployment) -> str | None:
    """The key to call a deployment with: the environment's, else the first of the file it was started with."""
    if key := os.environ.get(settings.API_KEY_VARIABLE, "").strip():
        return key
    if deployment.api_key_file is None:
        return None
    return read_api_keys(Path(deployment.api_key_file)).keys[0]
