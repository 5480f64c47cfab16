"""Makes `import torchvision` work beside a CPU build of torch. Called before anything imports transformers' or vllm's
vision code, once in each process that does.

WHY: those libraries import torchvision even when only text is served, its usual build links to CUDA libraries, and
where its operators cannot be loaded the import fails on the missing `torchvision::nms`.
SCOPE: the operators' names only; a call of one raises. REMOVE WHEN: torchvision imports without its library.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

OPERATORS = ("nms", "qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_declared: list[Any] = []
"""Keeps the declarations alive: torch forgets them with their library object."""


def declare_missing_operators() -> bool:
    """Declare the operators if torchvision's own library cannot be loaded; whether that was needed."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if _declared or spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(str(Path(spec.origin).parent / "_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in OPERATORS:
            library.define(name + SIGNATURE)
        _declared.append(library)
        return True
    return False
