"""Measurements as a table on the terminal and, when asked for, as a page in docs/measurements/."""

from __future__ import annotations

import datetime
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"


def machine() -> str:
    """One line: processor, cores, memory, Python."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{model}, {psutil.cpu_count()} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def write_report(
    name: str,
    *,
    title: str,
    command: str,
    about: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    write: bool,
    notes: str = "",
) -> None:
    body = table(columns, rows)
    sys.stdout.write(f"{body}\n{notes}\n")
    if write:
        today = datetime.datetime.now(tz=datetime.UTC).date()
        page = f"# {title}\n\n{about}\n\n    {command}\n\n{machine()}; {today}.\n\n{body}\n"
        MEASUREMENTS.mkdir(parents=True, exist_ok=True)
        (MEASUREMENTS / f"{name}.md").write_text(page + (f"\n{notes}\n" if notes else ""))
