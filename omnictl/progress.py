"""Shows long work on stderr: bars on a terminal, one line a change of state anywhere else.

Whoever works gets a `Progress` and does not know which. Used by `pulling`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from omnictl import output
from omnictl.units import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

Advance = Callable[[int], None]

REPORT_EVERY_S = 10.0
"""How often a transfer tells without a terminal that it goes on."""


class Progress(Protocol):
    def say(self, message: str) -> None:
        """A change of state, worth a line."""

    def transfer(self, label: str, total_bytes: int, done_bytes: int) -> AbstractContextManager[Advance]:
        """While entered, the function it gives is told how many bytes more (or, negative, less) were moved."""

    def work(self, label: str) -> AbstractContextManager[None]:
        """While entered, something of unknown length goes on."""


@contextmanager
def show_progress() -> Iterator[Progress]:
    """The progress that suits stderr."""
    if not sys.stderr.isatty():
        yield LineProgress()
        return
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[moved]}"), TimeElapsedColumn())
    with Bars(*columns, console=output.console(stderr=True), transient=True) as bars:
        yield BarProgress(bars)


class LineProgress:
    def say(self, message: str) -> None:
        output.note(message)

    @contextmanager
    def transfer(self, label: str, total_bytes: int, done_bytes: int) -> Iterator[Advance]:
        output.note(f"{label} ({format_bytes(total_bytes)})")
        done, said_s = done_bytes, time.monotonic()

        def advance(num_bytes: int) -> None:
            nonlocal done, said_s
            done += num_bytes
            if time.monotonic() - said_s >= REPORT_EVERY_S:
                said_s = time.monotonic()
                output.note(f"{label}: {done * 100 // total_bytes} %")

        with _timed(label):
            yield advance

    @contextmanager
    def work(self, label: str) -> Iterator[None]:
        output.note(label)
        with _timed(label):
            yield


class BarProgress:
    def __init__(self, bars: Bars) -> None:
        self._bars = bars

    def say(self, message: str) -> None:
        self._bars.console.print(message)

    @contextmanager
    def transfer(self, label: str, total_bytes: int, done_bytes: int) -> Iterator[Advance]:
        total, done = format_bytes(total_bytes), done_bytes
        task = self._bars.add_task(label, total=total_bytes, completed=done, moved=f"of {total}")

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self._bars.update(task, completed=done, moved=f"{format_bytes(done)} of {total}")

        try:
            yield advance
        finally:
            self._bars.remove_task(task)

    @contextmanager
    def work(self, label: str) -> Iterator[None]:
        task = self._bars.add_task(label, total=None, moved="")
        try:
            yield
        finally:
            self._bars.remove_task(task)


@contextmanager
def _timed(label: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    output.note(f"{label}: done in {time.monotonic() - began_s:.1f} s")
