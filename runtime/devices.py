"""What a worker process sees of the machine's GPUs: those of its plan, under names of its own. Called before anything
that might open one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

CPU = "cpu"
GPU_PREFIX = "cuda:"


def claim_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Hide all other GPUs from this process; the names of `devices` in it, in their order.

    A plan numbers GPUs by their place on the bus, as the driver's tools do; CUDA would begin with the fastest.
    """
    numbers = [device.removeprefix(GPU_PREFIX) for device in devices if device != CPU]
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)
    names = iter(f"{GPU_PREFIX}{number}" for number in range(len(numbers)))
    return tuple(CPU if device == CPU else next(names) for device in devices)
