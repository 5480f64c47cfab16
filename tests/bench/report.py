"""Measurements as tables on the terminal and, when asked for, as a page in docs/measurements/."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"


@dataclass(frozen=True)
class Section:
    """One table with what it shows; `notes` come below it."""

    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    heading: str = ""
    notes: str = ""

    def text(self) -> str:
        parts = [f"## {self.heading}"] if self.heading else []
        parts += [self.about, table(self.columns, self.rows)] if self.rows else [self.about]
        parts += [self.notes] if self.notes else []
        return "\n\n".join(part for part in parts if part)


def machine() -> str:
    """One line: processor, cores, memory, Python."""
    with Path("/proc/cpuinfo").open() as lines:
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory_gib = psutil.virtual_memory().total / 2**30
    model = models[0] if models else platform.machine()
    return f"{model}, {psutil.cpu_count()} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def update_page(name: str, *, title: str, command: str, sections: Sequence[Section], write: bool) -> None:
    """A page of sections with headings, each with the day of its measurement; those that are not given stay."""
    stamp = f"{machine()}; {datetime.datetime.now(tz=datetime.UTC).date()}; load average {os.getloadavg()[0]:.1f}."
    texts = {section.heading: f"{section.text()}\n\n{stamp}" for section in sections}
    sys.stdout.write("\n\n".join(texts.values()) + "\n")
    if write:
        path = MEASUREMENTS / f"{name}.md"
        _, *old = path.read_text().split("\n## ") if path.is_file() else [""]
        kept = {text.split("\n", 1)[0]: f"## {text.strip()}" for text in old}
        body = "\n\n".join((kept | texts).values())
        path.write_text(f"# {title}\n\n    {command}\n\n{body}\n")


def write_page(name: str, *, title: str, command: str, sections: Sequence[Section], write: bool) -> None:
    body = "\n\n".join(section.text() for section in sections)
    sys.stdout.write(body + "\n")
    if write:
        today = datetime.datetime.now(tz=datetime.UTC).date()
        MEASUREMENTS.mkdir(parents=True, exist_ok=True)
        page = f"# {title}\n\n    {command}\n\n{machine()}; {today}.\n\n{body}\n"
        (MEASUREMENTS / f"{name}.md").write_text(page)


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
    """A page with one table."""
    section = Section(about, columns, rows, notes=notes)
    write_page(name, title=title, command=command, sections=[section], write=write)
