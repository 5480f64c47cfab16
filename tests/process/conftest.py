"""Other processes that put and get through shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.shm_peer import Peer


@pytest.fixture
def producer(tmp_path: Path) -> Iterator[Peer]:
    with Peer(tmp_path) as peer:
        yield peer


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Peer]:
    with Peer(tmp_path) as peer:
        yield peer
