"""The command as a user runs it: a process of its own, with its own state, shared-memory and home folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omnictl.backends.process import processes_of
from omnictl.processes import ProcessId
from omnictl.state import Store

RECIPE = "sim-chain"
TIMEOUT_S = 100.0
COMMAND = [sys.executable, "-P", "-m", "omnictl"]


class Tool:
    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "state")
        self.shm_dir = folder / "shm"
        self.shm_dir.mkdir()
        self.environment = {
            **os.environ,
            "OMNICTL_STATE_DIR": str(self.store.root),
            "OMNICTL_SHM_DIR": str(self.shm_dir),
            "OMNICTL_HOME": str(folder / "home"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "OMP_NUM_THREADS": "1",
        }
        self._foreground: list[Foreground] = []

    def run(
        self, *arguments: str, code: int | None = 0, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to its end; `code` is the exit code that it must have. Never may a traceback be seen."""
        done = subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**self.environment, **(environment or {})},
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    def json(self, *arguments: str, code: int = 0, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.run(*arguments, "--json", code=code, environment=environment).stdout)
        return document

    def up(self, *arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Start detached and ready."""
        return self.json("up", RECIPE, "--detach", *arguments, environment=environment)

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Foreground:
        """Start a command that stays in the foreground."""
        started = Foreground(arguments, {**self.environment, **(environment or {})}, self.store.root.parent)
        self._foreground.append(started)
        return started

    def server(self, name: str = RECIPE) -> ProcessId:
        return self.store.load(name).process

    def left_over(self) -> list[str]:
        """Processes, deployments and shared-memory files that are there now."""
        running = [f"process {p.pid}" for name in self.store.names() for p in processes_of(self.store.folder(name))]
        running += [f"process {p.pid}" for p in processes_of(self.store.folder(RECIPE))]
        return [*running, *os.listdir(self.shm_dir)]

    def close(self) -> None:
        for started in self._foreground:
            started.close()
        if self.store.names():
            self.run("down", "--all")
        assert self.left_over() == []
        assert self.store.names() == []


class Foreground:
    """A command at work, its output in files."""

    def __init__(self, arguments: tuple[str, ...], environment: Mapping[str, str], folder: Path) -> None:
        self._number = len(list(folder.glob("command*.out")))
        self._out, self._err = folder / f"command{self._number}.out", folder / f"command{self._number}.err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(environment)
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def until(self, text: str) -> None:
        """Wait until it has said something."""
        until(lambda: text in self.stdout + self.stderr, f"{text!r}: {self}", self.process)

    def signal(self, *numbers: signal.Signals) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def ends(self, code: int) -> None:
        assert self.process.wait(TIMEOUT_S) == code, str(self)
        assert "Traceback" not in self.stderr, self.stderr

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(TIMEOUT_S)

    def __str__(self) -> str:
        return f"exit {self.process.poll()}\n{self.stdout}\n{self.stderr}"


def until(condition: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """Tests look from outside, so they look often; nothing in the product does."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        assert process is None or process.poll() is None or condition(), what
        time.sleep(0.02)


def run_printed_request(output: str) -> dict[str, Any]:
    """The answer to the curl command in the output of `up`, copied as it is."""
    request = next(line for line in output.splitlines() if line.startswith("curl"))
    done = subprocess.run(
        f"{request} --noproxy '*' --silent", shell=True, capture_output=True, timeout=TIMEOUT_S, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
