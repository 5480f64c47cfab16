"""Waiting for a deployment to become ready.

Every sign of progress resets the deadline; the server's death and a signal end the wait at once. What is shown
meanwhile is a `View`'s (see `startup_view`); what to do about the outcome is `up`'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from omnictl.interrupts import Interrupts
from omnictl.processes import listens
from omnictl.state import Deployment
from runtime.errors import OmniError

if TYPE_CHECKING:
    from omnictl.client import Client

PROBE_INTERVAL_S = 0.25

Report = Mapping[str, Any]
"""What /v1/omnictl/status answers: phase, failure, stages (a row a replica)."""


class View(Protocol):
    def update(self, report: Report) -> None: ...


class Outcome(StrEnum):
    READY = "ready"
    FAILED = "failed"
    EXITED = "exited"
    SILENT = "silent"
    DEGRADED = "degraded"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Wait:
    """How a wait ended, and the last report (empty when there was none)."""

    outcome: Outcome
    report: Report = field(default_factory=dict)

    @property
    def failing_process(self) -> str | None:
        """The worker process that most likely is to blame: a failed one, else one that is not ready."""
        for state in ("failed", "down", "starting"):
            for row in self.report.get("stages", ()):
                if row["state"] == state:
                    return str(row["process"])
        return None


_DECIDING = {phase: Outcome(phase) for phase in ("ready", "failed")}


def wait_ready(
    deployment: Deployment,
    client: Client,
    interrupts: Interrupts,
    view: View,
    *,
    silence_timeout_s: float,
    settle_for_degraded: bool = False,
) -> Wait:
    """Watch the status, the server process and the signals until one of them decides.

    `settle_for_degraded`: a deployment that was ready and has lost a stage is not waited for.
    """
    deciding = _DECIDING | ({"degraded": Outcome.DEGRADED} if settle_for_degraded else {})
    report: Report = {}
    deadline = time.monotonic() + silence_timeout_s
    with deployment.process.opened() as fd:
        if fd is None:
            return Wait(Outcome.EXITED)
        while time.monotonic() < deadline:
            if interrupts.wait([fd], PROBE_INTERVAL_S):
                return Wait(Outcome.EXITED, report)
            if interrupts.received:
                return Wait(Outcome.INTERRUPTED, report)
            if (news := _ask(deployment, client)) is None:
                continue
            view.update(news)
            if news["phase"] in deciding:
                return Wait(deciding[news["phase"]], news)
            if _signs_of_progress(news) != _signs_of_progress(report):
                deadline = time.monotonic() + silence_timeout_s
            report = news
    return Wait(Outcome.SILENT, report)


def _ask(deployment: Deployment, client: Client) -> Report | None:
    """None while nobody answers, or somebody else does: two servers may have been given one port."""
    try:
        report = client.status()
    except OmniError:
        return None
    return report if listens(deployment.process, deployment.port) else None


def _signs_of_progress(report: Report) -> tuple[object, ...]:
    """Whatever changes when something moves on; not the elapsed times, which always do."""
    rows = report.get("stages", ())
    return report.get("phase"), *((row["state"], row["reason"], row["generation"]) for row in rows)
