"""Shared memory that comes and goes with the load: segments, the space within them, and what each setting does."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.connectors import ShmSettings
from runtime.connectors.extents import ALIGNMENT, Extents
from runtime.connectors.shm import ShmConnector
from runtime.errors import ConfigError, ConnectorError
from runtime.payload import pack
from tests.unit.test_connectors import KIB, MIB, files, payload


def room(size_bytes: int) -> int:
    """Bytes of a segment that just holds one such payload."""
    return 2 * ALIGNMENT + pack(payload(size_bytes)).size_bytes


def open_shm(folder: Path, *, capacity: int = 64 * MIB, segment: int = MIB, idle_s: float = 60.0) -> ShmConnector:
    return ShmConnector(ShmSettings(folder, capacity, segment, idle_s))


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
