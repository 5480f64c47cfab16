"""Last lines and following, on files that grow, appear, shrink and redraw lines."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from omnictl.interrupts import Interrupts
from omnictl.logs import BLOCK_BYTES, LogFile, follow, last_lines, log_files
from runtime.errors import ConfigError
from tests.cli.conftest import Spawn, identity

PLAN = json.dumps(
    {
        "processes": [
            {"name": "thinker", "replicas": [{"stage": "thinker", "index": 0}]},
            {"name": "voice", "replicas": [{"stage": "talker", "index": 0}, {"stage": "code2wav", "index": 0}]},
            {"name": "voice2", "replicas": [{"stage": "talker", "index": 1}]},
        ]
    }
)


def test_the_last_lines_over_several_blocks(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    lines = [f"line {n} " + "x" * (n % 977) for n in range(1000)]
    path.write_text("\n".join(lines) + "\n")
    assert path.stat().st_size > 3 * BLOCK_BYTES
    for num_lines in (0, 1, 7, 400, 999, 1000, 5000):
        assert last_lines(path, num_lines) == lines[len(lines) - min(num_lines, 1000) :]


def test_an_unfinished_line_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\nthr")
    assert last_lines(path, 2) == ["two", "thr"]
    file = LogFile(path, 2)
    assert file.new_lines() == ["two"]
    with path.open("a") as grown:
        grown.write("ee\nfour\n")
    assert file.new_lines() == ["three", "four"]


def test_redrawn_lines_and_broken_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b" 10%\r 50%\r100%\nbad \xff byte\r\n")
    assert last_lines(path, 5) == ["100%", "bad \N{REPLACEMENT CHARACTER} byte"]


def test_a_missing_file_has_no_lines_and_may_appear(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert last_lines(path, 5) == []
    file = LogFile(path, 5)
    path.write_text("here\n")
    assert file.new_lines() == ["here"]


def test_a_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old " * 100 + "\n")
    file = LogFile(path, 0)
    path.write_text("new\n")
    assert file.new_lines() == ["new"]


def test_a_stage_is_found_by_its_process(tmp_path: Path) -> None:
    def names(stage: str | None) -> list[str]:
        return [path.stem for path in log_files(tmp_path, PLAN, stage)]

    assert names("code2wav") == ["voice"]
    assert names("talker") == ["voice", "voice2"]
    assert names("voice") == ["voice"]
    assert names("server") == ["server"]
    (tmp_path / "extra.log").touch()
    assert names(None) == ["server", "thinker", "voice", "voice2", "extra"]
    with pytest.raises(ConfigError, match="'nope'") as caught:
        names("nope")
    assert "thinker" in str(caught.value.hint)


@pytest.mark.parametrize("plan", [None, "", "[]", "{", '{"processes": [1]}', '{"processes": [{"replicas": 1}]}'])
def test_a_damaged_plan_leaves_the_files_that_are_there(tmp_path: Path, plan: str | None) -> None:
    (tmp_path / "voice.log").touch()
    assert [path.stem for path in log_files(tmp_path, plan, None)] == ["server", "voice"]


def test_following_ends_with_the_writer_and_misses_nothing(tmp_path: Path, spawn: Spawn) -> None:
    path = tmp_path / "a.log"
    code = (
        f"print('up', flush=True)\nimport time\nwith open({str(path)!r}, 'w', buffering=1) as file:\n"
        "    for n in range(200):\n        file.write(f'{n}\\n')\n        time.sleep(0.001)"
    )
    child = spawn(code)
    file = LogFile(path, 1000)
    with Interrupts() as interrupts, identity(child.pid).opened() as fd:
        assert fd is not None
        lines = [("a", line) for line in file.new_lines()] + list(follow([file], interrupts, fd))
    assert lines == [("a", str(n)) for n in range(200)]


def test_following_ends_with_a_signal(tmp_path: Path, spawn: Spawn) -> None:
    child = spawn("import time; print('up', flush=True); time.sleep(60)")
    with Interrupts() as interrupts, identity(child.pid).opened() as fd:
        assert fd is not None
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert list(follow([LogFile(tmp_path / "a.log", 0)], interrupts, fd)) == []
        assert interrupts.take() is signal.SIGINT
        assert interrupts.take() is None
    assert child.poll() is None
