"""The benchmark of the shm connector runs, and its report holds a row for each way and size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import shm


def test_the_benchmark_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "ROUNDS", {4 * shm.KIB: 3, shm.MIB: 3})
    text = shm.report(shm.run(tmp_path))
    rows = [line for line in text.splitlines() if line.startswith("| ") and "way" not in line]
    assert [row.split(" | ")[:2] for row in rows] == [
        [f"| {size}", way]
        for size in ("4 KiB", "1 MiB")
        for way in (shm.MEMCPY, shm.MESSAGE, shm.POOL, shm.ONE_SEGMENT)
    ]
    assert list(tmp_path.iterdir()) == []
