"""What breaks, breaks alone: stages that raise, crash, hang or are killed; aborts at every moment; deadlines."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from runtime import messages
from runtime.deployment import Deployment
from runtime.errors import ConnectorError, DeadlineExceeded, InvalidRequest, StageDied, StageError, Unavailable
from runtime.pool import Life
from runtime.requests import TERMINALS, AbortedRequest, Delta, Done, Event, Failed
from tests.deploy import AUDIO, TEXT, ask, collect, deployed, spec, until
from tests.plans import sim_plan

BAD = 13
"""Requests with this seed meet the fault."""


def broken(stage: str, action: str, at_output: int, **more: Any) -> dict[str, dict[str, Any]]:
    fault = {"action": action, "at_output": at_output, "when": {"seed": BAD}} | more
    return {stage: {"faults": [fault]}}


def assert_terminal(events: list[Event], kind: type) -> Any:
    assert [isinstance(e, TERMINALS) for e in events].count(True) == 1
    assert isinstance(events[-1], kind), events[-1]
    return events[-1]


def pid_of(deployment: Deployment, stage: str) -> int:
    return next(row["pid"] for row in deployment.status()["stages"] if row["stage"] == stage)


async def until_idle(deployment: Deployment) -> None:
    """No request, no slot, no shared memory is held by anybody."""
    pools = deployment.orchestrator.pools
    await until(lambda: deployment.status()["open_requests"] == 0, 10, deployment)
    assert all(not r.bound for pool in pools for r in pool.replicas)


async def test_an_error_of_one_request_is_its_own(tmp_path: Path) -> None:
    """F026, F027, F043, F106: the class of the error survives the process boundary; the neighbours end well."""
    kinds = {"raise": StageError, "invalid": InvalidRequest}
    cases = dict(enumerate(itertools.product(("think", "talk", "wave"), kinds, (0, 3)), start=100))
    stages: dict[str, dict[str, Any]] = {}
    for seed, (stage, action, at_output) in cases.items():
        fault = {"action": action, "at_output": at_output, "when": {"seed": seed}}
        stages.setdefault(stage, {"faults": []})["faults"].append(fault)
    async with deployed(sim_plan(stages=stages), tmp_path) as deployment:
        for seed, (stage, action, _) in cases.items():
            found = await asyncio.gather(*(ask(deployment, spec(seed=s)) for s in (1, seed, 2, 3)))
            failed = assert_terminal(found[1], Failed)
            assert isinstance(failed.error, kinds[action])
            assert stage in str(failed.error)
            for events in (found[0], *found[2:]):
                assert_terminal(events, Done)
            await until_idle(deployment)
        assert deployment.status()["phase"] == "ready"


@pytest.mark.parametrize("action", ["crash", "exit", "segfault"])
@pytest.mark.parametrize("stage", ["think", "talk", "wave"])
async def test_a_stage_that_dies_comes_back(tmp_path: Path, stage: str, action: str) -> None:
    """F026, F029, F039: its requests fail within 2 s, text still works, health says so, the next request works."""
    async with deployed(sim_plan(stages=broken(stage, action, 2)), tmp_path) as deployment:
        began_s = time.monotonic()
        failed = assert_terminal(await ask(deployment, spec(seed=BAD)), Failed)
        assert time.monotonic() - began_s < 2
        assert isinstance(failed.error, StageDied)
        if action == "crash":
            assert f"stage {stage} crashed with RuntimeError" in str(failed.error)
        assert not deployment.availability()["chat"][AUDIO].ready
        assert deployment.status()["phase"] == "degraded"
        if stage != "think":
            assert deployment.availability()["chat"][TEXT].ready
            assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)
        with pytest.raises(Unavailable, match=stage if stage == "think" else "talk|wave"):
            await deployment.submit(spec())
        await until(lambda: deployment.status()["phase"] == "ready", 15, deployment)
        assert_terminal(await ask(deployment, spec()), Done)
        await until_idle(deployment)
        assert any(row["restarts"] == 1 for row in deployment.status()["stages"])


@pytest.mark.parametrize("busy", [True, False])
async def test_kill_9(tmp_path: Path, busy: bool) -> None:
    async with deployed(sim_plan(stages={"wave": {"interval_s": 0.1}}), tmp_path) as deployment:
        running = [await deployment.submit(spec(audio=True)) for _ in range(4)] if busy else []
        readers = [asyncio.create_task(collect(handle)) for handle in running]
        await asyncio.sleep(0.15 if busy else 0)
        os.kill(pid_of(deployment, "wave"), signal.SIGKILL)
        for events in await asyncio.wait_for(asyncio.gather(*readers), 2):
            failed = assert_terminal(events, Failed)
            assert "SIGKILL" in str(failed.error)
        await until(lambda: deployment.status()["phase"] == "degraded", 2, deployment)
        assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)
        await until(lambda: deployment.status()["phase"] == "ready", 15, deployment)
        assert_terminal(await ask(deployment, spec()), Done)


async def test_the_restart_budget_ends(tmp_path: Path) -> None:
    """A stage that keeps dying is given up; what does not need it is still served."""
    plan = sim_plan(restarts={"max_restarts": 1})
    async with deployed(plan, tmp_path) as deployment:
        for restarts in (0, 1):
            await until(lambda: deployment.status()["phase"] == "ready", 15, deployment)
            assert sum(row["restarts"] for row in deployment.status()["stages"] if row["stage"] == "wave") == restarts
            os.kill(pid_of(deployment, "wave"), signal.SIGKILL)
            await until(lambda: deployment.status()["phase"] == "degraded", 5, deployment)
        replica = deployment.orchestrator.pools.replica("wave", 0)
        await until(lambda: replica.state is Life.FAILED, 5, deployment)
        assert deployment.status()["failure"]["message"] == "process p2: killed by signal 9 (SIGKILL)"
        assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)
        with pytest.raises(Unavailable, match="failed"):
            await deployment.submit(spec())


@pytest.mark.parametrize("stage", ["think", "wave"])
async def test_a_hung_step_is_found_and_ended(tmp_path: Path, stage: str) -> None:
    """F108, F034: the step's age tells, not a heartbeat of the process."""
    stages = broken(stage, "hang", 1)
    stages[stage]["stall_timeout_s"] = 1.0
    async with deployed(sim_plan(stages=stages), tmp_path) as deployment:
        failed = assert_terminal(await ask(deployment, spec(seed=BAD), timeout_s=8), Failed)
        assert "stall_timeout_s" in str(failed.error)
        await until(lambda: deployment.status()["phase"] == "ready", 15, deployment)
        assert_terminal(await ask(deployment, spec()), Done)


async def test_an_abort_of_a_hung_stage_does_not_hang(tmp_path: Path) -> None:
    """F033, F034: the report says who did not confirm; that replica is replaced and the next request works."""
    stages = broken("wave", "hang", 1)
    stages["wave"]["stall_timeout_s"] = 2.0
    async with deployed(sim_plan(stages=stages, limits={"abort_timeout_s": 0.5}), tmp_path) as deployment:
        handle = await deployment.submit(spec(seed=BAD))
        await asyncio.sleep(0.2)
        report = await asyncio.wait_for(handle.abort(), 3)
        assert "wave" in report.missing
        assert_terminal(await collect(handle), AbortedRequest)
        await until(lambda: any(r["restarts"] for r in deployment.status()["stages"]), 10, deployment)
        await until(lambda: deployment.status()["phase"] == "ready", 15, deployment)
        assert_terminal(await ask(deployment, spec()), Done)


async def test_a_stopped_process_is_found_by_its_silence(tmp_path: Path) -> None:
    async with deployed(sim_plan(limits={"beat_timeout_s": 2.0}), tmp_path) as deployment:
        os.kill(pid_of(deployment, "think"), signal.SIGSTOP)
        failed = assert_terminal(await ask(deployment, spec(), timeout_s=10), Failed)
        assert "no sign of life" in str(failed.error)
        await until(lambda: deployment.status()["phase"] == "ready", 15, deployment)


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.03, 0.06])
async def test_an_abort_is_confirmed_and_final(tmp_path: Path, after_s: float) -> None:
    """F030, F033: one terminal, nothing after it, every stage at work has confirmed."""
    async with deployed(sim_plan(stages={"think": {"num_outputs": 50}}), tmp_path) as deployment:
        handle = await deployment.submit(spec(audio=True))
        await asyncio.sleep(after_s)
        report = await handle.abort()
        assert report.acknowledged
        assert not report.missing
        assert await handle.abort() == AbortedRequest(handle.request_id)
        assert_terminal(await collect(handle), AbortedRequest)
        await until_idle(deployment)
        assert_terminal(await ask(deployment, spec()), Done)


async def test_a_slow_acknowledgement_is_waited_for(tmp_path: Path) -> None:
    """F033: a stage that is deep in a step confirms when it comes out of it."""
    async with deployed(sim_plan(stages=broken("wave", "slow", 1, seconds=0.7)), tmp_path) as deployment:
        handle = await deployment.submit(spec(seed=BAD))
        await asyncio.sleep(0.2)
        began_s = time.monotonic()
        report = await handle.abort()
        assert 0.2 < time.monotonic() - began_s < 1.5
        assert "wave" in report.acknowledged


async def test_an_abort_in_a_long_step_does_not_cost_the_stage(tmp_path: Path) -> None:
    """A client that goes away takes no healthy stage from the others: its slot comes back with the step's end."""
    stages = broken("wave", "slow", 1, seconds=2.5)
    stages["wave"] |= {"stall_timeout_s": 30.0, "slots": 1}
    async with deployed(sim_plan(stages=stages, limits={"abort_timeout_s": 0.3}), tmp_path) as deployment:
        pid = pid_of(deployment, "wave")
        handle = await deployment.submit(spec(seed=BAD))
        replica = deployment.orchestrator.pools.replica("wave", 0)
        await until(lambda: replica.stats is not None and replica.stats.step_age_s > 0, 5, deployment)
        report = await handle.abort()
        assert report.missing == ("wave",)
        assert replica.bound
        assert_terminal(await ask(deployment, spec()), Done)
        assert pid_of(deployment, "wave") == pid
        await until_idle(deployment)


async def test_a_process_that_cannot_be_started_again_is_reported(tmp_path: Path) -> None:
    """Whatever goes wrong at a restart ends in the budget and in the status, not in an unwatched process."""
    async with deployed(sim_plan(restarts={"max_restarts": 2}), tmp_path) as deployment:
        shutil.rmtree(tmp_path / "logs")
        (tmp_path / "logs").write_text("not a folder")
        os.kill(pid_of(deployment, "wave"), signal.SIGKILL)
        replica = deployment.orchestrator.pools.replica("wave", 0)
        await until(lambda: replica.state is Life.FAILED, 10, deployment)
        assert "could not be started" in replica.reason
        assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)


async def test_a_dead_replica_has_no_load(tmp_path: Path) -> None:
    async with deployed(sim_plan(stages={"wave": {"interval_s": 0.5}}, restarts={"max_restarts": 0}), tmp_path) as d:
        handle = await d.submit(spec())
        running = d.telemetry.stage_running.labels("wave", 0)._value
        await until(lambda: running.get() == 1, 5, d)
        address = d.orchestrator.pools.replica("wave", 0).address
        os.kill(pid_of(d, "wave"), signal.SIGKILL)
        assert_terminal(await collect(handle), Failed)
        assert running.get() == 0
        row = next(r for r in d.status()["stages"] if r["stage"] == "wave")
        assert (row["running"], row["queued"], row["resident_bytes"]) == (0, 0, 0)
        assert not Path(address.removeprefix("ipc://")).exists()


async def test_random_aborts_under_load(tmp_path: Path) -> None:
    """Half of 200 requests are aborted at random moments: one terminal each, the others whole, nothing is left."""
    dice = random.Random(7)
    async with deployed(sim_plan(stages={s: {"slots": 300} for s in ("ear", "think", "talk", "wave")}), tmp_path) as d:

        async def one(number: int) -> list[Event]:
            await asyncio.sleep(dice.random() * 0.5)
            handle = await d.submit(spec(audio=number % 3 == 0))
            reader = asyncio.create_task(collect(handle))
            if number % 2:
                await asyncio.sleep(dice.random() * 0.15)
                await handle.abort()
            return await reader

        found = await asyncio.gather(*(one(n) for n in range(200)))
        for number, events in enumerate(found):
            terminal = assert_terminal(events, Done | AbortedRequest if number % 2 else Done)
            if isinstance(terminal, Done):
                assert sum(isinstance(e, Delta) for e in events) == 2 * terminal.usage["think"]["outputs"]
        assert sum(isinstance(events[-1], AbortedRequest) for events in found) > 50
        await until_idle(d)


async def test_a_request_has_a_deadline(tmp_path: Path) -> None:
    async with deployed(sim_plan(stages={"talk": {"interval_s": 0.5}}), tmp_path) as deployment:
        failed = assert_terminal(await ask(deployment, spec(timeout_s=0.4)), Failed)
        assert isinstance(failed.error, DeadlineExceeded)
        assert "talk" in str(failed.error)
        await until_idle(deployment)


async def test_garbage_on_the_control_channel_is_harmless(tmp_path: Path) -> None:
    """F041: malformed messages, unknown stages, replicas and requests."""
    async with deployed(sim_plan(), tmp_path) as deployment:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(deployment._hub.address)
        strange: list[messages.Message] = [
            messages.Ready("nowhere", 0, 1, "ipc://x", {}),
            messages.Progress("think", 99, 1, "?"),
            messages.Ended("nobody", 0, "think", "stop", {}),
            messages.Ended("nobody", -1, "x", "stop", {}),
            messages.Aborted("nobody", 0, "think", 7),
            messages.Beat("nobody", 1, 0, []),
            messages.Drain(),
        ]
        for data in (b"", b"\x00" * 64, msgspec.msgpack.encode({"type": "nonsense"}), *map(messages.encode, strange)):
            socket.send(data)
        assert_terminal(await ask(deployment, spec()), Done)
        for address in {r.address for pool in deployment.orchestrator.pools for r in pool.replicas}:
            peer = context.socket(zmq.PUSH)
            peer.connect(address)
            peer.send(b"garbage")
            peer.close(100)
        assert_terminal(await ask(deployment, spec()), Done)
        socket.close(0)
        context.term()


async def test_drain_lets_running_requests_end(tmp_path: Path) -> None:
    async with deployed(sim_plan(), tmp_path) as deployment:
        handle = await deployment.submit(spec())
        draining = asyncio.create_task(deployment.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            await deployment.submit(spec())
        assert_terminal(await collect(handle), Done)
        await asyncio.wait_for(draining, 2)


async def test_drain_refuses_those_who_wait(tmp_path: Path) -> None:
    async with deployed(sim_plan(stages={"wave": {"slots": 1}}), tmp_path) as deployment:
        running = await deployment.submit(spec())
        waiting = asyncio.create_task(deployment.submit(spec()))
        await asyncio.sleep(0)
        draining = asyncio.create_task(deployment.drain())
        with pytest.raises(Unavailable, match="shutting down"):
            await waiting
        assert_terminal(await collect(running), Done)
        await asyncio.wait_for(draining, 2)


async def test_drain_has_a_deadline(tmp_path: Path) -> None:
    plan = sim_plan(stages={"wave": {"interval_s": 2.0}}, limits={"drain_timeout_s": 0.3})
    async with deployed(plan, tmp_path) as deployment:
        handle = await deployment.submit(spec())
        await asyncio.wait_for(deployment.drain(), 2)
        assert isinstance(assert_terminal(await collect(handle), Failed).error, Unavailable)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
async def test_a_tiny_shared_memory_fails_what_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /dev/shm is an error of the request that needs it, with the numbers; the next ones go on."""
    folder = tmp_path / "shm"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True, timeout=10)
    try:
        monkeypatch.setenv("OMNICTL_SHM_DIR", str(folder))
        async with deployed(sim_plan(), tmp_path) as deployment:
            large = spec(modalities=[TEXT], audio=True)
            large.inputs[AUDIO][0].tensors["data"] = np.zeros(4 << 20, np.uint8)
            failed = assert_terminal(await ask(deployment, large), Failed)
            assert isinstance(failed.error, ConnectorError)
            assert "needs 4" in str(failed.error) or "4194" in str(failed.error), failed.error
            assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)
            await until_idle(deployment)
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)
