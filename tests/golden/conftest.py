"""The tiny omni checkpoint and what transformers makes of it: built once a session, for the tests that ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.golden.omni_reference import Reference


@pytest.fixture(scope="session")
def omni_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.golden.tiny_qwen3_omni import save_omni

    folder = tmp_path_factory.mktemp("tiny-qwen3-omni")
    save_omni(folder)
    return folder


@pytest.fixture(scope="session")
def omni_model(omni_checkpoint: Path) -> Any:
    """As transformers loads it from the folder: what is written is what is compared."""
    import torch
    from transformers import Qwen3OmniMoeForConditionalGeneration

    torch.set_num_threads(1)
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        omni_checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="session")
def omni_references(omni_checkpoint: Path, omni_model: Any) -> dict[str, Reference]:
    from transformers import Qwen3OmniMoeProcessor

    from tests.golden.omni_reference import PARTS, make_reference

    processor = Qwen3OmniMoeProcessor.from_pretrained(omni_checkpoint)
    return {name: make_reference(omni_model, processor, name) for name in PARTS}
