"""Start and end of a deployment: progress, deadlines, failures to load, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from runtime.requests import Done
from runtime.sweep import start_ticks
from tests.deploy import PATIENCE_S, ask, deployed, spec, until
from tests.plans import sim_plan


async def test_progress_resets_the_start_deadline(tmp_path: Path) -> None:
    """F045: a stage that says it is getting on may take longer than the deadline."""
    plan = sim_plan(stages={"talk": {"load_s": 9.0}})
    plan = plan.model_copy(update={"stages": tuple(s.model_copy(update={"start_timeout_s": 8.0}) for s in plan.stages)})
    async with deployed(plan, tmp_path) as deployment:
        assert isinstance((await ask(deployment, spec()))[-1], Done)


async def test_a_silent_start_fails_and_names_the_stage(tmp_path: Path) -> None:
    plan = sim_plan(stages={"talk": {"load_s": 600.0, "load_silently": True}})
    plan = plan.model_copy(update={"stages": tuple(s.model_copy(update={"start_timeout_s": 5.0}) for s in plan.stages)})
    async with deployed(plan, tmp_path, wait=False) as deployment:
        await until(lambda: deployment.phase == "failed", deployment=deployment)
        row = next(r for r in deployment.status()["stages"] if r["stage"] == "talk")
        assert row["state"] == "failed"
        # the other stage of the process waits for its turn, or has had it
        waiting = "(, wave: not started yet)?"
        assert re.search(rf"no progress for 5 s while talk: loading{waiting} \(start_timeout_s\)", row["reason"])


async def test_stages_of_one_process_load_one_at_a_time(tmp_path: Path) -> None:
    """Libraries that import each other in circles once failed in one thread because of the other."""
    async with deployed(sim_plan(stages={"talk": {"load_s": 1.0}, "wave": {"load_s": 1.0}}), tmp_path):
        log = (tmp_path / "logs" / "p2.log").read_text()
    steps = re.findall(r"(talk|wave)\.0: (loading|loaded)", log)
    assert [step for _, step in steps] == ["loading", "loaded"] * 2, "nobody begins before the other is through"
    assert steps[0][0] == steps[1][0] != steps[2][0] == steps[3][0]


async def test_a_stage_that_cannot_load_says_why(tmp_path: Path) -> None:
    async with deployed(sim_plan(stages={"wave": {"nonsense": 1}}), tmp_path, wait=False) as deployment:
        await until(lambda: deployment.phase == "failed", deployment=deployment)
        failure = deployment.status()["failure"]
        assert "nonsense" in failure["message"]
        assert failure["class"] == "ConfigError"
        assert "nonsense" in (tmp_path / "logs" / "p2.log").read_text()


async def test_stop_while_starting(tmp_path: Path) -> None:
    """It does not wait for the load."""
    async with deployed(sim_plan(stages={"talk": {"load_s": 600.0}}), tmp_path, wait=False) as deployment:
        await until(lambda: all(row["pid"] for row in deployment.status()["stages"]), deployment=deployment)
        pids = [row["pid"] for row in deployment.status()["stages"]]
    assert all(start_ticks(pid) is None for pid in pids)


async def test_two_deployments_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with deployed(sim_plan(), tmp_path / "a") as one, deployed(sim_plan(), tmp_path / "b") as two:
        found = await asyncio.gather(*(ask(d, spec()) for d in (one, two) for _ in range(4)))
        assert all(isinstance(events[-1], Done) for events in found)


def ours_in_shared_memory(pids: set[int]) -> list[str]:
    return [p.name for p in Path("/dev/shm").glob("omnictl-*") if int(p.name.split("-")[1]) in pids]


class ServerProcess:
    """`python -P -m runtime.serve` with a sim plan, and its workers."""

    def __init__(self, folder: Path) -> None:
        (folder / "plan.json").write_text(sim_plan().model_dump_json())
        self.port = free_port()
        command = [sys.executable, "-P", "-m", "runtime.serve", "--plan", str(folder / "plan.json")]
        command += ["--port", str(self.port), "--state-dir", str(folder)]
        with (folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self.base = f"http://127.0.0.1:{self.port}"

    def until_ready(self) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            try:
                if httpx.get(f"{self.base}/ready", timeout=PATIENCE_S).status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, "the server ended"
            time.sleep(0.05)
        raise AssertionError(httpx.get(f"{self.base}/ready").text)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def assert_gone(workers: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    assert not alive


def test_sigterm_ends_everything(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    try:
        server.until_ready()
        workers = server.workers()
        pids = {server.process.pid, *(w.pid for w in workers)}
        assert len(workers) == 3
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert_gone(workers)
        assert ours_in_shared_memory(pids) == []
    finally:
        server.end()


def test_kill_9_of_the_server_takes_the_workers_along(tmp_path: Path) -> None:
    """F024, F046: no orphan; what is left in shared memory is swept by the next start, and the port is free."""
    server = ServerProcess(tmp_path)
    try:
        server.until_ready()
        workers = server.workers()
        pids = {server.process.pid, *(w.pid for w in workers)}
        server.process.kill()
        server.process.wait(PATIENCE_S)
        assert_gone(workers)
    finally:
        server.end()
    again = ServerProcess(tmp_path)
    try:
        again.until_ready()
        assert ours_in_shared_memory(pids) == []
        assert list(Path(tempfile.gettempdir()).glob(f"omnictl-{server.process.pid}-*")) == []
    finally:
        again.process.send_signal(signal.SIGTERM)
        again.process.wait(PATIENCE_S)
        again.end()


def test_signals_while_starting(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        server = ServerProcess(tmp_path)
        try:
            deadline_s = time.monotonic() + PATIENCE_S
            while len(server.workers()) < 3 and time.monotonic() < deadline_s:
                time.sleep(0.02)
            workers = server.workers()
            server.process.send_signal(number)
            assert server.process.wait(PATIENCE_S) == 0
            assert_gone(workers)
        finally:
            server.end()


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path)
    try:
        server.until_ready()
        workers = server.workers()
        request = {"model": "sim-chain", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", f"{server.base}/v1/chat/completions", json=request, timeout=PATIENCE_S):
            os.kill(server.process.pid, signal.SIGINT)
            os.kill(server.process.pid, signal.SIGINT)
            assert server.process.wait(PATIENCE_S) in (0, 130)
        assert_gone(workers)
    finally:
        server.end()
