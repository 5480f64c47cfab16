"""Settings that come from the environment: where weights, state and shared memory are. Read here only."""

from __future__ import annotations

import os
from pathlib import Path


def home_dir() -> Path:
    """Weights, downloads and conversions: OMNICTL_HOME, default ~/.cache/omnictl."""
    return Path(os.environ.get("OMNICTL_HOME") or Path.home() / ".cache" / "omnictl")


def weights_dir() -> Path:
    """OMNICTL_WEIGHTS_DIR, default `weights` below the home."""
    return Path(os.environ.get("OMNICTL_WEIGHTS_DIR") or home_dir() / "weights")


def shm_dir() -> Path:
    """Where arenas live: OMNICTL_SHM_DIR, default /dev/shm."""
    return Path(os.environ.get("OMNICTL_SHM_DIR") or "/dev/shm")
