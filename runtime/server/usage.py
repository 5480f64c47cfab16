"""Token counts of an answer, from the counts that its stages reported. Text tokens are the counts of the stage
that writes the text, and of it alone; a frame of audio counts as one token. As in the public API the total of an
answer has both, and the details have them apart. Pure, and the same for streams and whole answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.plan import Modality, Plan

StageUsage = Mapping[str, Mapping[str, float]]


def chat_usage(plan: Plan, usage: StageUsage) -> dict[str, Any]:
    """`usage` of a chat completion. audio_tokens are the frames that the audio stage made."""
    outputs = plan.tasks["chat"].outputs
    text = usage.get(outputs[Modality.TEXT], {})
    prompt, written = int(text.get("prompt_tokens", 0)), int(text.get("completion_tokens", 0))
    of_media = int(text.get("media_tokens", 0))
    frames = _audio_frames(plan, "chat", usage)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written + frames,
        "total_tokens": prompt + written + frames,
        "prompt_tokens_details": {"cached_tokens": int(text.get("cached_tokens", 0)), "text_tokens": prompt - of_media},
        "completion_tokens_details": {"audio_tokens": frames, "text_tokens": written},
    }


def speech_usage(plan: Plan, usage: StageUsage) -> dict[str, int]:
    """`usage` of a speech event: characters read and frames of audio made."""
    characters = int(usage.get(plan.tasks["speech"].inputs[Modality.TEXT], {}).get("text_chars", 0))
    frames = _audio_frames(plan, "speech", usage)
    return {"input_tokens": characters, "output_tokens": frames, "total_tokens": characters + frames}


def found_nothing_to_say(plan: Plan, usage: StageUsage) -> bool:
    """Whether the stage that reads a speech request's text says that it made no frame of it."""
    return usage.get(plan.tasks["speech"].inputs[Modality.TEXT], {}).get("frames") == 0


def heard_s(plan: Plan, usage: StageUsage) -> float:
    """Seconds of audio that a transcription listened to."""
    return float(usage.get(plan.tasks["transcription"].inputs[Modality.AUDIO], {}).get("audio_s", 0.0))


def _audio_frames(plan: Plan, task: str, usage: StageUsage) -> int:
    stage = plan.tasks[task].outputs.get(Modality.AUDIO)
    return int(usage.get(stage, {}).get("frames", 0)) if stage else 0
