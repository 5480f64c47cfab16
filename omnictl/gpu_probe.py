"""GPUs of this machine, as the vendor's tool tells of them, and what is odd about them as findings.

Never raises for what it meets. `hardware` calls it once a probe.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omnictl.units import MIB

NVIDIA_SMI = "nvidia-smi"
GPU_KINDS = ("h100", "h200", "l40s", "rtx4090")
_QUERY = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap")
_VENDORS = {"0x1002": "AMD", "0x8086": "Intel", "0x10de": "NVIDIA", "0x1ed5": "Moore Threads", "0x19e5": "Huawei"}


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int]

    @property
    def device(self) -> str:
        return f"cuda:{self.index}"

    @property
    def kind(self) -> str:
        """The id that recipes use: `h100` for `NVIDIA H100 80GB HBM3`; a name of its own for others."""
        plain = re.sub(r"[^a-z0-9]", "", self.name.lower())
        return next((kind for kind in GPU_KINDS if kind in plain), plain)


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a person should know about the machine. level: info or warning."""

    level: str
    subject: str
    text: str


def probe_gpus(root: Path, findings: list[Finding], timeout_s: float) -> tuple[Gpu, ...]:
    """NVIDIA GPUs that CUDA would see here, in nvidia-smi's order."""
    vendors = sorted(set(_display_vendors(root)))
    for vendor in vendors:
        if vendor != "NVIDIA":
            findings.append(Finding("info", "gpu", f"{vendor} display adapter seen; no engine uses it, it is left out"))
    program = shutil.which(NVIDIA_SMI)
    if program is None:
        if "NVIDIA" in vendors or (root / "dev/nvidiactl").exists():
            findings.append(Finding("warning", "gpu", f"NVIDIA GPU seen, but {NVIDIA_SMI} is not on PATH; not used"))
        return ()
    try:
        text = _run([program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"], timeout_s)
        return _visible(tuple(_parse_gpus(text, findings)), findings)
    except _ProbeFailed as failure:
        findings.append(Finding("warning", "gpu", f"{program}: {failure}; no GPU is used"))
        return ()


def _display_vendors(root: Path) -> Iterator[str]:
    for path in root.glob("sys/class/drm/card*/device/vendor"):
        try:
            vendor = path.read_text(errors="replace").strip()
        except OSError:
            continue
        if vendor in _VENDORS:
            yield _VENDORS[vendor]


class _ProbeFailed(Exception):
    pass


def _run(argv: list[str], timeout_s: float) -> str:
    """Standard output of a program. Its whole process group is killed when it takes too long."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise _ProbeFailed(f"cannot be run: {error.strerror}") from None
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise _ProbeFailed(f"no answer within {timeout_s:g} s") from None
    if process.returncode != 0:
        said = (err or out).decode(errors="replace").strip().splitlines()
        raise _ProbeFailed(f"exit status {process.returncode}: {said[0][:200] if said else 'no message'}")
    return out.decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children. One that hangs inside the kernel's driver is left after a second."""
    os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)


def _parse_gpus(text: str, findings: list[Finding]) -> Iterator[Gpu]:
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        try:
            index, uuid, name, total_mib, free_mib, capability = row
            major, minor = capability.split(".")
            yield Gpu(int(index), name, uuid, int(total_mib) * MIB, int(free_mib) * MIB, (int(major), int(minor)))
        except ValueError:
            said = ", ".join(row)[:120]
            findings.append(Finding("warning", "gpu", f"{NVIDIA_SMI} answered {said!r}, which is not a GPU we can use"))


def _visible(gpus: tuple[Gpu, ...], findings: list[Finding]) -> tuple[Gpu, ...]:
    """What CUDA_VISIBLE_DEVICES leaves, as CUDA reads it: up to the first entry that names no GPU."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not gpus:
        return gpus
    kept: list[Gpu] = []
    for entry in (part.strip() for part in chosen.split(",")):
        match = [g for g in gpus if entry == str(g.index) or (entry.startswith("GPU-") and g.uuid.startswith(entry))]
        if len(match) != 1 or match[0] in kept:
            break
        kept.append(match[0])
    if len(kept) < len(gpus):
        text = f"CUDA_VISIBLE_DEVICES={chosen!r} leaves {len(kept)} of {len(gpus)} GPUs"
        findings.append(Finding("info", "gpu", text))
    return tuple(kept)
