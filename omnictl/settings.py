"""Settings of the tool that come from the environment: where weights and deployments are. Read here only.

The runtime has its own copy of what it needs (`runtime.settings`): the tool imports nothing else of it.
"""

from __future__ import annotations

import os
from pathlib import Path

API_KEY_VARIABLE = "OMNICTL_API_KEY"
DEFAULT_HOST = "127.0.0.1"
FIRST_PORT = 8091
"""Where the search for a free port begins. The only place where the number stands."""


def home_dir() -> Path:
    """Weights, downloads and conversions: OMNICTL_HOME, default ~/.cache/omnictl."""
    return Path(os.environ.get("OMNICTL_HOME") or Path.home() / ".cache" / "omnictl")


def weights_dir() -> Path:
    """OMNICTL_WEIGHTS_DIR, default `weights` below the home."""
    return Path(os.environ.get("OMNICTL_WEIGHTS_DIR") or home_dir() / "weights")


def state_dir() -> Path:
    """Deployments, one folder each: OMNICTL_STATE_DIR, default omnictl below $XDG_STATE_HOME or ~/.local/state."""
    if chosen := os.environ.get("OMNICTL_STATE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "omnictl"


def shm_dir() -> Path:
    """Where the runtime's arenas live: OMNICTL_SHM_DIR, default /dev/shm."""
    return Path(os.environ.get("OMNICTL_SHM_DIR") or "/dev/shm")
