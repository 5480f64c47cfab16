"""The admission queue on its own: order, deadline, and clients that leave in the very moment of admission."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from runtime.admission import Admission
from runtime.errors import Overloaded, Unavailable
from runtime.graph import SubGraph, select
from runtime.plan import Limits, Modality
from runtime.pool import Life, Pools
from runtime.telemetry import Telemetry
from tests.plans import sim_plan

TEXT, AUDIO = Modality.TEXT, Modality.AUDIO


def admission(**limits: Any) -> tuple[Admission, Pools, SubGraph, SubGraph]:
    """One slot in `wave`; graphs of a spoken and of a written answer."""
    plan = sim_plan(stages={"wave": {"slots": 1}, "think": {"slots": 2}}, limits=limits)
    pools = Pools(plan)
    for pool in pools:
        for replica in pool.replicas:
            replica.state = Life.READY
    spoken, written = (select(plan, "chat", [m], [TEXT]) for m in (AUDIO, TEXT))
    return Admission(pools, Limits(**limits), Telemetry()), pools, spoken, written


def bound(pools: Pools) -> set[str]:
    return {request for pool in pools for replica in pool.replicas for request in replica.bound}


async def test_first_come_first_served_where_it_matters() -> None:
    queue, pools, spoken, written = admission()
    first = await queue.acquire(spoken, "a")
    waiting = [asyncio.create_task(queue.acquire(spoken, name)) for name in ("b", "c")]
    await asyncio.sleep(0)
    assert set(await queue.acquire(written, "d")) == {"think"}
    queue.give_back(first, "a")
    assert set(await waiting[0]) == {"think", "talk", "wave"}
    assert not waiting[1].done()
    waiting[1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert bound(pools) == {"b", "d"}
    assert queue.num_queued == 0


async def test_leaving_in_the_moment_of_admission_gives_the_slots_back() -> None:
    queue, pools, spoken, _ = admission()
    first = await queue.acquire(spoken, "a")
    leaving = asyncio.create_task(queue.acquire(spoken, "b"))
    await asyncio.sleep(0)
    queue.give_back(first, "a")
    assert bound(pools) == {"b"}, "admitted, and not resumed yet"
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert bound(pools) == set()


async def test_the_wait_ends() -> None:
    queue, pools, spoken, _ = admission(queue_timeout_s=0.05, max_queued=1)
    await queue.acquire(spoken, "a")
    late = asyncio.create_task(queue.acquire(spoken, "b"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="max_queued"):
        await queue.acquire(spoken, "c")
    with pytest.raises(Overloaded, match="queue_timeout_s"):
        await late
    assert bound(pools) == {"a"}


async def test_a_lost_stage_and_a_shutdown_end_the_wait_at_once() -> None:
    queue, pools, spoken, _ = admission()
    await queue.acquire(spoken, "a")
    waiting = asyncio.create_task(queue.acquire(spoken, "b"))
    await asyncio.sleep(0)
    pools.replica("talk", 0).state = Life.DOWN
    queue.refuse_unready()
    with pytest.raises(Unavailable, match="stage talk is down"):
        await waiting
    pools.replica("talk", 0).state = Life.READY
    waiting = asyncio.create_task(queue.acquire(spoken, "c"))
    await asyncio.sleep(0)
    queue.refuse_all(Unavailable("closing"))
    with pytest.raises(Unavailable, match="closing"):
        await waiting
