"""Ends of deployments: asked for, interrupted, killed, failed. Never may anything be left."""

from __future__ import annotations

import json
import os
import signal

import pytest

from omnictl.ports import is_bound
from omnictl.processes import identify
from tests.cli.tool import RECIPE, Tool

SLOW_LOAD = ("--set", "stages.talk.engine_settings.load_s=30")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_stops_what_was_started(tool: Tool, number: signal.Signals) -> None:
    started = tool.start("up", RECIPE, *SLOW_LOAD)
    started.until("talk: starting: loading")
    port = tool.store.load(RECIPE).port
    started.signal(number)
    started.ends(128 + number)
    assert tool.left_over() == []
    assert tool.store.names() == []
    assert not is_bound("127.0.0.1", port)


SLOW_WORDS = ("--set", "stages.think.engine_settings.interval_s=0.1")
"""32 words at 100 ms: a request takes 3 s."""


def test_attached_until_ctrl_c_which_lets_a_running_request_finish(tool: Tool) -> None:
    started = tool.start("up", RECIPE, *SLOW_WORDS)
    started.until("Ctrl-C stops it")
    assert "curl http://127.0.0.1:" in started.stdout
    port = tool.store.load(RECIPE).port
    following, chatting = tool.start("logs", "-f"), tool.start("chat", "hello")
    following.until("ready after")
    chatting.until("word3")
    started.signal(signal.SIGINT)
    chatting.ends(0)
    assert "word31" in chatting.stdout
    started.ends(0)
    assert "is stopped" in started.stderr
    following.ends(0)
    assert "the server of sim-chain has ended" in following.stderr
    assert tool.store.names() == []
    assert tool.left_over() == []
    assert not is_bound("127.0.0.1", port)


def test_ctrl_c_twice_does_not_let_it_finish(tool: Tool) -> None:
    started = tool.start("up", RECIPE, *SLOW_WORDS)
    started.until("Ctrl-C stops it")
    chatting = tool.start("chat", "hello")
    chatting.until("word3")
    started.signal(signal.SIGINT)
    started.until("once more ends it at once")
    started.signal(signal.SIGINT)
    started.ends(130)
    chatting.ends(11)
    assert "word31" not in chatting.stdout
    assert tool.left_over() == []


def test_a_killed_server_is_told_while_attached(tool: Tool) -> None:
    started = tool.start("up", RECIPE)
    started.until("Ctrl-C stops it")
    workers = [row["pid"] for row in tool.json("ps")["deployments"][0]["stages"]]
    os.kill(tool.server().pid, signal.SIGKILL)
    started.ends(13)
    assert "killed by SIGKILL" in started.stderr
    assert "ready after" in started.stderr  # the end of its log
    assert tool.left_over() == []
    assert not any(identify(pid) for pid in workers)
    (listed,) = tool.json("ps")["deployments"]
    assert listed["state"] == "failed"
    assert "killed by SIGKILL" in listed["reason"]


def test_a_killed_detached_server_is_reported_and_replaced(tool: Tool) -> None:
    first = tool.up()
    tool.run("chat", "hello")
    os.kill(first["pid"], signal.SIGKILL)
    assert tool.server().wait(10)
    (listed,) = tool.json("ps")["deployments"]
    assert listed["state"] == "dead"
    assert tool.run("chat", "hello", code=8).stderr.startswith("error: sim-chain does not run (dead)")
    assert "ready after" in tool.run("logs", "server").stdout
    replaced = tool.run("up", RECIPE, "-d", "--json")
    assert "died without `omnictl down`" in replaced.stderr
    assert "ready after" in replaced.stderr
    second = json.loads(replaced.stdout)
    assert second["pid"] != first["pid"]

    os.kill(second["pid"], signal.SIGKILL)
    assert tool.server().wait(10)
    stopped = tool.json("down")["stopped"][0]
    assert stopped["was_alive"] is False
    assert stopped["removed_shared_memory"]
    assert tool.left_over() == []
    assert tool.json("ps") == {"deployments": []}


def test_a_failing_start_shows_why_and_cleans_up(tool: Tool) -> None:
    faults = "stages.wave.engine_settings.faults=[{action: exit}]"
    failed = tool.run("up", RECIPE, "--set", faults, "--set", "restarts.max_restarts=0", code=9)
    assert "did not start" in failed.stderr
    assert "exited with code 9" in failed.stderr
    assert "voice.log:" in failed.stderr
    assert "hint:" in failed.stderr
    assert tool.left_over() == []
    (listed,) = tool.json("ps")["deployments"]
    assert listed["state"] == "failed"
    assert "exited with code 9" in listed["reason"]
    assert tool.run("logs", "wave").stdout
    tool.up()  # and the name is free


def test_a_start_without_progress_is_given_up(tool: Tool) -> None:
    stuck = "stages.think.engine_settings.faults=[{action: slow, seconds: 40}]"
    failed = tool.run("up", RECIPE, "--timeout", "5", "--set", stuck, code=9)
    assert "no progress for 5 s" in failed.stderr
    assert tool.left_over() == []


def test_down_during_the_start_of_another_up(tool: Tool) -> None:
    started = tool.start("up", RECIPE, *SLOW_LOAD)
    started.until("talk: starting: loading")
    tool.run("down")
    started.ends(9)
    assert "stopped by another command" in started.stderr
    assert tool.left_over() == []
