"""What owners of shared memory leave when they die, and what the sweep removes and leaves alone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.errors import ConfigError, ConnectorError
from runtime.sweep import MAGIC, start_ticks, sweep_dead_owners
from tests.process.shm_peer import KIB, MIB, Peer, fields, names, size_bytes


def test_the_files_of_a_killed_owner_are_swept_and_no_others(tmp_path: Path, producer: Peer, consumer: Peer) -> None:
    dead, alive = producer.put(900 * KIB, fill=6), consumer.put(900 * KIB, fill=7)
    queued = producer.put(10 * KIB * 2, fill=8)
    assert sweep_dead_owners(tmp_path).removed == []
    consumer.call("get", ref=fields(dead))
    producer.kill()
    swept = sweep_dead_owners(tmp_path)
    assert swept.removed == sorted({dead.arena, queued.arena})
    assert swept.removed_bytes >= MIB
    assert names(tmp_path) == [alive.arena]
    assert consumer.call("reread") == [6]  # what was being worked on is still there
    consumer.call("trim")
    assert consumer.call("health")["attached_bytes"] == 0
    with pytest.raises(ConnectorError, match="is gone: its owner ended"):
        consumer.call("get", ref=fields(dead))


def test_twenty_killed_owners_leave_no_more_than_one(tmp_path: Path) -> None:
    for _ in range(20):
        sweep_dead_owners(tmp_path)
        with Peer(tmp_path) as peer:
            peer.put(900 * KIB)
            assert len(names(tmp_path)) == 1
            peer.kill()
        assert size_bytes(tmp_path) <= MIB
    sweep_dead_owners(tmp_path)
    assert names(tmp_path) == []


def test_an_owner_that_ends_well_leaves_nothing(tmp_path: Path, producer: Peer) -> None:
    for _ in range(3):
        producer.put(900 * KIB)
    assert len(names(tmp_path)) == 3
    producer.call("close")
    assert names(tmp_path) == []


def dead_name(number: int = 1) -> str:
    """As of an owner that is gone: this pid lives, but did not start at tick 1."""
    return f"omnictl-{os.getpid()}-1-0123abcd-{number}"


def test_a_pid_that_was_used_again_does_not_protect_a_file(tmp_path: Path) -> None:
    (tmp_path / dead_name()).write_bytes(MAGIC)
    living = f"omnictl-{os.getpid()}-{start_ticks(os.getpid())}-0123abcd-1"
    (tmp_path / living).write_bytes(MAGIC)
    assert sweep_dead_owners(tmp_path).removed == [dead_name()]
    assert names(tmp_path) == [living]


def test_an_owner_that_is_dead_but_not_yet_waited_for_counts_as_dead(tmp_path: Path, producer: Peer) -> None:
    ref = producer.put(100 * KIB)
    producer.process.kill()
    os.waitid(os.P_PID, producer.pid, os.WEXITED | os.WNOWAIT)
    assert re.search(r"^State:\s+Z", Path(f"/proc/{producer.pid}/status").read_text(), re.MULTILINE)
    assert sweep_dead_owners(tmp_path).removed == [ref.arena]


def test_a_lock_protects_an_owner_whose_pid_cannot_be_seen(tmp_path: Path) -> None:
    """As in containers that share memory, each with process ids of its own."""
    path = tmp_path / dead_name()
    path.write_bytes(MAGIC)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sweep_dead_owners(tmp_path).removed == []
    assert sweep_dead_owners(tmp_path).removed == [path.name]


def test_a_segment_is_locked_for_as_long_as_its_owner_has_it(tmp_path: Path, producer: Peer) -> None:
    ref = producer.put(100 * KIB)
    with (tmp_path / ref.arena).open("rb") as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        producer.kill()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(MAGIC)
    foreign = ["omnictl-notes.txt", "omnictl-1-1-0123abcd", "sem.omnictl-1-1-0123abcd-1", f"{dead_name()}.bak", "psm_1"]
    for name in foreign:
        (tmp_path / name).write_bytes(MAGIC)
    (tmp_path / dead_name(1)).write_bytes(b"not made by us")
    (tmp_path / dead_name(2)).mkdir()
    (tmp_path / dead_name(3)).symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / dead_name(4))
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / dead_name(5)))
    before = names(tmp_path)
    swept = sweep_dead_owners(tmp_path)
    assert (swept.removed, swept.failed) == ([], [])
    assert names(tmp_path) == before
    assert (tmp_path / "precious").read_bytes() == MAGIC


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_files_of_other_users_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / dead_name()
    path.write_bytes(MAGIC)
    os.chown(path, 65534, 65534)
    assert sweep_dead_owners(tmp_path).removed == []


def test_an_empty_file_of_a_dead_owner_goes_when_it_is_old(tmp_path: Path) -> None:
    fresh, old = tmp_path / dead_name(1), tmp_path / dead_name(2)
    fresh.touch()
    old.touch()
    os.utime(old, (time.time() - 3600, time.time() - 3600))
    assert sweep_dead_owners(tmp_path).removed == [old.name]
    assert names(tmp_path) == [fresh.name]


def run_sweep(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "runtime.sweep", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_sweep_is_a_command(tmp_path: Path) -> None:
    """It also removes the control-socket folders of dead servers."""
    shm, temporary = tmp_path / "shm", tmp_path / "tmp"
    sockets = temporary / dead_name()
    shm.mkdir()
    sockets.mkdir(parents=True)
    (sockets / "server").touch()
    (shm / dead_name()).write_bytes(MAGIC)
    done = run_sweep(OMNICTL_SHM_DIR=str(shm), TMPDIR=str(temporary))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "removed": [dead_name()],
        "removed_bytes": len(MAGIC),
        "failed": [],
        "folders": [sockets.name],
    }
    assert list(temporary.iterdir()) == []
    assert json.loads(run_sweep(str(tmp_path)).stdout)["removed"] == []
    assert run_sweep(str(tmp_path / "missing")).returncode == 0


def test_the_sweep_says_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_sweep(str(tmp_path / "file"))
    assert done.returncode == ConfigError.exit_code
    assert done.stdout == ""
    assert "file cannot be read: Not a directory" in done.stderr
    assert "Traceback" not in done.stderr
    assert run_sweep("a", "b").returncode == ConfigError.exit_code
