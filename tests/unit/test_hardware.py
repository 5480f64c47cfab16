"""Hardware: what a probe sees, and that nothing it meets is an exception. Fakes are executables first on PATH."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from omnictl.hardware import Hardware, choose_hardware, limit_gpus, make_profile, probe
from omnictl.units import GIB, MIB
from runtime.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_user_settings")

TWO_GPUS = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0
1, GPU-bbbb, NVIDIA GeForce RTX 4090, 24564, 20000, 8.9
"""

FakeSmi = Callable[[str], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A /proc and /sys of a machine with two AVX2 cores and 24 GiB, 20 of them free."""
    root = tmp_path / "root"
    write(root, "proc/cpuinfo", "model name\t: Test CPU\nflags\t\t: fpu sse2 avx2 fma\n")
    write(root, "proc/meminfo", f"MemTotal: {24 << 20} kB\nMemFree: 1 kB\nMemAvailable:  {20 << 20} kB\n")
    return root


@pytest.fixture
def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    """Put a shell script called nvidia-smi first on PATH."""

    def make(script: str) -> None:
        folder = tmp_path / "bin"
        path = write(folder, "nvidia-smi", f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return make


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def told(hardware: Hardware) -> str:
    return "\n".join(finding.text for finding in hardware.findings)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- processor and memory -----------------------------------------------------------------------------------


def test_cores_memory_and_instruction_sets(root: Path) -> None:
    cpu = probe(root=root).cpu
    assert (cpu.name, cpu.flags, cpu.has_bfloat16) == ("Test CPU", ("avx2",), False)
    assert (cpu.total_bytes, cpu.free_bytes) == (24 * GIB, 20 * GIB)
    assert cpu.num_cores == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_instruction_sets_that_compute_bfloat16(root: Path, flag: str) -> None:
    write(root, "proc/cpuinfo", f"flags : avx2 {flag}\n")
    assert probe(root=root).cpu.has_bfloat16


def test_a_control_group_limits_memory_and_cores(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/box/inner\n")
    write(root, "sys/fs/cgroup/box/memory.max", str(8 * GIB))
    write(root, "sys/fs/cgroup/box/memory.current", str(3 * GIB))
    write(root, "sys/fs/cgroup/box/memory.stat", f"anon 1\ninactive_file {GIB}\n")
    write(root, "sys/fs/cgroup/box/inner/memory.max", "max")
    write(root, "sys/fs/cgroup/box/inner/cpu.max", "50000 100000")
    hardware = probe(root=root)
    assert (hardware.cpu.total_bytes, hardware.cpu.free_bytes, hardware.cpu.num_cores) == (8 * GIB, 6 * GIB, 1)
    assert "control group" in told(hardware)


def test_a_version_1_control_group_limits_memory(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(4 * GIB))
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(1 * GIB))
    assert probe(root=root).cpu.free_bytes == 3 * GIB


def test_a_control_group_without_limit_changes_nothing(root: Path) -> None:
    write(root, "sys/fs/cgroup/memory.max", "max")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(GIB))
    assert probe(root=root).cpu.free_bytes == 20 * GIB


@pytest.mark.parametrize("text", ["", "MemTotal: lots kB\nMemAvailable: few kB\n", "MemTotal: 1 kB\n"])
def test_unreadable_memory_is_a_finding(root: Path, text: str) -> None:
    write(root, "proc/meminfo", text)
    hardware = probe(root=root)
    assert hardware.cpu.free_bytes == 0
    assert "free memory unknown" in told(hardware)


def test_a_machine_without_proc_is_findings(tmp_path: Path) -> None:
    hardware = probe(root=tmp_path)
    assert "instruction sets unknown" in told(hardware)
    assert "free memory unknown" in told(hardware)


def test_a_missing_shared_memory_folder_is_a_finding(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNICTL_SHM_DIR", "/nowhere/shm")
    hardware = probe(root=root)
    assert hardware.shm_free_bytes == 0
    assert "/nowhere/shm: No such file" in told(hardware)


# ---- GPUs ---------------------------------------------------------------------------------------------------


def test_gpus_are_what_nvidia_smi_says(root: Path, fake_smi: FakeSmi) -> None:
    fake_smi(f"cat <<'END'\n{TWO_GPUS}END")
    hardware = probe(root=root)
    assert [(gpu.device, gpu.kind, gpu.compute_capability) for gpu in hardware.gpus] == [
        ("cuda:0", "h100", (9, 0)),
        ("cuda:1", "rtx4090", (8, 9)),
    ]
    assert (hardware.gpus[1].total_bytes, hardware.gpus[1].free_bytes) == (24564 * MIB, 20000 * MIB)
    assert not hardware.findings


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'Failed to initialize NVML' >&2; exit 9", "exit status 9: Failed to initialize NVML"),
        ("exit 9", "exit status 9: no message"),
        ("echo rubbish", "answered 'rubbish', which is not a GPU we can use"),
        ("echo '0, GPU-a, Thor, [N/A], [N/A], 11.0'", "not a GPU we can use"),
        ("echo '0, GPU-a, X, 100, 50, nine'", "not a GPU we can use"),
        (r"printf '\377\376, \200\n'", "not a GPU we can use"),
        (r"printf '\377\376' >&2; exit 1", "exit status 1: "),
        (r"printf '\000\000\n'", "not a GPU we can use"),
        ("kill -SEGV $$", "exit status -11"),
    ],
)
def test_a_broken_vendor_tool_is_a_finding(root: Path, fake_smi: FakeSmi, script: str, expected: str) -> None:
    fake_smi(script)
    hardware = probe(root=root)
    assert hardware.gpus == ()
    assert expected in told(hardware)


def test_a_vendor_tool_that_hangs_is_a_finding_and_is_ended_with_its_children(
    root: Path, fake_smi: FakeSmi, tmp_path: Path
) -> None:
    fake_smi(f"sleep 600 & echo $$ $! > {tmp_path}/pids; wait")
    hardware = probe(root=root, nvidia_smi_timeout_s=2.0)
    assert "no answer within 2 s; no GPU is used" in told(hardware)
    children = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(children) == 2
    deadline = time.monotonic() + 100
    while any(map(is_running, children)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_vendor_tool_that_is_no_program_is_a_finding(root: Path, fake_smi: FakeSmi, tmp_path: Path) -> None:
    fake_smi("")
    (tmp_path / "bin" / "nvidia-smi").write_bytes(b"\x7fELF rubbish")
    assert "cannot be run: Exec format error" in told(probe(root=root))


def test_no_vendor_tool_and_no_gpu_is_nothing_to_tell(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    assert probe(root=root).findings == ()


def test_a_gpu_without_its_vendor_tool_is_told(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, "sys/class/drm/card0/device/vendor", "0x10de\n")
    monkeypatch.setenv("PATH", str(root))
    assert "NVIDIA GPU seen, but nvidia-smi is not on PATH" in told(probe(root=root))


def test_adapters_of_other_vendors_are_told_and_left_out(root: Path, fake_smi: FakeSmi) -> None:
    write(root, "sys/class/drm/card0/device/vendor", "0x1002\n")
    write(root, "sys/class/drm/card1/device/vendor", "0x8086\n")
    write(root, "sys/class/drm/card2/device/vendor", "0x10de\n")
    fake_smi(f"cat <<'END'\n{TWO_GPUS}END")
    hardware = probe(root=root)
    assert len(hardware.gpus) == 2
    assert [finding.text.split()[0] for finding in hardware.findings] == ["AMD", "Intel"]


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("1", ["cuda:1"]),
        ("1,0", ["cuda:1", "cuda:0"]),
        ("GPU-bb", ["cuda:1"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["cuda:0"]),
        ("0,0", ["cuda:0"]),
    ],
)
def test_the_users_choice_of_gpus_holds(
    root: Path, fake_smi: FakeSmi, monkeypatch: pytest.MonkeyPatch, value: str, devices: list[str]
) -> None:
    fake_smi(f"cat <<'END'\n{TWO_GPUS}END")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    hardware = probe(root=root)
    assert [gpu.device for gpu in hardware.gpus] == devices
    assert ("CUDA_VISIBLE_DEVICES" in told(hardware)) == (len(devices) < 2)


def test_the_gpus_with_most_free_memory_are_kept(root: Path, fake_smi: FakeSmi) -> None:
    fake_smi("printf '0, GPU-a, NVIDIA L40S, 46068, 1000, 8.9\n1, GPU-b, NVIDIA L40S, 46068, 40000, 8.9\n'")
    hardware = probe(root=root)
    assert [gpu.index for gpu in limit_gpus(hardware, 1).gpus] == [1]
    assert limit_gpus(hardware, 0).gpus == ()
    assert limit_gpus(hardware, None) == limit_gpus(hardware, 5) == hardware


def test_this_machine_can_be_probed() -> None:
    hardware = choose_hardware(None)
    assert hardware.cpu.num_cores >= 1
    assert 0 < hardware.cpu.free_bytes <= hardware.cpu.total_bytes
    assert hardware.describe().startswith("this machine: ")


# ---- profiles -----------------------------------------------------------------------------------------------


def test_profiles() -> None:
    small = make_profile("cpu-2x24")
    assert (small.cpu.num_cores, small.cpu.free_bytes, small.gpus) == (2, 24 * GIB, ())
    assert not small.cpu.has_bfloat16
    assert [gpu.device for gpu in make_profile("h100x2").gpus] == ["cuda:0", "cuda:1"]
    assert len(make_profile("h100", 4).gpus) == 4
    assert len(make_profile("h100x2", 4).gpus) == 2
    assert make_profile("h100x2").describe().endswith(", 2 x NVIDIA H100 80GB HBM3 (79.1 GiB free)")
    for kind in ("h100", "h200", "l40s", "rtx4090"):
        assert [gpu.kind for gpu in make_profile(kind).gpus] == [kind]


@pytest.mark.parametrize("name", ["h10", "h100x0", "cpu-0x4", "cpu-2", "", "h100x"])
def test_an_unknown_profile_names_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown profile( \(did you mean|; known: cpu-2x24)"):
        make_profile(name)
