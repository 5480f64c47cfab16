"""SIGINT, SIGTERM and SIGHUP as something a wait can watch, instead of an exception at any line.

For commands that have started something and must stop it: a signal ends the wait, the command decides.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

from omnictl.processes import readable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While entered, the signals are counted in `received` and make `fd` readable. Main thread only."""

    def __init__(self) -> None:
        self.received: list[signal.Signals] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self.fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in SIGNALS:
            # A signal that the parent told us to ignore (nohup) stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write_fd)

    def wait(self, fds: list[int], timeout_s: float) -> list[int]:
        """Those of the descriptors that became readable; returns early, maybe with none, on a signal."""
        ready = readable([self.fd, *fds], timeout_s)
        return [fd for fd in ready if fd != self.fd]

    def take(self) -> signal.Signals | None:
        """The oldest signal that nobody has taken yet. After it, `fd` tells only of later ones."""
        if not self.received:
            return None
        os.read(self.fd, 1)
        return self.received.pop(0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))
        os.write(self._write_fd, b"!")
