"""Shared memory between real processes: hand-over, back-pressure, broken files and full folders."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.connectors.arena import ShmSettings
from runtime.connectors.credits import EdgeCredits
from runtime.connectors.shm import ShmConnector
from runtime.errors import ConnectorError
from runtime.sweep import MAGIC, NAME, start_ticks
from tests.process.shm_peer import KIB, MIB, Peer, fields, make_payload, names, size_bytes


@pytest.fixture
def connector(tmp_path: Path) -> Iterator[ShmConnector]:
    """Of the test's own process."""
    opened = ShmConnector(ShmSettings(tmp_path, 64 * MIB, MIB, 60.0))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def reader(shared_folder: Path) -> Iterator[Peer]:
    """One consumer that outlives every broken file it meets: it would not answer the next test otherwise."""
    with Peer(shared_folder) as peer:
        yield peer


@pytest.fixture
def writer(shared_folder: Path) -> Iterator[ShmConnector]:
    """Of the test's own process, for `reader`."""
    opened = ShmConnector(ShmSettings(shared_folder, 64 * MIB, MIB, 60.0))
    yield opened
    opened.close()


# ---- hand-over -----------------------------------------------------------------------------------------


def test_a_payload_goes_from_process_to_process(tmp_path: Path, producer: Peer, consumer: Peer) -> None:
    ref = producer.put(3 * MIB, fill=9)
    assert consumer.call("get", ref=fields(ref)) == {"size": 3 * MIB, "min": 9, "max": 9, "fill": 9}
    assert names(tmp_path) == [ref.arena]
    (name,) = names(tmp_path)
    match = NAME.fullmatch(name)
    assert match is not None
    assert (int(match["pid"]), int(match["ticks"])) == (producer.pid, start_ticks(producer.pid))
    assert (tmp_path / name).stat().st_mode & 0o7777 == 0o600
    assert producer.call("reclaim", ref=fields(ref)) is True
    assert producer.call("health")["used_bytes"] == 0
    with pytest.raises(ConnectorError, match="was reclaimed before this get"):
        consumer.call("get", ref=fields(ref))


def test_the_consumer_looks_at_the_producers_memory(connector: ShmConnector, consumer: Peer) -> None:
    """Not a copy: what the owner writes after the get is seen."""
    ref = connector.put(make_payload(100 * KIB, fill=1))
    consumer.call("get", ref=fields(ref))
    connector.reclaim(ref)
    assert connector.put(make_payload(100 * KIB, fill=2)).offset == ref.offset
    assert consumer.call("reread") == [2]


def test_hand_overs_need_no_file_each_and_no_polling(tmp_path: Path, connector: ShmConnector, consumer: Peer) -> None:
    """Each sleep or wait within a get is a switch that the process asks for itself."""
    num_waits, seen = 0, set()
    for i in range(1000):
        ref = connector.put(make_payload(20 * KIB, fill=i % 256))
        got = consumer.call("get", ref=fields(ref))
        num_waits += consumer.num_waits
        assert got["min"] == got["max"] == i % 256
        consumer.call("forget")
        seen.update(names(tmp_path))
        connector.reclaim(ref)
    assert len(seen) == 1
    assert num_waits < 100


def test_a_slow_consumer_slows_its_producer_and_not_the_host(
    tmp_path: Path, connector: ShmConnector, consumer: Peer
) -> None:
    capacity_bytes = 3 * MIB
    credits, flying = EdgeCredits(capacity_bytes), []
    for i in range(50):
        payload = make_payload(700 * KIB, fill=i)
        while not credits.take(payload.size_bytes):
            ref = flying.pop(0)  # the slow consumer gets round to one, and its credit comes back
            assert consumer.call("get", ref=fields(ref))["size"] == 700 * KIB
            assert connector.reclaim(ref)
            credits.give(payload.size_bytes)
        flying.append(connector.put(payload))
        assert connector.health().used_bytes <= capacity_bytes + 10 * KIB  # headers
    assert credits.num_refused >= 45
    assert credits.peak_bytes <= capacity_bytes
    assert size_bytes(tmp_path) <= capacity_bytes + 2 * MIB  # whole segments


def test_what_was_put_and_never_got_is_freed_at_the_end_of_its_request(producer: Peer, consumer: Peer) -> None:
    refs = [producer.put(300 * KIB, request_id="aborted") for _ in range(4)]
    kept = producer.put(300 * KIB, request_id="other", fill=5)
    producer.call("cleanup", request_id="aborted")
    assert producer.call("health")["num_payloads"] == 1
    for ref in refs:
        with pytest.raises(ConnectorError, match="was reclaimed before this get"):
            consumer.call("get", ref=fields(ref))
    assert consumer.call("get", ref=fields(kept))["fill"] == 5


def test_a_consumer_does_not_keep_what_its_producer_gave_back(tmp_path: Path, consumer: Peer) -> None:
    with Peer(tmp_path, idle_s=0.0) as producer:
        refs = [producer.put(900 * KIB), producer.put(6 * MIB)]
        for ref in refs:
            consumer.call("get", ref=fields(ref))
        consumer.call("forget")
        assert consumer.call("health")["attached_bytes"] == 8 * MIB
        for ref in refs:
            producer.call("reclaim", ref=fields(ref))
        producer.call("trim")
        consumer.call("trim")
        assert consumer.call("health")["attached_bytes"] == MIB
        mapped = Path(f"/proc/{consumer.pid}/maps").read_text()
        assert refs[0].arena in mapped
        assert refs[1].arena not in mapped


# ---- broken files: an error at once, never a wait, garbage or a dead process ------------------------------


def _cut(path: Path) -> None:
    os.truncate(path, 4096)


def _cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def _forbid(path: Path) -> None:
    path.chmod(0o000)


def _open_to_all(path: Path) -> None:
    path.chmod(0o644)


def _wrong_magic(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"GARBAGE!")


def _wrong_size(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(len(MAGIC))
        file.write((1 << 40).to_bytes(8, "little"))


def _zeroed(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def _scrambled_payload(path: Path) -> None:
    """Headers of segment and payload stay; the payload's own header is destroyed."""
    with path.open("r+b") as file:
        file.seek(128)
        file.write(b"\xff" * 256)


def _gone(path: Path) -> None:
    path.unlink()


def _symlink(path: Path) -> None:
    target = path.rename(path.with_suffix(".moved"))
    path.symlink_to(target)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        *(_cut, _cut_to_nothing, _forbid, _open_to_all, _wrong_magic, _wrong_size, _zeroed),
        *(_scrambled_payload, _gone, _symlink, _folder),
    ],
    ids=lambda damage: damage.__name__.strip("_"),
)
def test_a_broken_segment_is_an_error(
    shared_folder: Path, writer: ShmConnector, reader: Peer, damage: Callable[[Path], None]
) -> None:
    ref = writer.put(make_payload(MIB - KIB))
    path = shared_folder / ref.arena
    damage(path)
    with pytest.raises(ConnectorError) as caught:
        reader.call("get", ref=fields(ref))
    assert "segment" in caught.value.message or "damaged payload" in caught.value.message
    if path.is_dir():
        path.rmdir()
    later = writer.put(make_payload(2 * MIB, fill=4))
    assert reader.call("get", ref=fields(later))["fill"] == 4


@pytest.mark.parametrize("damage", [_cut, _cut_to_nothing, _zeroed, _scrambled_payload])
def test_a_segment_that_breaks_after_it_was_mapped_is_an_error(
    shared_folder: Path, writer: ShmConnector, reader: Peer, damage: Callable[[Path], None]
) -> None:
    ref = writer.put(make_payload(MIB - KIB))
    reader.call("get", ref=fields(ref))
    damage(shared_folder / ref.arena)
    with pytest.raises(ConnectorError):
        reader.call("get", ref=fields(ref))


@pytest.mark.parametrize(
    "change",
    [
        {"token": 99},
        {"offset": 128},
        {"offset": 0},
        {"offset": -64},
        {"offset": 1 << 40},
        {"size_bytes": 64},
        {"size_bytes": -1},
        {"size_bytes": 1 << 40},
        {"arena": ""},
        {"arena": "../secret"},
        {"arena": "omnictl-1-1-00000000-1"},
    ],
    ids=str,
)
def test_a_wrong_ref_is_an_error(writer: ShmConnector, reader: Peer, change: dict[str, Any]) -> None:
    ref = writer.put(make_payload(100 * KIB))
    with pytest.raises(ConnectorError):
        reader.call("get", ref=fields(msgspec.structs.replace(ref, **change)))
    assert reader.call("get", ref=fields(ref))["size"] == 100 * KIB


# ---- full folders: an error with figures, never SIGBUS ----------------------------------------------------


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Iterator[Path]:
    """A real file system in memory of 1 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_tiny_folder_is_an_error_with_figures(tiny_folder: Path) -> None:
    with Peer(tiny_folder, segment_bytes=8 * MIB) as peer:
        with pytest.raises(
            ConnectorError, match=r"tiny: a segment of \d+ bytes is needed, \d+ of 1048576 bytes are free"
        ):
            peer.put(2 * MIB)
        assert names(tiny_folder) == []
        small = peer.put(200 * KIB, fill=3)  # less than a segment is made when that is all there is
        assert peer.call("get", ref=fields(small))["fill"] == 3
        with pytest.raises(ConnectorError) as caught:
            peer.put(900 * KIB)
        assert caught.value.hint is not None
        assert "OMNICTL_SHM_DIR" in caught.value.hint
        assert peer.call("get", ref=fields(small))["fill"] == 3


def test_a_full_folder_is_an_error_until_there_is_room(tiny_folder: Path) -> None:
    (tiny_folder / "foreign").write_bytes(bytes(1000 * KIB))
    with Peer(tiny_folder) as peer:
        with pytest.raises(ConnectorError, match="are free: No space left on device"):
            peer.put(100 * KIB)
        assert names(tiny_folder) == ["foreign"]
        (tiny_folder / "foreign").unlink()
        assert peer.call("get", ref=fields(peer.put(100 * KIB)))["size"] == 100 * KIB


def test_a_limit_on_file_sizes_is_an_error(tmp_path: Path) -> None:
    with Peer(tmp_path) as peer:
        peer.call("limit_file_size", size_bytes=300 * KIB)
        with pytest.raises(ConnectorError, match="File too large"):
            peer.put(MIB)
        assert names(tmp_path) == []
        assert peer.call("get", ref=fields(peer.put(200 * KIB)))["size"] == 200 * KIB


def test_the_capacity_of_a_process_is_an_error_with_figures(tmp_path: Path) -> None:
    with Peer(tmp_path, capacity_bytes=2 * MIB) as peer:
        peer.put(900 * KIB)
        with pytest.raises(ConnectorError, match=r"\d+ bytes are needed in one piece, \d+ of 2097152 are free"):
            peer.put(1200 * KIB)
        assert size_bytes(tmp_path) <= 2 * MIB
