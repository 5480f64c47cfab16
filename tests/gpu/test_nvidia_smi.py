"""The GPU probe against the vendor's real tool."""

from __future__ import annotations

import pytest

from omnictl.hardware import probe
from omnictl.units import GIB

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_user_settings")]


def test_the_real_tool_is_understood() -> None:
    hardware = probe()
    assert hardware.gpus, hardware.findings
    assert not [finding for finding in hardware.findings if finding.level == "warning"]
    for gpu in hardware.gpus:
        assert gpu.uuid.startswith("GPU-")
        assert GIB < gpu.free_bytes <= gpu.total_bytes
        assert gpu.compute_capability >= (5, 0)
