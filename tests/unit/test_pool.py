"""Binding and life of replicas: pure, no processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.graph import select, topological
from runtime.plan import Modality
from runtime.pool import NEXT, Life, Pools, Replica, Trigger
from tests.plans import sim_plan

SPEECH = [Modality.AUDIO]
TWICE = (("ear",), ("think",), ("talk", "wave"), ("talk.1", "wave.1"))


def ready(pools: Pools) -> Pools:
    for pool in pools:
        for replica in pool.replicas:
            replica.state = Life.READY
    return pools


def test_consumers_behind_inproc_edges_share_the_process() -> None:
    plan = sim_plan(processes=TWICE)
    pools, graph = ready(Pools(plan)), select(plan, "speech", SPEECH, [Modality.TEXT])
    for number in range(6):
        bindings, full = pools.bind(graph, f"r{number}")
        assert not full
        assert bindings["talk"].process == bindings["wave"].process
    assert {len(r.bound) for r in pools["wave"].replicas} == {3}


def test_a_process_with_room_for_both_is_found() -> None:
    """The least loaded producer is of no use when its partner is full."""
    plan = sim_plan(processes=TWICE, stages={"wave": {"slots": 1}, "talk": {"slots": 4}})
    pools, graph = ready(Pools(plan)), select(plan, "speech", SPEECH, [Modality.TEXT])
    pools.replica("wave", 0).bound.add("other")
    pools.replica("talk", 1).bound.update({"a", "b"})
    bindings, full = pools.bind(graph, "r")
    assert not full
    assert bindings["wave"].index == 1
    assert pools.bind(graph, "s") == ({}, ["wave"])


def test_all_or_none() -> None:
    plan = sim_plan(stages={"wave": {"slots": 1}})
    pools, graph = ready(Pools(plan)), select(plan, "chat", [Modality.TEXT, Modality.AUDIO], [Modality.TEXT])
    assert pools.bind(graph, "a")[1] == []
    assert pools.bind(graph, "b") == ({}, ["wave"])
    assert pools.replica("think", 0).bound == {"a"}


@given(st.lists(st.sampled_from(list(Trigger)), max_size=12))
def test_the_life_of_a_replica_is_the_table(triggers: list[Trigger]) -> None:
    replica = Replica("s", 0, "p")
    for trigger in triggers:
        before = replica.state
        if (before, trigger) in NEXT:
            replica.move(trigger, "x")
            assert replica.state is NEXT[before, trigger]
        else:
            with pytest.raises(KeyError):
                replica.move(trigger, "x")
            assert replica.state is before
    assert not [t for s, t in NEXT if s is Life.STOPPED], "stopped is the end"


def test_producers_come_first() -> None:
    assert topological(sim_plan()) == ["ear", "think", "talk", "wave"]
