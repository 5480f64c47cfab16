"""A mistake of vLLM's model of the thinker, mended. Imported only in a process that runs a thinker, by thinker.py."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models import qwen2_5_omni_thinker, qwen3_omni_moe_thinker


def merge_by_modality() -> None:
    """WHY: vLLM puts what its encoders made of media into the prompt one item after the other, and by modality only
    where it sees sound and pictures of a video alternate. In a chunk that begins in a stretch of sound it sees but one
    change, and gives the pictures' embeddings to the sound. By modality is right in any order.
    SCOPE: vLLM 0.32, both families. REMOVE WHEN: test_a_chunk_that_begins_in_the_sound_of_a_video passes without.
    """
    for module in (qwen2_5_omni_thinker, qwen3_omni_moe_thinker):
        module.check_interleaved_audio_video = _has_both


def _has_both(is_video: Any, is_audio: Any, num_video: int, num_audio: int) -> bool:
    return num_video > 0 and num_audio > 0
