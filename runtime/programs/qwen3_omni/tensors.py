"""Torch tensors as payload tensors and back. bfloat16, which payloads do not know, travels as its bits."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def to_array(tensor: torch.Tensor) -> tuple[Array, str]:
    """The array and the name of the dtype that it stands for."""
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.contiguous().cpu().numpy(), name


def to_tensor(array: Array, dtype: str, device: str) -> torch.Tensor:
    """A copy on `device`: the array may lie in memory that its sender gets back."""
    tensor = torch.tensor(array)
    return (tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor).to(device)
