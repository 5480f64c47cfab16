"""Facts of the machine that belong beside every measured figure."""

from __future__ import annotations

import datetime
import os
import platform
import re
from pathlib import Path

import numpy as np


def machine_facts(command: str) -> list[str]:
    """Lines of Markdown: when, with what command, and on what the figures were taken."""
    processor = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    now = datetime.datetime.now(datetime.UTC)
    return [
        f"- Date: {now:%Y-%m-%d %H:%M} UTC",
        f"- Command: `{command}`",
        f"- Processor: {processor[1] if processor else platform.machine()}, {os.cpu_count()} cores, "
        f"{memory_bytes / 2**30:.0f} GiB of memory",
        f"- System: {platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}",
        f"- Load average at the end of the run: {os.getloadavg()[0]:.1f}",
    ]
