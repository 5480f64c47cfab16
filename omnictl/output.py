"""The only printer. Data goes to stdout, as a table or as one JSON document; everything else to stderr.

rich is imported when something is drawn, so that `--help` and `--json` stay fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from runtime.errors import OmniError

PIPE_WIDTH = 1000


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # What is piped somewhere is not folded to an imagined terminal's width.
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=width)


def print_json(value: Any) -> None:
    """One JSON document on stdout, keys in the order given."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def make_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column)
    for row in rows:
        # As Text: brackets in a value are the value's, not markup.
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    return table


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    console().print(make_table(columns, rows, title=title))


def print_facts(facts: Mapping[str, object]) -> None:
    """Aligned `name  value` lines on stdout."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        sys.stdout.write(f"{name:<{width}}  {value}\n")


def write(text: str) -> None:
    """Raw text to stdout, flushed at once: streamed answers, log lines."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(message: str) -> None:
    """A remark for the person at the terminal, on stderr."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def prompt(text: str) -> None:
    """Ask for a line, on stderr and without a line end."""
    sys.stderr.write(text)
    sys.stderr.flush()


def report_error(error: OmniError) -> None:
    """What went wrong, every problem of it, and the next step, on stderr."""
    note(f"error: {error.message}")
    for problem in error.problems:
        note(f"  - {problem}")
    if error.hint:
        note(f"hint: {error.hint}")
