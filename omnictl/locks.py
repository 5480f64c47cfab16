"""A lock between processes that ends with its owner: the kernel drops it when the process does, however it ends.

The file says who holds it, for those who wait; a name left in it by an owner that never cleaned up tells the next one
that work was cut short. Used by `pulling`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import OmniError


@contextmanager
def exclusive(path: Path, timeout_s: float, note: Callable[[str], None], busy: type[OmniError]) -> Iterator[None]:
    """Hold the lock at `path`. `note` is told about waiting and about an owner that died at work.

    Raises `busy` when another process keeps the lock for longer than `timeout_s`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _try(descriptor):
            note(f"waiting for process {_owner(path)}, which is at work in {path.parent}")
            if not _wait(descriptor, timeout_s):
                raise busy(
                    f"process {_owner(path)} has been at work in {path.parent} for more than {timeout_s:.0f} s",
                    hint="wait for it or stop it, then try again",
                )
        if owner := _owner(path):
            note(f"process {owner} ended in the middle of its work; what it left is used or replaced")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _owner(path: Path) -> str:
    return path.read_text(errors="replace").strip()


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(descriptor: int, timeout_s: float) -> bool:
    """Whether the lock was granted in time. flock knows no deadline, so a thread waits in it.

    The thread has its own descriptor of the same open file: if it is granted the lock after we gave up, closing that
    descriptor gives the lock back, because ours is closed by then.
    """
    own = os.dup(descriptor)
    granted = threading.Event()

    def wait() -> None:
        fcntl.flock(own, fcntl.LOCK_EX)
        granted.set()
        os.close(own)

    threading.Thread(target=wait, daemon=True, name="lock-wait").start()
    return granted.wait(timeout_s)
