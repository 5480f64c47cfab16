"""What an autoregressive stage's program is: the model family's glue around the engine.

A program turns input pieces into a prompt and generated text into payloads. It knows chat templates and payload
conventions; it does not know vLLM, batches or other requests. Called by engine.py, from the stage's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.engines.ar.sampling import Sampling
from runtime.engines.base import StageWork
from runtime.payload import Payload


@dataclass(frozen=True, slots=True)
class Prompt:
    """Input of one generation."""

    token_ids: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Generated:
    """What one engine step added to a request.

    text: whole characters only; may be empty while a character or a possible stop string is incomplete.
    token_ids: the new tokens, the end token included. seed: of a request that samples, None of a greedy one.
    """

    text: str
    token_ids: Sequence[int]
    seed: int | None


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

    def prompt(self, state: Any, tokenizer: Any) -> Prompt:
        """Called once, when all inputs are complete."""

    def num_tokens_by_part(self, state: Any, tokenizer: Any) -> Mapping[str, int]:
        """Tokens of each part of the input, by the name under which the client knows it."""

    def payloads(self, state: Any, generated: Generated) -> list[Payload]:
        """What downstream gets for newly generated tokens; may be nothing."""

    def facts(self) -> Mapping[str, Any]: ...

    def close(self) -> None: ...
