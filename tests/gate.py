"""A gate that a test opens: a simulated stage waits there, so what a test says of an order is true on any machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Gate:
    """A named pipe in `folder`; a stage that meets the fault stands still until `open` is called."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        os.mkfifo(self.path)

    def fault(self, at_output: int, **when: Any) -> dict[str, Any]:
        """For the `faults` of a `sim` stage, whose stall timeout must be longer than the test."""
        return {"action": "hold", "at_output": at_output, "path": str(self.path), "when": when}

    def open(self) -> None:
        """Let the stage pass that stands at the gate, or the next one that comes."""
        os.close(os.open(self.path, os.O_WRONLY))
