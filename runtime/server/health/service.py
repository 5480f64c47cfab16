"""The work of the probes: whether the deployment started, and which modalities of which tasks can be asked for.

Liveness is that this process answers at all; readiness is the orchestrator's word, stage by stage.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from prometheus_client import generate_latest

from runtime.errors import InvalidRequest
from runtime.plan import Plan
from runtime.server.health.schema import SERVING_PHASES, UNSTARTED_PHASES, Probe, modality_rows, stage_phases
from runtime.server.ports import Orchestrator


class HealthService:
    def __init__(self, orchestrator: Orchestrator, plan: Plan) -> None:
        self._orchestrator = orchestrator
        self._version = {
            "version": version("omnictl-serve"),
            "plan_schema": plan.schema_version,
            "model_id": plan.model_id,
        }

    def ready(self, task: str | None, modality: str | None) -> Probe:
        """Everything is ready, or, with a task or modality, that much of it is. InvalidRequest for unknown ones."""
        rows = modality_rows(self._orchestrator.availability())
        wanted = [
            row
            for task_name, modalities in rows.items()
            for modality_name, row in modalities.items()
            if task in (None, task_name) and modality in (None, modality_name)
        ]
        if not wanted:
            asked = " with ".join(
                f"{name} {value!r}" for name, value in (("task", task), ("modality", modality)) if value is not None
            )
            param = "task" if task is not None and task not in rows else "modality"
            raise InvalidRequest(f"no {asked} here; served: {rows_text(rows)}", param=param)
        phases = stage_phases(self._orchestrator.status())
        passed = phases["phase"] in SERVING_PHASES and all(row["ready"] for row in wanted)
        return Probe(passed, {"ready": passed, **phases, "tasks": rows})

    def started(self) -> Probe:
        phases = stage_phases(self._orchestrator.status())
        return Probe(phases["phase"] not in UNSTARTED_PHASES, phases)

    def status(self) -> dict[str, Any]:
        return self._orchestrator.status()

    def version(self) -> dict[str, Any]:
        return self._version

    def metrics(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self._orchestrator.metrics)


def rows_text(rows: dict[str, dict[str, Any]]) -> str:
    return ", ".join(f"{task} ({', '.join(modalities)})" for task, modalities in rows.items())
