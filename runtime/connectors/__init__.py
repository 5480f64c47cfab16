"""Connectors: how payloads get from stage to stage. `open_connectors` is the only way to get one."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.connectors.arena import ShmSettings
from runtime.connectors.base import Connector
from runtime.connectors.inproc import InprocConnector
from runtime.connectors.shm import ShmConnector
from runtime.errors import ConfigError
from runtime.settings import shm_dir

KINDS = ("inproc", "shm")


def open_connectors(kinds: Iterable[str] = KINDS, *, shm: ShmSettings | None = None) -> dict[str, Connector]:
    """One connector of each kind for this process; whoever opens them closes them.

    `shm` defaults to ShmSettings in the folder of the environment. ConfigError for a kind that there is not.
    """
    opened: dict[str, Connector] = {}
    for kind in kinds:
        if kind == "inproc":
            opened[kind] = InprocConnector()
        elif kind == "shm":
            opened[kind] = ShmConnector(shm or ShmSettings(shm_dir()))
        else:
            raise ConfigError(f"connector {kind!r} is not known; expected one of {', '.join(KINDS)}")
    return opened
