"""Processes that may outlive the command which started them: identity, signals, waiting, finding.

A pid alone is not an identity, because the kernel reuses it; a pid with its start time and the boot is.
Waiting and signalling go through a pidfd, so there is no window in which the pid changes hands.
Knows nothing of deployments; `state` and `backends.process` call it.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

PROC = Path("/proc")


class ProcessId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a process. `start_ticks` counts clock ticks since the boot `boot_id`."""

    pid: int
    start_ticks: int
    boot_id: str

    def is_alive(self) -> bool:
        """False also for a zombie: it holds nothing and answers nothing."""
        return identify(self.pid) == self

    @contextmanager
    def opened(self) -> Iterator[int | None]:
        """A pidfd that is readable when the process has ended; None when it has ended already."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # Checked after opening: from here on the descriptor cannot come to mean another process.
            yield fd if self.is_alive() else None
        finally:
            os.close(fd)

    def send(self, number: signal.Signals) -> bool:
        """Whether the signal was delivered; False when the process has ended."""
        with self.opened() as fd:
            if fd is None:
                return False
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
                return True
        return False

    def wait(self, timeout_s: float) -> bool:
        """Whether the process ended within the time."""
        with self.opened() as fd:
            return fd is None or bool(readable([fd], timeout_s))


def readable(fds: list[int], timeout_s: float) -> list[int]:
    """Those of the descriptors that became readable within the time."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return [fd for fd, _ in poll.poll(max(0.0, timeout_s) * 1000)]


def identify(pid: int, *, even_ended: bool = False) -> ProcessId | None:
    """The identity of a running process; None when there is none, or only its zombie.

    `even_ended`: also of the zombie, for a child that may have ended before we looked.
    """
    fields = _stat(pid)
    if fields is None or (fields[0] in ("Z", "X") and not even_ended):
        return None
    return ProcessId(pid=pid, start_ticks=int(fields[19]), boot_id=_boot_id())


def descendants(pid: int) -> list[ProcessId]:
    """Running children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for other in _pids():
        if (fields := _stat(other)) is not None:
            children.setdefault(int(fields[1]), []).append(other)
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return [identity for child in found if (identity := identify(child)) is not None]


def with_environment(variable: str, value: str) -> list[ProcessId]:
    """Running processes of this user that were started with the variable set to the value.

    Finds children whose parent is gone. This process is never among them.
    """
    wanted = f"{variable}={value}".encode()
    found = []
    for pid in _pids():
        try:
            environment = (PROC / str(pid) / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if pid != os.getpid() and wanted in environment and (identity := identify(pid)) is not None:
            found.append(identity)
    return found


def listens(process: ProcessId, port: int) -> bool:
    """Whether this very process accepts connections on the port."""
    import psutil

    try:
        connections = psutil.Process(process.pid).net_connections("tcp")
    except psutil.Error:
        return False
    return process.is_alive() and any(
        c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port for c in connections
    )


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; the command before it may hold spaces and brackets."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def _boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()
