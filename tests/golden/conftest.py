"""The tiny omni checkpoints and what transformers makes of them: built once a session, for the tests that ask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.golden.omni25_reference import Reference25
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


@pytest.fixture(scope="session")
def omni25_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.golden.tiny_qwen2_5_omni import save_omni25

    folder = tmp_path_factory.mktemp("tiny-qwen2.5-omni")
    save_omni25(folder)
    return folder


@pytest.fixture(scope="session")
def omni25_model(omni25_checkpoint: Path) -> Any:
    """As transformers loads it from the folder: what is written is what is compared."""
    import torch
    from transformers import Qwen2_5OmniForConditionalGeneration

    torch.set_num_threads(1)
    return Qwen2_5OmniForConditionalGeneration.from_pretrained(
        omni25_checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="session")
def omni25_references(omni25_checkpoint: Path, omni25_model: Any) -> dict[str, Reference25]:
    from transformers import Qwen2_5OmniProcessor

    from tests.golden.omni25_reference import NAMES, make_reference25

    processor = Qwen2_5OmniProcessor.from_pretrained(omni25_checkpoint)
    return {name: make_reference25(omni25_model, processor, name) for name in NAMES}
