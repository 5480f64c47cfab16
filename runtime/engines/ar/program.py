"""What an autoregressive stage's program is: the model family's glue around the engine.

A program turns input pieces into a prompt and generated text into payloads. It knows chat templates and payload
conventions; it does not know vLLM, batches or other requests. Called by engine.py, from the stage's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from runtime.engines.ar.inputs import InputRows
from runtime.engines.ar.sampling import Sampling
from runtime.engines.base import StageWork
from runtime.payload import Payload


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of one generation.

    media: modality -> items in the order of their placeholder tokens, one token an item; audio as (samples, rate in
    Hz), images as PIL images, videos as uint8 [frames, height, width, 3]. media_options: of the model's preprocessing
    of them. wants_rows: whether `payloads` gets tensors of a stage that taps hidden states. inputs: what the model is
    fed with instead of the tokens, which then only count; the program goes on filling them.
    """

    token_ids: list[int]
    sampling: Sampling
    media: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    media_options: Mapping[str, Any] = field(default_factory=dict)
    wants_rows: bool = False
    stop_token_ids: tuple[int, ...] = ()
    inputs: InputRows | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """What one engine step added to a request.

    text: whole characters only; may be empty while a character or a possible stop string is incomplete.
    token_ids: the new tokens, the end token included. seed: of a request that samples, None of a greedy one.
    """

    text: str
    token_ids: Sequence[int]
    seed: int | None
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Of a stage with `hidden_states_arguments`, torch tensors for the tokens whose rows are new: "token_ids" [n],
    "embeddings" and "hidden" [n, hidden size]. First those of the prompt, with "positions" [3, n] where the model has
    positions of more than one dimension, then those of each sampled token; the last one is never put in again, so it
    has none. With `input_rows_arguments`, "codes" [groups] of the sampled token.
    """


def hidden_states_arguments(layer: int | None, devices: Sequence[str]) -> dict[str, Any]:
    """Engine arguments that tap, for a stage on these devices, the output of the first `layer` layers; None: what the
    model makes of all its layers, its last norm included.
    """
    on_cpu = all(device == "cpu" for device in devices)
    worker = "compat_runner.TappedCPUWorker" if on_cpu else "compat_gpu.TappedGPUWorker"
    return {"worker_cls": f"runtime.engines.ar.{worker}", "additional_config": {"hidden_layer": layer}}


def input_rows_arguments(devices: Sequence[str]) -> dict[str, Any]:
    """Engine arguments of a stage whose prompts have `inputs`. Equal tokens do not mean equal input there, so no prefix
    may be taken from the cache. With prompt embeddings enabled the model is compiled, and captured, for rows as input.
    """
    on_cpu = all(device == "cpu" for device in devices)
    worker = "compat_runner.FedCPUWorker" if on_cpu else "compat_gpu.FedGPUWorker"
    return {
        "worker_cls": f"runtime.engines.ar.{worker}",
        "scheduler_cls": "runtime.engines.ar.compat_scheduler.GatedScheduler",
        "skip_tokenizer_init": True,
        "enable_prompt_embeds": True,
        "enable_prefix_caching": False,
    }


class ArProgram(Protocol):
    """Errors of a request are raised as OmniError; anything else counts as a fault of the stage."""

    def arguments(self) -> Mapping[str, Any]:
        """Engine arguments of the model family, such as worker_cls or hf_overrides; they win over the plan's.

        A scheduler_cls extends compat.StageScheduler.
        """

    def open(self, work: StageWork) -> Any:
        """State of a new request. InvalidRequest for parameters it cannot honour."""

    def feed(self, state: Any, payload: Payload) -> None:
        """Take one input piece."""

    def prompt(self, state: Any, tokenizer: Any) -> Prompt | None:
        """Called once, when all inputs are complete or the program begins before. None: nothing to generate."""

    def num_tokens_by_part(self, state: Any, tokenizer: Any) -> Mapping[str, int]:
        """Tokens of each part of the input, by the name under which the client knows it."""

    def payloads(self, state: Any, generated: Generated) -> list[Payload]:
        """What downstream gets for newly generated tokens; may be nothing."""

    def facts(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


@runtime_checkable
class Eager(Protocol):
    """What a program has besides, if its prompts can be made before the inputs are complete."""

    def begins(self, state: Any) -> bool:
        """Whether the prompt can be made from what has come so far."""
