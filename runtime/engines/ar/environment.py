"""Prepares a process for vLLM. Must run before anything imports vllm or transformers; imports neither.

Called by engine.py when a stage is loaded. Running it again changes nothing.
"""

from __future__ import annotations

import logging
import os

from runtime.engines.torchvision_operators import declare_missing_operators
from runtime.settings import home_dir

FIXED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core lives in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # our taps are in the first generation, which a CPU has alone
    "VLLM_CONFIGURE_LOGGING": "0",  # its messages go where ours go
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
REMOVED = ("VLLM_CPU_KVCACHE_SPACE",)
"""Would override the KV cache size of the plan."""
LOG_LEVEL = "ERROR"
"""vLLM warns at every start of what we chose on purpose. VLLM_LOGGING_LEVEL shows more."""


def prepare_process() -> None:
    """Environment variables, logging and torchvision's operators."""
    os.environ.update(FIXED)
    for name in REMOVED:
        os.environ.pop(name, None)
    os.environ.setdefault("VLLM_CACHE_ROOT", str(home_dir() / "vllm"))
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", LOG_LEVEL))
    declare_missing_operators()
