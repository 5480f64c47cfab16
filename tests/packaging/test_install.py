"""`scripts/install.py` on a small project: a real virtual environment, the real pip, packages from a local folder."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.wheels import write_wheel

SCRIPT = Path(__file__).parents[2] / "scripts/install.py"
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "omnictl-serve"
version = "1.0"

[project.optional-dependencies]
cpu = ["torch==2.13.0", "torchvision==0.28.0", "torchaudio"]
dev = []
"""
BACKEND = '''
"""A build backend without dependencies: an editable install whose command exists."""
from pathlib import Path
from tests.wheels import write_wheel

def build_editable(folder, settings=None, metadata=None):
    extras = {"cpu": ["torch==2.13.0", "torchvision==0.28.0", "torchaudio"], "dev": []}
    files = {"omnictl_cli.py": b"def main():\\n    print('usage: omnictl')\\n"}
    points = "[console_scripts]\\nomnictl = omnictl_cli:main\\n"
    return write_wheel(Path(folder), "omnictl-serve", "1.0", files, extras=extras, entry_points=points).name
'''
UV = """#!/usr/bin/env python3
# Stands for uv: notes how it was called and puts the CPU build where it was told to.
import json, subprocess, sys
from pathlib import Path
arguments = sys.argv[1:]
Path({log!r}).write_text(json.dumps(arguments))
python = arguments[arguments.index("--python") + 1]
pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--find-links", {folder!r}]
subprocess.run([*pip, "torch"], check=True)
"""


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the script, and a folder of packages that pip is told to use alone."""
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "scripts")
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "backend.py").write_text(BACKEND)
    tests = root / "tests"
    tests.mkdir()
    shutil.copy(SCRIPT.parents[1] / "tests/wheels.py", tests)
    packages = tmp_path / "packages"
    packages.mkdir()
    write_wheel(packages, "torchvision", "0.28.0")
    write_wheel(packages, "torchaudio", "2.11.0")
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    return root


def run(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/install.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def installed(root: Path) -> dict[str, str]:
    listing = subprocess.run(
        [root / ".venv/bin/python", "-I", "-m", "pip", "list", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
    )
    return {item["name"]: item["version"] for item in json.loads(listing.stdout)}


def state(root: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((root / ".venv/omnictl-install.json").read_text())
    return found


@pytest.mark.slow
def test_a_fresh_checkout_is_set_up_once(root: Path) -> None:
    write_wheel(root.parent / "packages", "torch", "2.13.0+cpu")
    first = run(root)
    assert first.returncode == 0, first.stderr
    packages = installed(root)
    assert packages["torch"] == "2.13.0+cpu"
    assert packages["omnictl-serve"] == "1.0"
    assert "torchaudio" not in packages, "its build is one for CUDA"

    second = run(root)
    assert "is up to date" in second.stdout


@pytest.mark.slow
def test_uv_finds_the_cpu_build_where_pip_has_none(root: Path, tmp_path: Path) -> None:
    packages = root.parent / "packages"
    write_wheel(packages, "torch", "2.13.0")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_wheel(elsewhere, "torch", "2.13.0+cpu")
    log = tmp_path / "uv.json"
    script = UV.format(log=str(log), folder=str(elsewhere))
    write_wheel(packages, "uv", "1.0", {"uv-1.0.data/scripts/uv": script.encode()})
    done = run(root)
    assert done.returncode == 0, done.stderr
    assert json.loads(log.read_text()) == [
        *("pip", "install", "--python", str(root / ".venv/bin/python"), "--torch-backend", "cpu"),
        *("torch==2.13.0", "torchvision==0.28.0"),
    ]
    assert installed(root)["torch"] == "2.13.0+cpu", "pip left it in place"
    assert "uv" not in installed(root)


@pytest.mark.slow
def test_a_failure_says_what_pip_said_and_is_not_taken_for_success(root: Path) -> None:
    done = run(root)
    assert done.returncode == 1
    assert "No matching distribution found for torch==2.13.0" in done.stderr
    assert "omnictl-install.log" in done.stderr
    assert state(root) == {}

    (root / ".venv/half-installed").touch()
    write_wheel(root.parent / "packages", "torch", "2.13.0+cpu")
    again = run(root)
    assert again.returncode == 0, again.stderr
    assert "left unfinished" in again.stdout
    assert not (root / ".venv/half-installed").exists()


def test_an_interrupted_run_leaves_an_environment_that_says_so(root: Path) -> None:
    write_wheel(root.parent / "packages", "torch", "2.13.0+cpu")
    with subprocess.Popen(
        [sys.executable, str(root / "scripts/install.py")], stderr=subprocess.PIPE, text=True
    ) as process:
        deadline_s = time.monotonic() + 100
        while not (root / ".venv/bin/python").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 130
    assert stderr == "install: interrupted; the next `make install` starts over\n"
    assert state(root) == {}


def test_an_environment_of_somebody_else_is_left_alone(root: Path) -> None:
    (root / ".venv").mkdir()
    (root / ".venv/precious").touch()
    done = run(root)
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert (root / ".venv/precious").exists()


@pytest.fixture
def environment(root: Path) -> Any:
    """A complete environment as far as its state tells."""
    made = load_script().Environment(root)
    made.python.parent.mkdir(parents=True)
    made.python.symlink_to(sys.executable)
    made.finish()
    assert made.is_current()
    return made


def test_changed_requirements_are_installed_in_place(environment: Any, root: Path) -> None:
    (root / "pyproject.toml").write_text(PROJECT + "# changed\n")
    assert not environment.is_current()
    environment.open()
    assert (root / ".venv/bin/python").is_symlink(), "what was complete is not thrown away"
    assert state(root) == {}


def test_a_python_that_is_gone_is_noticed(environment: Any, root: Path) -> None:
    (root / ".venv/bin/python").unlink()
    (root / ".venv/bin/python").symlink_to("/nowhere/python")
    assert not environment.is_current()


def test_two_installations_at_once_are_refused(root: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    done = run(root)
    os.close(descriptor)
    assert done.returncode == 1
    assert "another `make install` is running" in done.stderr
