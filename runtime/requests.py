"""A request as the server hands it to the orchestrator, and the events that come back.

Every accepted request yields deltas and modality ends, then exactly one terminal; nothing follows it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.errors import OmniError
from runtime.payload import Payload
from runtime.plan import Modality


def new_request_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a client asks for.

    inputs: for each kind of input the pieces that the entry stage gets, in order. The last one is marked
    `last` by the orchestrator unless the modality is in `open_inputs`, in which case more pieces follow
    through `Orchestrator.update`. params are seen by every stage of the request; each takes what it knows:

        sampling   {temperature, top_p, top_k, min_p, max_tokens, stop, seed, repetition_penalty,
                    presence_penalty, frequency_penalty}, only what the client set
        stage_params         stage -> sampling parameters of its own; a stage sees only its own, as stage_sampling
        mm_processor_kwargs  {use_audio_in_video, fps}: how media are taken in
        voice, speed, seed                   for speech
        language, prompt, temperature        for transcription
    """

    task: str
    modalities: tuple[Modality, ...]
    inputs: Mapping[Modality, list[Payload]]
    params: Mapping[str, Any] = field(default_factory=dict)
    open_inputs: frozenset[Modality] = frozenset()
    timeout_s: float | None = None
    request_id: str = field(default_factory=new_request_id)

    def params_of(self, stage: str) -> dict[str, Any]:
        """The params as one stage sees them."""
        params = dict(self.params)
        own = params.pop("stage_params", {}).get(stage)
        return {**params, "stage_sampling": own} if own else params


@dataclass(frozen=True, slots=True)
class Delta:
    """A payload for the client. `sequence` counts the request's deltas from 0 over all modalities."""

    request_id: str
    epoch: int
    sequence: int
    modality: Modality
    payload: Payload


@dataclass(frozen=True, slots=True)
class ModalityEnd:
    """The stage that ends a modality is through with it. reason: stop or length."""

    request_id: str
    modality: Modality
    reason: str
    usage: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Done:
    """Terminal: all wanted modalities ended. usage: stage name -> its counts."""

    request_id: str
    usage: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Failed:
    """Terminal."""

    request_id: str
    error: OmniError


@dataclass(frozen=True, slots=True)
class AbortedRequest:
    """Terminal: the client (or a deadline of the client's side) gave up. acknowledged: stages that confirmed."""

    request_id: str
    acknowledged: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


Event = Delta | ModalityEnd | Done | Failed | AbortedRequest
TERMINALS = (Done, Failed, AbortedRequest)
