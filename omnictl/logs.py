"""Log files of a deployment: the last lines, and following them as they grow.

The server writes server.log and each worker process its own file; a stage is found by its process in the plan.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from omnictl.interrupts import Interrupts
from runtime.errors import ConfigError

SERVER = "server"
BLOCK_BYTES = 64 << 10
FOLLOW_INTERVAL_S = 0.2


def log_files(log_dir: Path, plan_json: str | None, stage: str | None) -> list[Path]:
    """The file of a stage, of a process or of the server; all files when `stage` is None."""
    processes = {SERVER: [SERVER]} | _processes(plan_json)
    if stage is None:
        planned = [log_dir / f"{name}.log" for group in processes.values() for name in group]
        return list(dict.fromkeys([*planned, *sorted(log_dir.glob("*.log"))]))
    if stage not in processes:
        raise ConfigError(f"no stage or process is called {stage!r}", hint=f"one of: {', '.join(processes)}")
    return [log_dir / f"{process}.log" for process in processes[stage]]


def _processes(plan_json: str | None) -> dict[str, list[str]]:
    """Stage or process name -> process names, in plan order. A stage has several with several replicas."""
    try:
        processes = json.loads(plan_json or "")["processes"]
        found: dict[str, list[str]] = {}
        for process in processes:
            for stage in dict.fromkeys(r["stage"] for r in process["replicas"]):
                found.setdefault(stage, []).append(process["name"])
        return {process["name"]: [process["name"]] for process in processes} | found
    except (ValueError, KeyError, TypeError):
        return {}


def last_lines(path: Path, num_lines: int) -> list[str]:
    """At most so many lines from the end of a file; none when it does not exist."""
    file = LogFile(path, num_lines)
    return [*file.new_lines(), *file.unfinished_line()]


class LogFile:
    """Lines of a file from `num_lines` before its present end on. It may appear later, or be truncated."""

    def __init__(self, path: Path, num_lines: int) -> None:
        self.path = path
        self._unfinished = b""
        try:
            with open(path, "rb") as file:
                self._offset = _offset_of_last(file, num_lines)
        except FileNotFoundError:
            self._offset = 0

    def new_lines(self) -> list[str]:
        """Complete lines written since the last call."""
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._unfinished = 0, b""
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        return [_decode(line) for line in lines]

    def unfinished_line(self) -> list[str]:
        """What was written after the last line end, if anything."""
        return [_decode(self._unfinished)] if self._unfinished else []


def follow(files: list[LogFile], interrupts: Interrupts, end_fd: int) -> Iterator[tuple[str, str]]:
    """(name of the file, line) until a signal comes or `end_fd`, a pidfd, says that the writer has ended."""
    ended = False
    while not ended and not interrupts.received:
        # The writer's end is looked at before its last lines are read, so that none is missed.
        ended = bool(interrupts.wait([end_fd], FOLLOW_INTERVAL_S))
        for file in files:
            for line in file.new_lines():
                yield file.path.stem, line


def _offset_of_last(file: BinaryIO, num_lines: int) -> int:
    """Where the last so many lines begin. An unfinished line at the end counts as one."""
    end = position = file.seek(0, os.SEEK_END)
    if num_lines == 0:
        return end
    data = b""
    # The line end at the very end of the file closes the last line and begins none: hence the bound.
    while position > 0 and data.count(b"\n") <= num_lines:
        size = min(BLOCK_BYTES, position)
        position -= size
        file.seek(position)
        data = file.read(size) + data
    lines = io.BytesIO(data).readlines()
    return end - sum(map(len, lines[-num_lines:]))


def _decode(line: bytes) -> str:
    """Of a progress bar that redraws its line, only what it showed last."""
    return line.rstrip(b"\r").rsplit(b"\r", 1)[-1].decode(errors="replace")
