"""Stopping: drain, deadline, kill, orphans, hurry. With small children in place of servers."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from omnictl.backends import process
from omnictl.ports import first_free_port
from omnictl.processes import ProcessId, identify
from omnictl.state import Deployment, Store
from runtime.errors import EnvironmentProblem
from runtime.sweep import MAGIC
from tests.cli.conftest import Listen, Spawn, deployment, identity

OBEDIENT = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(60)"
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "print('up', flush=True)\nprint(child.pid, flush=True)\ntime.sleep(60)"
)


@pytest.fixture
def folder(store: Store) -> Path:
    return store.prepare("one", "{}")


def server(spawn: Spawn, folder: Path, code: str) -> tuple[subprocess.Popen[bytes], Deployment]:
    child = spawn(code, environment={process.MARKER_VARIABLE: str(folder)})
    return child, deployment("one", identity(child.pid), port=first_free_port("127.0.0.1", ()))


def grandchild(parent: subprocess.Popen[bytes]) -> ProcessId:
    assert parent.stdout is not None
    return identity(int(parent.stdout.readline()))


def test_an_obedient_server_is_not_killed(spawn: Spawn, folder: Path) -> None:
    child, record = server(spawn, folder, OBEDIENT)
    report = process.stop(record, folder, timeout_s=100)
    assert (report.was_alive, report.killed, report.port_free) == (True, (), True)
    assert child.wait(100) == -signal.SIGTERM


def test_a_stubborn_server_is_killed_at_the_deadline(spawn: Spawn, folder: Path) -> None:
    child, record = server(spawn, folder, STUBBORN)
    assert process.stop(record, folder, timeout_s=0.5).killed == (child.pid,)
    assert child.wait(100) == -signal.SIGKILL


def test_hurry_cuts_the_drain_short(spawn: Spawn, folder: Path) -> None:
    child, record = server(spawn, folder, STUBBORN)
    read_fd, write_fd = os.pipe()
    threading.Timer(0.3, os.write, (write_fd, b"!")).start()
    assert process.stop(record, folder, timeout_s=100_000, hurry_fd=read_fd).killed == (child.pid,)
    os.close(read_fd)
    os.close(write_fd)
    child.wait(100)


@pytest.mark.parametrize("killed_before", [False, True])
def test_workers_that_stay_behind_are_ended(
    spawn: Spawn, folder: Path, killed_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "ORPHAN_TIMEOUT_S", 0.3)
    parent, record = server(spawn, folder, PARENT)
    orphan = grandchild(parent)
    if killed_before:
        parent.kill()
        parent.wait(100)
    report = process.stop(record, folder, timeout_s=100)
    assert report.was_alive is not killed_before
    assert report.killed == (orphan.pid,)
    assert identify(orphan.pid) is None
    parent.wait(100)


def test_a_process_that_got_the_pid_later_is_not_touched(spawn: Spawn, folder: Path) -> None:
    foreign = spawn(OBEDIENT)
    reused = ProcessId(pid=foreign.pid, start_ticks=1, boot_id=identity(foreign.pid).boot_id)
    report = process.stop(deployment("one", reused), folder, timeout_s=100)
    assert (report.was_alive, report.killed) == (False, ())
    assert foreign.poll() is None


def test_a_port_that_others_took_is_told_and_not_an_error(spawn: Spawn, folder: Path, listener: Listen) -> None:
    child = spawn(OBEDIENT)
    record = deployment("one", identity(child.pid), port=listener())
    assert process.stop(record, folder, timeout_s=100).port_free is False


def test_the_sweep_takes_files_of_dead_owners_only(tmp_path: Path) -> None:
    own_ticks = identity(os.getpid()).start_ticks
    dead = tmp_path / "omnictl-1999999999-1-0123abcd-1"
    living = tmp_path / f"omnictl-{os.getpid()}-{own_ticks}-0123abcd-1"
    foreign = tmp_path / "someone-elses"
    for path in (dead, living, foreign):
        path.write_bytes(MAGIC)
    assert process.sweep(str(tmp_path)) == ((dead.name,), ())
    assert sorted(os.listdir(tmp_path)) == sorted([living.name, foreign.name])


def test_a_sweep_that_cannot_read_its_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentProblem, match="sweep of"):
        process.sweep(str(tmp_path / "file"))


def test_the_server_gets_key_file_and_mark_by_its_environment(folder: Path) -> None:
    server = process.start_server(["/usr/bin/env"], folder, "/keys")
    assert server.wait(10) == 0
    seen = (folder / "logs" / "server.log").read_text()
    assert "OMNICTL_API_KEY_FILE=/keys" in seen
    assert f"{process.MARKER_VARIABLE}={folder}" in seen
    assert "OMNICTL_SHM_DIR=/" in seen


def test_a_server_that_cannot_be_started_is_an_error(folder: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="cannot start"):
        process.start_server(["/nonexistent"], folder, None)
