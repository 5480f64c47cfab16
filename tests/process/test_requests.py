"""The life of requests through real worker processes: order, sub-graphs, modes, equality, streaming input."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from runtime.deployment import Deployment
from runtime.errors import InvalidRequest, NotFound, Overloaded
from runtime.payload import Payload
from runtime.plan import EdgeMode
from runtime.requests import TERMINALS, Delta, Done, Event, Failed, ModalityEnd
from tests.deploy import AUDIO, TEXT, ask, collect, deployed, spec, until
from tests.gate import Gate
from tests.plans import sim_plan


def outputs(events: list[Event]) -> list[tuple[str, object]]:
    """What the client got, apart from times: text, and audio sample by sample."""
    deltas = [e for e in events if isinstance(e, Delta)]
    texts = [("text", d.payload.meta["text"]) for d in deltas if d.modality is TEXT]
    audio = [("audio", d.payload.tensors["samples"].tobytes()) for d in deltas if d.modality is AUDIO]
    return texts + audio


def assert_one_terminal(events: list[Event]) -> None:
    assert [isinstance(e, TERMINALS) for e in events].count(True) == 1
    assert isinstance(events[-1], TERMINALS)


async def test_audio_comes_while_the_text_is_made(tmp_path: Path) -> None:
    """The thinker stands still in the middle of its text until the client has heard something."""
    gate = Gate(tmp_path)
    held = {"faults": [gate.fault(3, seed=1)]}
    async with deployed(sim_plan(stages={"think": held}), tmp_path) as deployment:
        events: list[Event] = []
        async for event in await deployment.submit(spec(audio=True, seed=1)):
            heard = any(isinstance(e, Delta) and e.modality is AUDIO for e in events)
            if not heard and isinstance(event, Delta) and event.modality is AUDIO:
                await asyncio.to_thread(gate.open)
            events.append(event)
    assert_one_terminal(events)
    kinds = [e.modality for e in events if isinstance(e, Delta)]
    assert kinds[: kinds.index(AUDIO)].count(TEXT) <= 3, "the others were made after the gate was opened"
    assert kinds.count(TEXT) == 7, "one word more for what the ear gave it"
    assert [e.sequence for e in events if isinstance(e, Delta)] == list(range(len(kinds)))
    assert {e.modality for e in events if isinstance(e, ModalityEnd)} == {TEXT, AUDIO}
    assert isinstance(events[-1], Done)
    assert set(events[-1].usage) == {"ear", "think", "talk", "wave"}


async def test_whole_edges_wait_for_the_producer(tmp_path: Path) -> None:
    async with deployed(sim_plan(mode=EdgeMode.WHOLE), tmp_path) as deployment:
        events = await ask(deployment, spec())
    kinds = [e.modality for e in events if isinstance(e, Delta)]
    assert kinds == sorted(kinds, key=[TEXT, AUDIO].index), "no audio before the text has ended"
    assert AUDIO in kinds


async def test_text_only_leaves_the_speech_stages_alone(tmp_path: Path) -> None:
    warm = {"ear": 2, "think": 3, "talk": 2, "wave": 2}
    async with deployed(sim_plan(), tmp_path) as deployment:
        await until(lambda: rows(deployment) == warm, deployment=deployment)
        for _ in range(3):
            events = await ask(deployment, spec(modalities=[TEXT]))
            assert isinstance(events[-1], Done)
            assert set(events[-1].usage) == {"think"}
        asked_s = time.monotonic()
        await until_beats(deployment, asked_s)
        assert rows(deployment) == warm | {"think": 6}


def rows(deployment: Deployment) -> dict[str, int]:
    return {row["stage"]: row["requests"] for row in deployment.status()["stages"]}


async def until_beats(deployment: Deployment, since_s: float) -> None:
    """What the stages counted up to a moment is known here."""
    await until(lambda: all(m.beat_s > since_s for m in deployment.supervisor._managed.values()), deployment=deployment)


@pytest.mark.parametrize("mode", list(EdgeMode))
@pytest.mark.parametrize("num_outputs", [0, 1, 40])
async def test_modes_and_lengths_at_concurrency(tmp_path: Path, mode: EdgeMode, num_outputs: int) -> None:
    """F037: end markers race with data; both modes pass the same matrix."""
    fast = {"first_output_s": 0.0, "interval_s": 0.0}
    stages = {"ear": fast, "think": fast | {"num_outputs": num_outputs}, "talk": fast, "wave": fast}
    async with deployed(sim_plan(mode=mode, stages=stages), tmp_path) as deployment:
        for concurrency in (1, 2, 8):
            for _ in range(4):
                found = await asyncio.gather(*(ask(deployment, spec()) for _ in range(concurrency)))
                for events in found:
                    assert isinstance(events[-1], Done)
                    assert len(outputs(events)) == 2 * num_outputs


async def test_a_result_does_not_depend_on_company(tmp_path: Path) -> None:
    async with deployed(sim_plan(), tmp_path) as deployment:
        kinds = [
            spec(),
            spec(modalities=[TEXT]),
            spec(audio=True),
            spec("speech", [AUDIO]),
            spec("transcription", [TEXT]),
        ]
        alone = [outputs(await ask(deployment, s)) for s in kinds]
        again = [spec(s.task, s.modalities, audio=AUDIO in s.inputs) for s in kinds * 2]
        together = await asyncio.gather(*(ask(deployment, s) for s in again))
    assert [outputs(events) for events in together] == alone * 2
    assert all(alone)


async def test_replicas_share_the_work(tmp_path: Path) -> None:
    plan = sim_plan(processes=(("ear",), ("think",), ("talk", "wave"), ("talk.1", "wave.1")))
    async with deployed(plan, tmp_path) as deployment:
        found = await asyncio.gather(*(ask(deployment, spec()) for _ in range(12)))
        assert all(isinstance(events[-1], Done) for events in found)
        await until(lambda: all(r["requests"] > 3 for r in deployment.status()["stages"] if r["stage"] == "wave"))


async def test_back_pressure_bounds_bytes_in_flight(tmp_path: Path) -> None:
    """While the consumer stands still, its producer sends what the edge holds and waits: nothing piles up."""
    gate = Gate(tmp_path)
    stages = {
        "think": {"num_outputs": 30},
        "talk": {"output_bytes": 100_000},
        "wave": {"faults": [gate.fault(0, seed=1)]},
    }
    plan = sim_plan(stages=stages, processes=(("ear",), ("think",), ("talk",), ("wave",)), capacity_bytes=350_000)
    async with deployed(plan, tmp_path) as deployment:
        talk = deployment.orchestrator.pools.replica("talk", 0)

        def num_sent() -> int:
            return talk.stats.edge_bytes.get("talk->wave", 0) // 100_000 if talk.stats else 0

        await until_beats(deployment, time.monotonic())
        warm = num_sent()
        handle = await deployment.submit(spec("chat", [AUDIO], seed=1))
        await until(lambda: num_sent() == warm + 3, deployment=deployment)
        await until_beats(deployment, time.monotonic())
        assert num_sent() == warm + 3
        gate.open()
        events = await collect(handle)
        assert isinstance(events[-1], Done)
        assert len(outputs(events)) == 30
        await until(lambda: num_sent() == warm + 30, deployment=deployment)


async def test_streaming_input_is_fenced(tmp_path: Path) -> None:
    """Later pieces carry growing numbers; old numbers, epochs and unknown requests are counted and dropped."""
    async with deployed(sim_plan(stages={"talk": {"num_outputs": 1}}), tmp_path) as deployment:
        orchestrator = deployment.orchestrator
        request = spec("speech", [AUDIO], open_inputs=frozenset({TEXT}))
        handle = await deployment.submit(request)
        dropped = orchestrator.telemetry.dropped

        def update(sequence: int, text: str, *, epoch: int = 0, last: bool = False, rid: str = "") -> bool:
            piece = Payload("text", "", meta={"text": text} if text else {}, last=last)
            return orchestrator.update(rid or handle.request_id, epoch, TEXT, sequence, piece)

        assert update(1, "a")
        assert not update(1, "again")
        assert not update(0, "old")
        assert not update(5, "other epoch", epoch=1)
        assert not update(5, "unknown", rid="nobody")
        assert update(7, "b")
        assert update(8, "", last=True)
        assert not update(9, "after the end")
        events = await collect(handle)
        assert isinstance(events[-1], Done)
        assert len(outputs(events)) == 3
        assert not update(10, "over")
        assert dropped._value.get() == 6


async def test_what_the_plan_does_not_serve_is_refused(tmp_path: Path) -> None:
    async with deployed(sim_plan(), tmp_path) as deployment:
        with pytest.raises(NotFound, match="no task 'paint'"):
            await deployment.submit(spec("paint"))
        with pytest.raises(InvalidRequest, match="'text' is not served; expected some of audio"):
            await deployment.submit(spec("speech", [TEXT]))
        with pytest.raises(InvalidRequest, match="no modalities given"):
            await deployment.submit(spec("chat", []))
        assert deployment.status()["open_requests"] == 0


async def test_full_pools_queue_within_bounds(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    stages = {"wave": {"slots": 1, "faults": [gate.fault(0, seed=1)]}, "think": {"slots": 4}}
    async with deployed(sim_plan(stages=stages, limits={"max_queued": 2}), tmp_path) as deployment:
        first = await deployment.submit(spec(seed=1))
        waiting = [asyncio.create_task(deployment.submit(spec())) for _ in range(2)]
        await asyncio.sleep(0)
        assert deployment.status()["queued_requests"] == 2
        with pytest.raises(Overloaded, match="max_queued") as refused:
            await deployment.submit(spec())
        assert refused.value.retry_after_s
        # a text answer needs no vocoder and does not wait behind those who do
        assert isinstance((await ask(deployment, spec(modalities=[TEXT])))[-1], Done)
        waiting[0].cancel()
        gate.open()
        assert isinstance((await collect(first))[-1], Done)
        await (await waiting[1]).abort()
        assert isinstance((await ask(deployment, spec()))[-1], Done)
        assert deployment.status()["queued_requests"] == 0
        assert all(not r.bound for pool in deployment.orchestrator.pools for r in pool.replicas)


async def test_input_waits_for_its_stage(tmp_path: Path) -> None:
    """A stage behind a whole edge gets the client's input with its Submit, however long the producer takes."""
    gate = Gate(tmp_path)
    async with deployed(sim_plan(stages={"ear": {"faults": [gate.fault(0, seed=1)]}}), tmp_path) as deployment:
        handle = await deployment.submit(spec(audio=True, seed=1))
        request = deployment.orchestrator._requests[handle.request_id]
        await until(lambda: "ear" in request.started, deployment=deployment)
        assert list(request.held_inputs) == ["think"]
        gate.open()
        assert isinstance((await collect(handle))[-1], Done)
        assert request.held_inputs == {}


async def test_waiting_for_a_slot_has_a_deadline(tmp_path: Path) -> None:
    stuck = {"action": "stuck", "when": {"seed": 1}}
    plan = sim_plan(stages={"wave": {"slots": 1, "faults": [stuck]}}, limits={"queue_timeout_s": 0.2})
    async with deployed(plan, tmp_path) as deployment:
        first = await deployment.submit(spec(seed=1))
        with pytest.raises(Overloaded, match="queue_timeout_s"):
            await deployment.submit(spec())
        await first.abort()
        assert isinstance((await ask(deployment, spec(modalities=[TEXT])))[-1], Done)


async def test_a_slow_reader_is_cut_off_alone(tmp_path: Path) -> None:
    fast = {"interval_s": 0.0, "first_output_s": 0.0}
    stages = {"think": fast | {"num_outputs": 40}, "talk": fast, "wave": {"output_bytes": 100_000}}
    async with deployed(sim_plan(stages=stages, limits={"max_unread_bytes": 3_000_000}), tmp_path) as deployment:
        unread = await deployment.submit(spec())
        await until(lambda: deployment.status()["open_requests"] == 0, deployment=deployment)
        events = await collect(unread)
        assert_one_terminal(events)
        assert isinstance(events[-1], Failed)
        assert "max_unread_bytes" in str(events[-1].error)
        assert isinstance((await ask(deployment, spec(modalities=[TEXT])))[-1], Done)


async def test_large_input_and_output_round_trip(tmp_path: Path) -> None:
    async with deployed(sim_plan(stages={"wave": {"output_bytes": 4_000_000}}), tmp_path) as deployment:
        request = spec(audio=True)
        request.inputs[AUDIO][0].tensors["data"] = np.zeros(20_000_000, np.uint8)
        events = await ask(deployment, request)
        assert isinstance(events[-1], Done)
        audio = [e.payload.tensors["samples"] for e in events if isinstance(e, Delta) and e.modality is AUDIO]
        assert all(samples.shape == (1_000_000,) for samples in audio)
