"""The benchmark of the shm connector runs, and it gives a row for each way and size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import shm


def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "ROUNDS", {4 * shm.KIB: 3, shm.MIB: 3})
    rows = shm.rows(shm.run(tmp_path))
    assert [row[:2] for row in rows] == [
        [size, way] for size in ("4 KiB", "1 MiB") for way in (shm.MEMCPY, shm.MESSAGE, shm.POOL, shm.ONE_SEGMENT)
    ]
    assert {len(row) for row in rows} == {len(shm.COLUMNS)}
    assert list(tmp_path.iterdir()) == []
