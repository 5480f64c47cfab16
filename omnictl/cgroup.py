"""Limits that a control group sets on this process: memory and processor time. Version 2, and version 1's memory
and cpu controllers at their mount points. Reads files below a root; what is absent or odd means no limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    total_bytes: int
    free_bytes: int


def memory_limit(root: Path) -> MemoryLimit | None:
    """The tightest limit of the group and its parents; page cache that can be dropped counts as free."""
    limits = [limit for folder in _groups(root) if (limit := _memory(folder, "memory.max", "memory.current"))]
    if v1 := _memory(root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"):
        limits.append(v1)
    return min(limits, key=lambda limit: limit.free_bytes, default=None)


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time, the least of the group and its parents."""
    quotas = []
    for folder in _groups(root):
        quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
        quotas.append(_ratio(quota, period))
    v1 = root / "sys/fs/cgroup/cpu"
    quotas.append(_ratio(_read(v1 / "cpu.cfs_quota_us"), _read(v1 / "cpu.cfs_period_us")))
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path) -> Iterator[Path]:
    """This process's version 2 group and its parents, up to the mount point."""
    mount = root / "sys/fs/cgroup"
    own = next(
        (line[3:] for line in (_read(root / "proc/self/cgroup") or "").splitlines() if line.startswith("0::")), "/"
    )
    folder = mount / own.strip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount


def _memory(folder: Path, limit_name: str, usage_name: str) -> MemoryLimit | None:
    limit, usage = _number(_read(folder / limit_name)), _number(_read(folder / usage_name))
    if limit is None or usage is None:
        return None
    lines = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    droppable = next((int(line[1]) for line in lines if len(line) == 2 and line[0] == "inactive_file"), 0)
    return MemoryLimit(limit, max(0, limit - max(0, usage - droppable)))


def _ratio(quota: str | None, period: str | None) -> float | None:
    used, whole = _number(quota), _number(period)
    return used / whole if used and whole else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
