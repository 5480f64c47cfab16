"""What this machine has: cores, free memory, instruction sets, GPUs. Probed once into a frozen `Hardware`.

A probe that fails is a finding and never an exception: a broken vendor tool must not stop a command that needs no
GPU. `placement` plans with the result; profiles stand for machines that are not here.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from omnictl import cgroup, settings
from omnictl.gpu_probe import Finding, Gpu, probe_gpus
from omnictl.schema import nearest
from omnictl.units import GIB, MIB
from runtime.errors import ConfigError

NVIDIA_SMI_TIMEOUT_S = 10.0
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16")


@dataclass(frozen=True, slots=True)
class Cpu:
    name: str
    num_cores: int
    total_bytes: int
    free_bytes: int
    flags: tuple[str, ...] = ()
    """Those of the instruction sets that matter to us, as the kernel calls them."""

    @property
    def has_bfloat16(self) -> bool:
        """Whether bfloat16 is computed by the CPU; without it, it is emulated and slower than float32."""
        return "avx512_bf16" in self.flags or "amx_bf16" in self.flags


@dataclass(frozen=True, slots=True)
class Hardware:
    name: str
    cpu: Cpu
    gpus: tuple[Gpu, ...]
    shm_free_bytes: int
    findings: tuple[Finding, ...] = ()

    def describe(self) -> str:
        """One line: cores, free memory, GPUs."""
        alike = Counter(f"{gpu.name} ({gpu.free_bytes / GIB:.1f} GiB free)" for gpu in self.gpus)
        gpus = ", ".join(f"{count} x {text}" for text, count in alike.items()) or "no GPU"
        return f"{self.name}: {self.cpu.num_cores} cores, {self.cpu.free_bytes / GIB:.1f} GiB free, {gpus}"


def limit_gpus(hardware: Hardware, gpus: int | None) -> Hardware:
    """The same machine with at most so many GPUs, those with the most free memory."""
    if gpus is None or gpus >= len(hardware.gpus):
        return hardware
    freest = sorted(hardware.gpus, key=lambda gpu: (-gpu.free_bytes, gpu.index))[:gpus]
    return replace(hardware, gpus=tuple(sorted(freest, key=lambda gpu: gpu.index)))


# ---- profiles -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _GpuProfile:
    """A GPU type, and what hosts of it have for each GPU."""

    name: str
    memory_mib: int
    compute_capability: tuple[int, int]
    num_cores: int
    host_gib: int
    flags: tuple[str, ...]


_SERVER_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni")
GPU_PROFILES = {
    "h100": _GpuProfile("NVIDIA H100 80GB HBM3", 81559, (9, 0), 16, 192, _SERVER_FLAGS),
    "h200": _GpuProfile("NVIDIA H200", 143771, (9, 0), 16, 192, _SERVER_FLAGS),
    "l40s": _GpuProfile("NVIDIA L40S", 46068, (8, 9), 16, 96, _SERVER_FLAGS),
    "rtx4090": _GpuProfile("NVIDIA GeForce RTX 4090", 24564, (8, 9), 16, 64, ("avx2",)),
}
_GPU_IDLE_MIB = 512
"""What an idle GPU's driver keeps for itself."""


def make_profile(name: str, gpus: int | None = None) -> Hardware:
    """`cpu-CORESxGIB`, or a GPU type with a count: `h100x4`. Without one, `gpus` (or one) of it."""
    if match := re.fullmatch(r"cpu-([1-9]\d{0,3})x([1-9]\d{0,4})", name):
        cores, memory_bytes = int(match[1]), int(match[2]) * GIB
        return Hardware(name, Cpu("AVX2 only", cores, memory_bytes, memory_bytes, ("avx2",)), (), memory_bytes // 2)
    if match := re.fullmatch(rf"({'|'.join(GPU_PROFILES)})(?:x([1-9]\d?))?", name):
        return _gpu_profile(name, GPU_PROFILES[match[1]], int(match[2] or gpus or 1))
    known = ["cpu-2x24", *GPU_PROFILES, *(f"{kind}x2" for kind in GPU_PROFILES)]
    raise ConfigError(
        f"--hardware {name!r}: unknown profile{nearest(name, known)}",
        hint=f"cpu-CORESxGIB, or {', '.join(GPU_PROFILES)}, with a count as in h100x4",
    )


def choose_hardware(profile: str | None, gpus: int | None = None) -> Hardware:
    """The named profile, or this machine."""
    return probe() if profile is None else make_profile(profile, gpus)


def _gpu_profile(name: str, gpu: _GpuProfile, count: int) -> Hardware:
    host_bytes = gpu.host_gib * count * GIB
    total, free = gpu.memory_mib * MIB, (gpu.memory_mib - _GPU_IDLE_MIB) * MIB
    return Hardware(
        name,
        Cpu("server", gpu.num_cores * count, host_bytes, host_bytes, gpu.flags),
        tuple(Gpu(i, gpu.name, f"GPU-{name}-{i}", total, free, gpu.compute_capability) for i in range(count)),
        host_bytes // 2,
    )


# ---- probes -------------------------------------------------------------------------------------------------


def probe(*, root: Path = Path("/"), nvidia_smi_timeout_s: float = NVIDIA_SMI_TIMEOUT_S) -> Hardware:
    """Look at this machine. `root` is where /proc and /sys are."""
    findings: list[Finding] = []
    cpu = _probe_cpu(root, findings)
    gpus = probe_gpus(root, findings, nvidia_smi_timeout_s)
    return Hardware("this machine", cpu, gpus, _free_shm(findings), tuple(findings))


def _probe_cpu(root: Path, findings: list[Finding]) -> Cpu:
    name = "unknown CPU"
    flags: tuple[str, ...] = ()
    try:
        text = (root / "proc/cpuinfo").read_text(errors="replace")
        name = _field(text, "model name") or name
        found = set((_field(text, "flags") or _field(text, "Features") or "").split())
        flags = tuple(flag for flag in _CPU_FLAGS if flag in found)
    except OSError as error:
        findings.append(Finding("warning", "cpu", f"instruction sets unknown: {error}"))
    total_bytes, free_bytes = _probe_memory(root, findings)
    return Cpu(name, _num_cores(root), total_bytes, free_bytes, flags)


def _num_cores(root: Path) -> int:
    """Cores that this process may use: its affinity, and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _probe_memory(root: Path, findings: list[Finding]) -> tuple[int, int]:
    """Total and available bytes, within the limit of the control group."""
    try:
        text = (root / "proc/meminfo").read_text(errors="replace")
        total, free = (int((_field(text, key) or "").split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, IndexError) as error:
        findings.append(Finding("warning", "memory", f"free memory unknown, taken as none: {error}"))
        return 0, 0
    limit = cgroup.memory_limit(root)
    if limit is not None and limit.total_bytes < total:
        findings.append(Finding("info", "memory", "limited by a control group"))
        return limit.total_bytes, min(free, limit.free_bytes)
    return total, free


def _field(text: str, key: str) -> str | None:
    match = re.search(rf"^{re.escape(key)}\s*:\s*(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else None


def _free_shm(findings: list[Finding]) -> int:
    folder = settings.shm_dir()
    try:
        status = os.statvfs(folder)
    except OSError as error:
        findings.append(Finding("warning", "shared memory", f"{folder}: {error.strerror}"))
        return 0
    return status.f_bavail * status.f_frsize
