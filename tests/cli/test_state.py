"""Deployments on disk: atomic, damaged, locked, of another run."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from omnictl import state
from omnictl.state import DamagedState, State, Store, write_atomically
from runtime.errors import ConfigError, EnvironmentProblem, NotRunning, Unavailable
from tests.cli.conftest import Spawn, deployment, identity
from tests.cli.test_processes import SLEEP


def test_a_record_comes_back_as_it_was_saved(store: Store) -> None:
    record = deployment("one", identity(os.getpid()))
    store.prepare("one", '{"plan": 1}')
    store.save(record)
    assert store.load("one") == record
    assert store.plan_json("one") == '{"plan": 1}'
    assert store.names() == ["one"]
    store.remove("one")
    assert store.names() == []
    with pytest.raises(NotRunning, match="'one'"):
        store.load("one")


def test_what_is_observed_follows_the_process(store: Store, spawn: Spawn) -> None:
    child = spawn(SLEEP)
    record = deployment("one", identity(child.pid))
    assert record.observed is State.RUNNING
    child.kill()
    child.wait(10)
    assert record.observed is State.DEAD
    assert msgspec.structs.replace(record, state=State.FAILED).observed is State.FAILED


@pytest.mark.parametrize("name", ["", "../x", "a/b", "A", "-x", ".x", "x" * 64, "a b", "a\n"])
def test_a_name_that_could_leave_the_folder_is_refused(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match="deployment name"):
        store.folder(name)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"name": "one"}', b"\xff\xfe", b'{"name": 1}'])
def test_a_damaged_record_names_the_file_and_the_way_out(store: Store, content: bytes) -> None:
    folder = store.prepare("one", "{}")
    (folder / "deployment.json").write_bytes(content)
    with pytest.raises(DamagedState, match="deployment.json") as caught:
        store.load("one")
    assert caught.value.hint is not None
    assert "omnictl down one" in caught.value.hint
    assert store.names() == ["one"]


def test_a_record_of_a_future_version_is_not_guessed_at(store: Store) -> None:
    folder = store.prepare("one", "{}")
    store.save(deployment("one", identity(os.getpid())))
    record = (folder / "deployment.json").read_text()
    (folder / "deployment.json").write_text(record.replace("{", '{"new_key": 1,', 1))
    with pytest.raises(DamagedState, match="new_key"):
        store.load("one")


def test_foreign_files_in_the_state_folder_are_no_deployments(store: Store) -> None:
    store.prepare("one", "{}")
    (store.root / "deployments" / "notes.txt").write_text("mine")
    (store.root / "deployments" / "Not A Name").mkdir()
    assert store.names() == ["one"]


def test_readers_never_see_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_atomically(path, b"0" * 100_000)
    writer = threading.Thread(target=lambda: [write_atomically(path, bytes([n]) * 100_000) for n in range(100)])
    writer.start()
    while writer.is_alive():
        data = path.read_bytes()
        assert len(data) == 100_000
        assert len(set(data)) == 1
    writer.join()
    assert os.listdir(tmp_path) == ["record"]


def test_a_lock_is_waited_for_until_its_deadline(
    store: Store, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(state, "LOCK_TIMEOUT_S", 0.3)
    code = (
        "from omnictl.state import Store\nimport sys, time\n"
        "with Store().lock('one'):\n    print('up', flush=True)\n    time.sleep(60)"
    )
    child = spawn(code)
    with pytest.raises(Unavailable, match=f"process {child.pid}"), store.lock("one"):
        pass
    with store.lock("two"):
        pass
    child.kill()
    child.wait(10)
    with store.lock("one"):
        pass
    assert f"waiting for process {child.pid}" in capsys.readouterr().err


def test_a_record_of_another_run_is_not_changed(store: Store, spawn: Spawn) -> None:
    old, new = identity(os.getpid()), identity(spawn(SLEEP).pid)
    store.prepare("one", "{}")
    store.save(deployment("one", new))
    assert not store.update(deployment("one", old), State.FAILED, "late news")
    assert store.load("one").state is State.RUNNING
    assert store.update(deployment("one", new), State.FAILED, "reason")
    assert store.load("one").reason == "reason"
    store.remove("one")
    assert not store.update(deployment("one", new), State.FAILED)


def test_choosing_without_a_name(store: Store) -> None:
    with pytest.raises(NotRunning, match="nothing is deployed"):
        store.choose(None)
    store.prepare("one", "{}")
    assert store.choose(None) == "one"
    store.prepare("two", "{}")
    with pytest.raises(ConfigError, match="one, two"):
        store.choose(None)
    assert store.choose("two") == "two"
    with pytest.raises(NotRunning, match="'three'"):
        store.choose("three")


def test_folders_are_private(store: Store) -> None:
    folder = store.prepare("one", "{}")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "plan.json").stat().st_mode) == 0o600


def test_a_state_folder_that_is_a_file_names_the_setting(store: Store) -> None:
    store.root.write_text("not a folder")
    for act in (lambda: store.prepare("one", "{}"), store.names):
        with pytest.raises(EnvironmentProblem) as caught:
            act()
        assert "OMNICTL_STATE_DIR" in str(caught.value.hint)


def test_the_state_module_is_light() -> None:
    code = "import sys, omnictl.state; sys.exit(any(m in sys.modules for m in ('pydantic', 'httpx', 'rich', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
