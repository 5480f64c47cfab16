"""Connectors within one process: what both promise, how shared memory is parted, and what each setting does."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.connectors import KINDS, ShmSettings, open_connectors
from runtime.connectors.base import INLINE_BYTES, Connector
from runtime.connectors.credits import EdgeCredits
from runtime.connectors.extents import ALIGNMENT, Extents
from runtime.connectors.shm import ShmConnector
from runtime.errors import ConfigError, ConnectorError
from runtime.messages import Ref
from runtime.payload import Payload, pack

KIB, MIB = 1 << 10, 1 << 20


def payload(size_bytes: int, *, request_id: str = "r", fill: int = 1) -> Payload:
    data = np.full(size_bytes, fill, np.uint8)
    return Payload("latents", request_id, 2, "a->b", 5, True, {"fill": fill}, {"data": data})


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def room(size_bytes: int) -> int:
    """Bytes of a segment that just holds one such payload."""
    return 2 * ALIGNMENT + pack(payload(size_bytes)).size_bytes


@pytest.fixture(params=KINDS)
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connector]:
    kind: str = request.param
    opened = open_connectors([kind], shm=ShmSettings(tmp_path))[kind]
    yield opened
    opened.close()
    assert files(tmp_path) == []


def open_shm(folder: Path, *, capacity: int = 64 * MIB, segment: int = MIB, idle_s: float = 60.0) -> ShmConnector:
    return ShmConnector(ShmSettings(folder, capacity, segment, idle_s))


# ---- what every connector promises ---------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 1, INLINE_BYTES, MIB, 9 * MIB])
def test_a_payload_arrives_as_it_was(connector: Connector, size_bytes: int) -> None:
    sent = payload(size_bytes)
    ref = connector.put(sent)
    got = connector.get(ref)
    assert (got.kind, got.request_id, got.epoch, got.edge, got.sequence, got.last, got.meta) == (
        *("latents", "r", 2, "a->b", 5, True),
        {"fill": 1},
    )
    np.testing.assert_array_equal(got.tensors["data"], sent.tensors["data"])
    assert ref.size_bytes == pack(sent).size_bytes


def test_small_payloads_ride_in_the_ref_and_large_ones_do_not(connector: Connector) -> None:
    overhead = pack(payload(64)).size_bytes - 64
    small, large = connector.put(payload(INLINE_BYTES - overhead)), connector.put(payload(INLINE_BYTES - overhead + 1))
    assert small.inline is not None
    assert len(small.inline) == INLINE_BYTES == small.size_bytes
    assert large.inline is None
    assert connector.health().num_payloads == 1
    assert not connector.reclaim(small)


def test_what_is_got_cannot_be_written(connector: Connector) -> None:
    for size_bytes in (100, MIB):
        got = connector.get(connector.put(payload(size_bytes)))
        with pytest.raises(ValueError, match="read-only"):
            got.tensors["data"][0] = 7


def test_two_consumers_do_not_see_each_others_changes(connector: Connector) -> None:
    ref = connector.put(payload(MIB))
    first, second = connector.get(ref), connector.get(ref)
    first.meta["fill"] = 9
    del first.tensors["data"]
    assert second.meta == {"fill": 1}
    assert connector.get(ref).tensors.keys() == {"data"}


def test_reclaim_frees_once(connector: Connector) -> None:
    ref = connector.put(payload(MIB))
    connector.release(ref)
    assert connector.health().used_bytes >= MIB
    assert connector.reclaim(ref)
    assert not connector.reclaim(ref)
    assert (connector.health().used_bytes, connector.health().num_payloads) == (0, 0)


def test_a_ref_is_an_error_once_it_is_reclaimed(connector: Connector) -> None:
    old = connector.put(payload(MIB, fill=1))
    connector.reclaim(old)
    with pytest.raises(ConnectorError, match="was reclaimed before this get"):
        connector.get(old)
    new = connector.put(payload(MIB, fill=2))
    with pytest.raises(ConnectorError, match="was reclaimed before this get"):
        connector.get(old)
    assert connector.get(new).meta == {"fill": 2}


def test_cleanup_frees_what_was_put_and_never_got_of_this_request_only(connector: Connector) -> None:
    refs = [connector.put(payload(MIB, request_id="over")) for _ in range(3)]
    kept = connector.put(payload(MIB, request_id="goes on", fill=3))
    assert connector.reclaim(refs[0])
    connector.cleanup("over")
    connector.cleanup("over")
    connector.cleanup("never known")
    assert connector.health().num_payloads == 1
    assert not any(connector.reclaim(ref) for ref in refs)
    with pytest.raises(ConnectorError):
        connector.get(refs[1])
    assert connector.get(kept).meta == {"fill": 3}


def test_a_credit_of_an_earlier_process_frees_nothing(connector: Connector) -> None:
    ref = connector.put(payload(MIB))
    foreign = Ref(ref.connector, "omnictl-1-1-00000000-1", ref.token, ref.offset, ref.size_bytes)
    assert not connector.reclaim(foreign)
    assert connector.health().num_payloads == 1


def test_a_ref_that_never_was_is_an_error_at_once(connector: Connector) -> None:
    started_s = time.monotonic()
    for arena in ("", "omnictl-1-1-00000000-1", "../../etc/passwd"):
        with pytest.raises(ConnectorError, match=r"gone|no name of a segment|another process"):
            connector.get(Ref(connector.put(payload(0)).connector, arena, 1, 64, 64))
    assert time.monotonic() - started_s < 1.0


def test_a_ref_of_another_connector_is_an_error(connector: Connector) -> None:
    for inline in (None, pack(payload(0)).to_bytes()):
        with pytest.raises(ConnectorError, match="connector 'mooncake' was given to"):
            connector.get(Ref("mooncake", inline=inline))


def test_damaged_inline_bytes_are_an_error(connector: Connector) -> None:
    ref = connector.put(payload(100))
    assert ref.inline is not None
    with pytest.raises(ConnectorError, match="damaged payload"):
        connector.get(Ref(ref.connector, inline=ref.inline[:-64]))


def test_a_closed_connector_takes_nothing(connector: Connector) -> None:
    connector.put(payload(MIB))
    connector.close()
    connector.close()
    with pytest.raises(ConnectorError, match="is closed"):
        connector.put(payload(MIB))
    assert connector.health().num_payloads == 0


def test_threads_share_a_connector(connector: Connector) -> None:
    """Each thread puts, reads and frees payloads of its own; all must find what they put, and nothing is left."""
    failures: list[object] = []

    def work(number: int) -> None:
        chance = random.Random(number)
        held: list[tuple[Ref, int]] = []
        try:
            for i in range(150):
                fill = chance.randrange(256)
                size_bytes = chance.choice([100, 20 * KIB, 200 * KIB, MIB])
                held.append((connector.put(payload(size_bytes, request_id=f"{number}-{i % 3}", fill=fill)), fill))
                if len(held) > 6:
                    ref, expected = held.pop(chance.randrange(len(held)))
                    data = connector.get(ref).tensors["data"]
                    assert data.min() == data.max() == expected
                    connector.release(ref)
                    assert connector.reclaim(ref) == (ref.inline is None)
            for i in range(3):
                connector.cleanup(f"{number}-{i}")
            assert not any(connector.reclaim(ref) for ref, _ in held)
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert (connector.health().used_bytes, connector.health().num_payloads) == (0, 0)


# ---- inproc --------------------------------------------------------------------------------------------


def test_inproc_hands_over_by_reference() -> None:
    (connector,) = open_connectors(["inproc"]).values()
    sent = payload(MIB)
    got = connector.get(connector.put(sent))
    assert np.shares_memory(got.tensors["data"], sent.tensors["data"])
    assert sent.tensors["data"].flags.writeable


# ---- shm: memory that comes and goes -------------------------------------------------------------------


def test_a_process_that_only_reads_makes_no_file(tmp_path: Path) -> None:
    producer, consumer = open_shm(tmp_path), open_shm(tmp_path)
    ref = producer.put(payload(MIB))
    assert consumer.get(ref).meta == {"fill": 1}
    assert files(tmp_path) == [ref.arena]
    assert consumer.health().reserved_bytes == 0
    producer.close()
    consumer.close()


def test_segments_are_reused_and_not_made_for_each_payload(tmp_path: Path) -> None:
    connector = open_shm(tmp_path)
    names = set()
    for _ in range(100):
        ref = connector.put(payload(100 * KIB))
        names.update(files(tmp_path))
        connector.reclaim(ref)
    assert len(names) == 1
    connector.close()


def test_the_arena_grows_to_its_capacity_and_says_what_was_missing(tmp_path: Path) -> None:
    connector = open_shm(tmp_path, capacity=4 * MIB)
    refs = [connector.put(payload(900 * KIB, fill=i)) for i in range(4)]
    assert len(files(tmp_path)) == 4
    with pytest.raises(ConnectorError, match=r"\d+ bytes are needed in one piece, \d+ of 4194304 are free") as caught:
        connector.put(payload(900 * KIB))
    assert caught.value.hint is not None
    assert [connector.get(ref).meta["fill"] for ref in refs] == [0, 1, 2, 3]
    connector.reclaim(refs[2])
    assert connector.get(connector.put(payload(900 * KIB, fill=7))).meta == {"fill": 7}
    connector.close()


def test_a_payload_larger_than_a_segment_gets_one_that_fits(tmp_path: Path) -> None:
    connector = open_shm(tmp_path, segment=MIB, capacity=room(3 * MIB))
    ref = connector.put(payload(3 * MIB))
    assert connector.health().reserved_bytes == room(3 * MIB)
    assert connector.get(ref).size_bytes == 3 * MIB
    with pytest.raises(ConnectorError, match="are needed in one piece"):
        connector.put(payload(3 * MIB))
    connector.close()


def test_unused_segments_make_way_for_a_large_payload(tmp_path: Path) -> None:
    connector = open_shm(tmp_path, capacity=4 * MIB)
    for ref in [connector.put(payload(900 * KIB)) for _ in range(4)]:
        connector.reclaim(ref)
    assert connector.health().reserved_bytes == 4 * MIB
    ref = connector.put(payload(3 * MIB))
    assert connector.health().reserved_bytes <= 4 * MIB
    assert connector.get(ref).size_bytes == 3 * MIB
    connector.close()


@pytest.mark.parametrize(("idle_s", "kept_bytes"), [(0.0, MIB), (60.0, 8 * MIB)])
def test_idle_segments_are_given_back_but_one(tmp_path: Path, idle_s: float, kept_bytes: int) -> None:
    connector = open_shm(tmp_path, idle_s=idle_s)
    refs = [connector.put(payload(size)) for size in (100, 900 * KIB, 6 * MIB, 900 * KIB)]
    assert connector.health().reserved_bytes == 8 * MIB
    for ref in refs:
        connector.reclaim(ref)
    connector.trim()
    assert connector.health().reserved_bytes == kept_bytes
    assert sum((tmp_path / name).stat().st_size for name in files(tmp_path)) == kept_bytes
    connector.close()


def test_a_consumer_lets_go_of_what_the_producer_gave_back(tmp_path: Path) -> None:
    producer, consumer = open_shm(tmp_path, idle_s=0.0), open_shm(tmp_path)
    small, large = producer.put(payload(100 * KIB)), producer.put(payload(6 * MIB))
    views = [consumer.get(ref).tensors["data"] for ref in (small, large)]
    assert consumer.health().attached_bytes == 8 * MIB
    producer.reclaim(large)
    assert consumer.health().attached_bytes == 8 * MIB
    consumer.trim()
    assert consumer.health().attached_bytes == MIB
    assert views[1].min() == 1  # views outlive their file
    producer.close()
    consumer.close()
    assert consumer.health().attached_bytes == 0


def test_a_consumer_lets_go_of_old_segments_when_it_meets_a_new_one(tmp_path: Path) -> None:
    producer, consumer = open_shm(tmp_path, idle_s=0.0), open_shm(tmp_path)
    for _ in range(20):
        ref = producer.put(payload(3 * MIB))
        consumer.get(ref)
        producer.reclaim(ref)
    assert consumer.health().attached_bytes <= 4 * MIB
    producer.close()


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for capacity, segment, idle_s in ((MIB, 2 * MIB, 1.0), (MIB, 100, 1.0), (MIB, MIB, -1.0)):
        with pytest.raises(ConfigError, match="expected"):
            ShmSettings(tmp_path, capacity, segment, idle_s)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    connector = open_shm(tmp_path / "missing")
    with pytest.raises(ConnectorError, match="missing: a segment of .* bytes is needed, .*No such file"):
        connector.put(payload(100 * KIB))
    assert connector.put(payload(100)).inline is not None


def test_a_tensor_that_cannot_travel_costs_no_memory(connector: Connector) -> None:
    with pytest.raises(ConnectorError, match="has dtype"):
        connector.put(Payload("latents", "r", tensors={"x": np.zeros(MIB, np.longdouble)}))
    assert connector.health().used_bytes == 0


# ---- the factory ---------------------------------------------------------------------------------------


def test_the_factory_opens_what_is_asked_in_the_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNICTL_SHM_DIR", str(tmp_path))
    connectors = open_connectors()
    assert set(connectors) == set(KINDS)
    connectors["shm"].put(payload(MIB))
    assert len(files(tmp_path)) == 1
    for connector in connectors.values():
        connector.close()
    assert files(tmp_path) == []


def test_the_factory_refuses_a_connector_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="connector 'mooncake' is not known; expected one of inproc, shm"):
        open_connectors(["mooncake"])


# ---- credits -------------------------------------------------------------------------------------------


def test_credits_hold_back_what_does_not_fit() -> None:
    credits = EdgeCredits(100)
    assert credits.take(60)
    assert credits.take(40)
    assert not credits.take(1)
    credits.give(60)
    assert credits.take(60)
    assert (credits.in_flight_bytes, credits.num_in_flight, credits.peak_bytes, credits.num_refused) == (100, 2, 100, 1)


def test_a_payload_larger_than_the_edge_goes_alone() -> None:
    credits = EdgeCredits(100)
    assert credits.take(500)
    assert not credits.take(1)
    credits.give(500)
    assert credits.take(1)
    assert not credits.take(500)


def test_payloads_in_messages_need_no_credit() -> None:
    credits = EdgeCredits(100)
    assert credits.take(500)
    assert credits.take(0)
    credits.give(0)
    assert (credits.num_in_flight, credits.in_flight_bytes) == (1, 500)


@given(st.integers(1, 200), st.lists(st.integers(0, 300)), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_bytes_in_flight_never_pass_the_capacity(capacity: int, sizes: list[int], chance: random.Random) -> None:
    credits, flying = EdgeCredits(capacity), []
    for size in sizes:
        while not credits.take(size):
            assert flying
            credits.give(flying.pop(chance.randrange(len(flying))))
        flying.append(size)
        assert credits.in_flight_bytes == sum(flying)
        assert credits.in_flight_bytes <= capacity or credits.num_in_flight == 1
    for size in flying:
        credits.give(size)
    assert (credits.in_flight_bytes, credits.num_in_flight) == (0, 0)


# ---- extents -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_extents_never_overlap_and_join_again(sizes: list[int], chance: random.Random) -> None:
    extents = Extents(64, 64 + 8 * KIB)
    taken: list[tuple[int, int]] = []
    for size in sizes:
        offset = extents.take(size)
        if offset is None:
            assert extents.largest_bytes < size + ALIGNMENT
            extents.give(*taken.pop(chance.randrange(len(taken))))
            continue
        assert offset % ALIGNMENT == 0
        assert 64 <= offset <= 64 + 8 * KIB - size
        assert all(offset + size <= start or start + length <= offset for start, length in taken)
        taken.append((offset, size))
        if chance.random() < 0.4:
            extents.give(*taken.pop(chance.randrange(len(taken))))
        assert extents.is_unused == (not taken)
    chance.shuffle(taken)
    for offset, size in taken:
        extents.give(offset, size)
    assert extents.is_unused
    assert extents.largest_bytes == extents.free_bytes == extents.capacity_bytes == 8 * KIB
    assert extents.take(8 * KIB) == 64
