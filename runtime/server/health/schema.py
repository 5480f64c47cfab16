"""The wire of the probes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.plan import Modality
from runtime.server.ports import Availability

SERVING_PHASES = frozenset({"ready", "degraded"})
UNSTARTED_PHASES = frozenset({"starting", "warming", "failed"})
"""Phases of a deployment; the last one is draining."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer of a probe: HTTP status by `passed`."""

    passed: bool
    body: dict[str, Any]


def stage_phases(status: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a status that says what is being waited for."""
    rows = [{key: row.get(key) for key in ("stage", "replica", "state", "reason")} for row in status["stages"]]
    return {"phase": status["phase"], "failure": status["failure"], "stages": rows}


def modality_rows(availability: Mapping[str, Mapping[Modality, Availability]]) -> dict[str, dict[str, Any]]:
    return {
        task: {str(modality): {"ready": one.ready, "reason": one.reason} for modality, one in modalities.items()}
        for task, modalities in availability.items()
    }
