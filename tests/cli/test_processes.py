"""Identity of processes: a reused pid is never mistaken, a zombie does not count, nothing polls."""

from __future__ import annotations

import os
import signal
import threading

import msgspec

from omnictl.processes import descendants, identify, with_environment
from tests.cli.conftest import Spawn, identity

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def test_a_reused_pid_is_another_process(spawn: Spawn) -> None:
    """The kernel gives the pid to somebody else: same pid, later start. It must not be signalled."""
    child = spawn(SLEEP)
    earlier = msgspec.structs.replace(identity(child.pid), start_ticks=identity(child.pid).start_ticks - 100)
    assert not earlier.is_alive()
    assert not earlier.send(signal.SIGKILL)
    assert earlier.wait(0)
    assert child.poll() is None


def test_a_pid_of_an_earlier_boot_is_another_process(spawn: Spawn) -> None:
    child = spawn(SLEEP)
    assert not msgspec.structs.replace(identity(child.pid), boot_id="earlier").is_alive()


def test_a_zombie_is_not_alive(spawn: Spawn) -> None:
    child = spawn(SLEEP)
    process = identity(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has collected it
    assert identify(child.pid) is None
    assert not process.is_alive()
    assert process.wait(0)


def test_waiting_ends_with_the_process_and_not_before(spawn: Spawn) -> None:
    child = spawn(SLEEP)
    process = identity(child.pid)
    assert not process.wait(0.05)
    threading.Timer(0.1, child.kill).start()
    assert process.wait(50), "it would sleep for longer"


def test_descendants_and_marked_orphans_are_found(spawn: Spawn) -> None:
    """A child in a session of its own, whose parent then dies, is found by its environment."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\ntime.sleep(60)"
    )
    parent = spawn(f"print('up', flush=True)\n{code}", environment={"OMNICTL_TEST_MARK": "a b"})
    assert parent.stdout is not None
    grandchild = identity(int(parent.stdout.readline()))
    try:
        assert descendants(parent.pid) == [grandchild]
        parent.kill()
        parent.wait(10)
        assert with_environment("OMNICTL_TEST_MARK", "a b") == [grandchild]
        assert with_environment("OMNICTL_TEST_MARK", "a") == []
    finally:
        grandchild.send(signal.SIGKILL)
        assert grandchild.wait(10)
