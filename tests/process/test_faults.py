"""What breaks, breaks alone: stages that raise, crash, hang or are killed; aborts at every moment; deadlines."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import AsyncIterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from runtime import messages
from runtime.deployment import Deployment
from runtime.errors import ConnectorError, DeadlineExceeded, InvalidRequest, StageDied, StageError, Unavailable
from runtime.plan import Modality
from runtime.pool import Life
from runtime.requests import TERMINALS, AbortedRequest, Delta, Done, Event, Failed
from tests.deploy import AUDIO, PATIENCE_S, TEXT, ask, collect, deployed, hold_restart, spec, until
from tests.gate import Gate
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
    await until(lambda: deployment.status()["open_requests"] == 0, deployment=deployment)
    assert all(not r.bound for pool in pools for r in pool.replicas)


async def until_ready(deployment: Deployment, restarts: int) -> None:
    """All is well again, after so many restarts."""

    def ready() -> bool:
        status = deployment.status()
        return status["phase"] == "ready" and num_restarts(deployment) == restarts

    await until(ready, deployment=deployment)


def num_restarts(deployment: Deployment) -> int:
    """Of all processes; a process is one row a stage of it."""
    return sum({row["process"]: int(row["restarts"]) for row in deployment.status()["stages"]}.values())


async def until_in_a_step(deployment: Deployment, stage: str) -> None:
    """By its own beats, the stage is in a step that takes its time."""
    replica = deployment.orchestrator.pools.replica(stage, 0)
    await until(lambda: replica.stats is not None and replica.stats.step_age_s > 0, deployment=deployment)


async def heard(events: AsyncIterable[Event], modality: Modality) -> None:
    """Read until the first output of the modality."""
    async for event in events:
        if isinstance(event, Delta) and event.modality is modality:
            return
    raise AssertionError("it ended")


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


DEATHS = {"crash": "crashed with RuntimeError", "exit": "exited with code 9", "segfault": "SIGSEGV"}
"""Way to die -> what the error says of it. No watch with a time limit is behind any of them."""


async def test_a_stage_that_dies_comes_back(tmp_path: Path) -> None:
    """F026, F029, F039: its requests fail, text still works, health says so, the next request works."""
    cases = list(enumerate(itertools.product(("think", "talk", "wave"), DEATHS)))
    stages: dict[str, dict[str, Any]] = {stage: {"faults": []} for stage in ("think", "talk", "wave")}
    for seed, (stage, action) in cases:
        stages[stage]["faults"].append({"action": action, "at_output": 2, "when": {"seed": seed}})
    plan = sim_plan(stages=stages, restarts={"window_s": 0.001})
    async with deployed(plan, tmp_path) as deployment:
        for seed, (stage, action) in cases:
            release = hold_restart(tmp_path)
            failed = assert_terminal(await ask(deployment, spec(seed=seed)), Failed)
            assert isinstance(failed.error, StageDied)
            assert f"stage {stage}" in str(failed.error) or stage != "think"
            assert DEATHS[action] in str(failed.error)
            assert not deployment.availability()["chat"][AUDIO].ready
            assert deployment.status()["phase"] == "degraded"
            assert deployment.availability()["chat"][TEXT].ready == (stage != "think")
            if stage != "think":
                assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)
            with pytest.raises(Unavailable, match=stage if stage == "think" else "talk|wave"):
                await deployment.submit(spec())
            await asyncio.to_thread(release)
            await until_ready(deployment, restarts=seed + 1)
            assert_terminal(await ask(deployment, spec()), Done)
            await until_idle(deployment)


async def test_kill_9(tmp_path: Path) -> None:
    """While it works on four requests, and while it has nothing to do."""
    gate = Gate(tmp_path)
    async with deployed(sim_plan(stages={"wave": {"faults": [gate.fault(1, seed=BAD)]}}), tmp_path) as deployment:
        for restarts, num_requests in enumerate((4, 0), start=1):
            running = [await deployment.submit(spec(audio=True, seed=BAD)) for _ in range(num_requests)]
            for handle in running[:1]:
                await heard(handle, AUDIO)
            release = hold_restart(tmp_path)
            os.kill(pid_of(deployment, "wave"), signal.SIGKILL)
            for handle in running:
                assert "SIGKILL" in str(assert_terminal(await collect(handle), Failed).error)
            await until(lambda: deployment.status()["phase"] == "degraded", deployment=deployment)
            assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)
            await asyncio.to_thread(release)
            await until_ready(deployment, restarts)
            assert_terminal(await ask(deployment, spec()), Done)


async def test_the_restart_budget_ends(tmp_path: Path) -> None:
    """A stage that keeps dying is given up; what does not need it is still served."""
    async with deployed(sim_plan(restarts={"max_restarts": 1}), tmp_path) as deployment:
        for restarts in (0, 1):
            await until_ready(deployment, restarts)
            os.kill(pid_of(deployment, "wave"), signal.SIGKILL)
        replica = deployment.orchestrator.pools.replica("wave", 0)
        await until(lambda: replica.state is Life.FAILED, deployment=deployment)
        assert deployment.status()["failure"]["message"] == "process p2: killed by signal 9 (SIGKILL)"
        assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)
        with pytest.raises(Unavailable, match="failed"):
            await deployment.submit(spec())


async def test_a_hung_step_is_found_and_ended(tmp_path: Path) -> None:
    """F108, F034: the step's age tells, not a heartbeat of the process."""
    stages = broken("think", "hang", 1) | broken("wave", "hang", 1)
    stages["wave"]["faults"][0]["when"] = {"seed": BAD + 1}
    for settings in stages.values():
        settings["stall_timeout_s"] = 3.0
    async with deployed(sim_plan(stages=stages), tmp_path) as deployment:
        for restarts, seed in enumerate((BAD, BAD + 1), start=1):
            failed = assert_terminal(await ask(deployment, spec(seed=seed)), Failed)
            assert "stall_timeout_s" in str(failed.error)
            await until_ready(deployment, restarts)
            assert_terminal(await ask(deployment, spec()), Done)


async def test_an_abort_of_a_stopped_stage_does_not_hang(tmp_path: Path) -> None:
    """F033, F034: the report says who did not confirm; that replica is replaced and the next request works."""
    plan = sim_plan(stages=broken("wave", "stuck", 1), limits={"abort_timeout_s": 0.5})
    async with deployed(plan, tmp_path) as deployment:
        handle = await deployment.submit(spec(seed=BAD))
        await heard(handle, AUDIO)
        os.kill(pid_of(deployment, "wave"), signal.SIGSTOP)
        report = await handle.abort()
        assert "wave" in report.missing
        await until(lambda: num_restarts(deployment) > 0 and deployment.status()["phase"] == "ready")
        assert_terminal(await ask(deployment, spec()), Done)


async def test_a_stopped_process_is_found_by_its_silence(tmp_path: Path) -> None:
    async with deployed(sim_plan(limits={"beat_timeout_s": 5.0}), tmp_path) as deployment:
        os.kill(pid_of(deployment, "think"), signal.SIGSTOP)
        failed = assert_terminal(await ask(deployment, spec()), Failed)
        assert "no sign of life" in str(failed.error)
        await until(lambda: deployment.status()["phase"] == "ready", deployment=deployment)


async def test_an_abort_is_confirmed_and_final(tmp_path: Path) -> None:
    """F030, F033: one terminal, nothing after it, every stage at work has confirmed."""
    async with deployed(sim_plan(stages=broken("think", "stuck", 5)), tmp_path) as deployment:
        for num_events in (0, 1, 4, 10):
            handle = await deployment.submit(spec(audio=True, seed=BAD))
            events = aiter(handle)
            for _ in range(num_events):
                await anext(events)
            report = await handle.abort()
            assert report.acknowledged
            assert not report.missing
            assert await handle.abort() == AbortedRequest(handle.request_id)
            assert_terminal(await collect(handle), AbortedRequest)
            await until_idle(deployment)
            assert_terminal(await ask(deployment, spec()), Done)


async def test_a_slow_acknowledgement_is_waited_for(tmp_path: Path) -> None:
    """F033: a stage that is deep in a step confirms when it comes out of it."""
    gate = Gate(tmp_path)
    async with deployed(sim_plan(stages={"wave": {"faults": [gate.fault(1, seed=BAD)]}}), tmp_path) as deployment:
        handle = await deployment.submit(spec(seed=BAD))
        await until_in_a_step(deployment, "wave")
        aborting = asyncio.create_task(handle.abort())
        done, _ = await asyncio.wait([aborting], timeout=0.3)
        assert not done, "nobody confirms while the stage stands at the gate"
        gate.open()
        assert "wave" in (await aborting).acknowledged


async def test_an_abort_in_a_long_step_does_not_cost_the_stage(tmp_path: Path) -> None:
    """A client that goes away takes no healthy stage from the others: its slot comes back with the step's end."""
    gate = Gate(tmp_path)
    stages = {"wave": {"faults": [gate.fault(1, seed=BAD)], "slots": 1}}
    async with deployed(sim_plan(stages=stages, limits={"abort_timeout_s": 0.3}), tmp_path) as deployment:
        pid = pid_of(deployment, "wave")
        handle = await deployment.submit(spec(seed=BAD))
        await until_in_a_step(deployment, "wave")
        report = await handle.abort()
        assert "wave" in report.missing
        assert deployment.orchestrator.pools.replica("wave", 0).bound
        gate.open()
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
        await until(lambda: replica.state is Life.FAILED, deployment=deployment)
        assert "could not be started" in replica.reason
        assert_terminal(await ask(deployment, spec(modalities=[TEXT])), Done)


async def test_a_dead_replica_has_no_load(tmp_path: Path) -> None:
    plan = sim_plan(stages=broken("wave", "stuck", 1), restarts={"max_restarts": 0})
    async with deployed(plan, tmp_path) as d:
        handle = await d.submit(spec(seed=BAD))
        running = d.telemetry.stage_running.labels("wave", 0)._value
        await until(lambda: running.get() == 1, deployment=d)
        address = d.orchestrator.pools.replica("wave", 0).address
        os.kill(pid_of(d, "wave"), signal.SIGKILL)
        assert_terminal(await collect(handle), Failed)
        assert running.get() == 0
        row = next(r for r in d.status()["stages"] if r["stage"] == "wave")
        assert (row["running"], row["queued"], row["resident_bytes"]) == (0, 0, 0)
        assert not Path(address.removeprefix("ipc://")).exists()


async def test_random_aborts_under_load(tmp_path: Path) -> None:
    """Half of 200 requests are aborted after random numbers of events: one terminal each, the others whole, nothing
    is left."""
    dice = random.Random(7)
    async with deployed(sim_plan(stages={s: {"slots": 300} for s in ("ear", "think", "talk", "wave")}), tmp_path) as d:

        async def one(number: int) -> list[Event]:
            await asyncio.sleep(dice.random() * 0.5)
            handle = await d.submit(spec(audio=number % 3 == 0))
            num_unread = dice.randrange(14) if number % 2 else 100
            events = []
            async for event in handle:
                if num_unread == 0:
                    await handle.abort()
                num_unread -= 1
                events.append(event)
            return events

        found = await asyncio.gather(*(one(n) for n in range(200)))
        for number, events in enumerate(found):
            terminal = assert_terminal(events, Done | AbortedRequest if number % 2 else Done)
            if isinstance(terminal, Done):
                assert sum(isinstance(e, Delta) for e in events) == 2 * terminal.usage["think"]["outputs"]
        assert any(isinstance(events[-1], AbortedRequest) for events in found)
        await until_idle(d)


async def test_a_request_has_a_deadline(tmp_path: Path) -> None:
    async with deployed(sim_plan(stages=broken("talk", "stuck", 1)), tmp_path) as deployment:
        failed = assert_terminal(await ask(deployment, spec(timeout_s=1.0, seed=BAD)), Failed)
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
        await asyncio.wait_for(draining, PATIENCE_S)


async def test_drain_refuses_those_who_wait(tmp_path: Path) -> None:
    async with deployed(sim_plan(stages={"wave": {"slots": 1}}), tmp_path) as deployment:
        running = await deployment.submit(spec())
        waiting = asyncio.create_task(deployment.submit(spec()))
        await asyncio.sleep(0)
        draining = asyncio.create_task(deployment.drain())
        with pytest.raises(Unavailable, match="shutting down"):
            await waiting
        assert_terminal(await collect(running), Done)
        await asyncio.wait_for(draining, PATIENCE_S)


async def test_drain_has_a_deadline(tmp_path: Path) -> None:
    plan = sim_plan(stages=broken("wave", "stuck", 0), limits={"drain_timeout_s": 0.3})
    async with deployed(plan, tmp_path) as deployment:
        handle = await deployment.submit(spec(seed=BAD))
        await asyncio.wait_for(deployment.drain(), PATIENCE_S)
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
