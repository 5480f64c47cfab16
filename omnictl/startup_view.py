"""What a person sees while a deployment starts: a table that is redrawn, or one line a change without a terminal.

Everything goes to stderr, so that stdout holds only what `up` prints when it is done.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omnictl import output
from omnictl.startup import Report, View

if TYPE_CHECKING:
    from rich.live import Live

COLUMNS = ("stage", "state", "doing", "elapsed")


@contextmanager
def startup_view(name: str) -> Iterator[View]:
    """The view that suits stderr. Use as a context manager: the table is left as it was last drawn."""
    if not sys.stderr.isatty():
        yield LineView(name)
        return
    from rich.live import Live

    with Live(console=output.console(stderr=True), refresh_per_second=4) as live:
        yield TableView(live)


class LineView:
    """One line for each change of the phase or of a stage's state."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: dict[str, str] = {}

    def update(self, report: Report) -> None:
        self._say(self._name, str(report["phase"]))
        for row in report.get("stages", ()):
            self._say(_label(row), _doing(row))

    def _say(self, label: str, text: str) -> None:
        if self._last.get(label) != text:
            self._last[label] = text
            output.note(f"{label}: {text}")


class TableView:
    """The stages as a table, redrawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def update(self, report: Report) -> None:
        rows = [
            (
                _label(row),
                row["state"],
                "" if row["reason"] == row["state"] else row["reason"],
                f"{row['elapsed_s']:.0f} s",
            )
            for row in report.get("stages", ())
        ]
        self._live.update(output.make_table(COLUMNS, rows, title=str(report["phase"])))


def _label(row: dict[str, Any]) -> str:
    return str(row["stage"]) if row["replica"] == 0 else f"{row['stage']}.{row['replica']}"


def _doing(row: dict[str, Any]) -> str:
    return str(row["state"]) if row["reason"] in ("", row["state"]) else f"{row['state']}: {row['reason']}"
