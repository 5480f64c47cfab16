"""A child process must not outlive its parent, nor keep anything of it: used by the server's workers.

Linux's parent-death signal covers a parent that is killed; the check afterwards covers one that was gone first.
"""

from __future__ import annotations

import ctypes
import os
import signal

from runtime.errors import EnvironmentProblem

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies. EnvironmentProblem when it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise EnvironmentProblem(f"the server process {parent_pid} is gone; a worker cannot run without it")


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
