"""Real child processes, real sockets and a state folder of the test's own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omnictl.processes import ProcessId, identify
from omnictl.state import Deployment, State, Store
from tests.cli.tool import Tool

Spawn = Callable[..., subprocess.Popen[bytes]]
Listen = Callable[..., int]


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "state"
    monkeypatch.setenv("OMNICTL_STATE_DIR", str(folder))
    monkeypatch.delenv("OMNICTL_API_KEY", raising=False)
    return folder


@pytest.fixture
def store(state_dir: Path) -> Store:
    return Store(state_dir)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start Python children that say a line when they are up; what lives at the end is killed with its session."""
    children: list[subprocess.Popen[bytes]] = []

    def start(code: str, *, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline(), "the child did not come up"
        return child

    yield start
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture
def tool(tmp_path: Path) -> Iterator[Tool]:
    """The command with folders of its own; at the end nothing of what it started may be left."""
    tool = Tool(tmp_path)
    yield tool
    tool.close()


@pytest.fixture
def listener() -> Iterator[Listen]:
    """Ports that somebody else listens on."""
    sockets = []

    def listen(port: int = 0) -> int:
        sock = socket.create_server(("127.0.0.1", port))
        sockets.append(sock)
        chosen: int = sock.getsockname()[1]
        return chosen

    yield listen
    for sock in sockets:
        sock.close()


def identity(pid: int) -> ProcessId:
    found = identify(pid)
    assert found is not None
    return found


def deployment(name: str, process: ProcessId, *, port: int = 8091, state: State = State.RUNNING) -> Deployment:
    return Deployment(
        name=name,
        model="tests/model",
        model_names=("model",),
        process=process,
        host="127.0.0.1",
        port=port,
        url=f"http://127.0.0.1:{port}",
        state=state,
        started_at="2026-01-01T00:00:00+00:00",
        log_dir="/nonexistent",
        shm_dir="/dev/shm",
    )
