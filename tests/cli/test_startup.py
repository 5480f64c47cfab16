"""Waiting for a deployment: what decides, what resets the deadline, and what a person sees."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from omnictl.client import Client
from omnictl.interrupts import Interrupts
from omnictl.startup import Outcome, Wait, wait_ready
from omnictl.startup_view import LineView
from tests.cli.conftest import Spawn, deployment, identity
from tests.cli.scripted import Reply, scripted_server


def report(phase: str, *states: tuple[str, str]) -> dict[str, Any]:
    rows = [
        {"stage": f"s{n}", "replica": 0, "process": f"p{n}", "state": state, "reason": reason, "generation": 1}
        for n, (state, reason) in enumerate(states)
    ]
    return {"phase": phase, "failure": None, "stages": [row | {"elapsed_s": time.monotonic()} for row in rows]}


class Recorder:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def update(self, news: Any) -> None:
        self.phases.append(news["phase"])


def wait(
    reports: Iterator[dict[str, Any]], *, timeout_s: float = 100.0, pid: int | None = None, **options: bool
) -> Wait:
    """Wait for a server in this process that answers with the reports, the last one again and again."""
    latest: list[dict[str, Any]] = []

    def answer(path: str) -> Reply:
        latest.extend(news for news in [next(reports, None)] if news is not None)
        return Reply.of(latest[-1])

    with scripted_server(answer) as port, Interrupts() as interrupts:
        record = deployment("one", identity(pid or os.getpid()), port=port)
        with Client(record.url) as client:
            return wait_ready(record, client, interrupts, Recorder(), silence_timeout_s=timeout_s, **options)


def test_ready_and_failed_decide() -> None:
    assert wait(iter([report("starting"), report("warming"), report("ready")])).outcome is Outcome.READY
    failed = wait(iter([report("starting", ("starting", "")), report("failed", ("ready", ""), ("failed", "why"))]))
    assert failed.outcome is Outcome.FAILED
    assert failed.failing_process == "p1"


def test_degraded_decides_only_for_a_deployment_of_somebody_else() -> None:
    reports = [report("degraded"), report("ready")]
    assert wait(iter(reports)).outcome is Outcome.READY
    assert wait(iter(reports), settle_for_degraded=True).outcome is Outcome.DEGRADED


def test_silence_ends_the_wait_and_elapsed_time_is_no_progress() -> None:
    result = wait((report("starting", ("starting", "loading")) for _ in iter(int, 1)), timeout_s=1.0)
    assert result.outcome is Outcome.SILENT
    assert result.failing_process == "p0"


def test_progress_resets_the_deadline() -> None:
    """Fourteen steps, one a probe, take at least 3.5 s; each is well within the deadline of 3 s."""
    steps = [report("starting", ("starting", f"part {n}")) for n in range(14)]
    assert wait(iter([*steps, report("ready")]), timeout_s=3.0).outcome is Outcome.READY


def test_the_servers_death_ends_the_wait_at_once(spawn: Spawn) -> None:
    child = spawn("import time; print('up', flush=True); time.sleep(0.5)")
    assert wait(iter([report("starting")]), timeout_s=100_000, pid=child.pid).outcome is Outcome.EXITED


def test_a_signal_ends_the_wait_at_once() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert wait(iter([report("starting")]), timeout_s=100_000).outcome is Outcome.INTERRUPTED


def test_another_server_on_the_port_is_not_taken_for_ours(spawn: Spawn) -> None:
    """Ours is a process that does not listen; somebody else's says "ready" on its port."""
    child = spawn("import time; print('up', flush=True); time.sleep(60)")
    assert wait(iter([report("ready")]), timeout_s=1.0, pid=child.pid).outcome is Outcome.SILENT


def test_without_a_terminal_each_change_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    view = LineView("one")
    view.update(report("starting", ("starting", "loading"), ("starting", "starting")))
    view.update(report("starting", ("starting", "loading"), ("starting", "starting")))
    view.update(report("warming", ("ready", "ready"), ("starting", "starting")))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "one: starting",
        "s0: starting: loading",
        "s1: starting",
        "one: warming",
        "s0: ready",
    ]


def test_at_a_terminal_there_is_a_table() -> None:
    code = (
        "from omnictl.startup_view import startup_view\n"
        "from tests.cli.test_startup import report\n"
        "with startup_view('one') as view:\n"
        "    view.update(report('starting', ('starting', 'loading [x]'), ('ready', 'ready')))\n"
    )
    terminal, end = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stderr=end)
    os.close(end)
    shown = b""
    while True:
        try:
            piece = os.read(terminal, 4096)
        except OSError:  # Linux says so when the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    assert process.wait(30) == 0
    assert b"loading [x]" in shown
    assert b"elapsed" in shown
