"""`up` on real processes: what it refuses, which port it takes, what it does with what stands there already."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omnictl import settings
from omnictl.ports import is_bound
from tests.cli.conftest import Listen
from tests.cli.tool import RECIPE, Tool, run_printed_request, until


def test_two_deployments_side_by_side(tool: Tool) -> None:
    first, second = tool.up(), tool.up("--name", "second")
    assert first["port"] != second["port"]
    assert tool.run("down", code=3).stderr.count("sim-chain") == 1  # two of them: which one?
    tool.run("down", RECIPE)
    assert [d["name"] for d in tool.json("ps")["deployments"]] == ["second"]
    assert tool.run("chat", "hello").stdout.startswith("word0")
    assert len(tool.json("down", "--all")["stopped"]) == 1


def test_a_taken_explicit_port_is_refused_before_anything_starts(tool: Tool, listener: Listen) -> None:
    refused = tool.run("up", RECIPE, "--port", str(listener()), code=6)
    assert f"process {os.getpid()}" in refused.stderr
    assert "starting" not in refused.stderr
    assert tool.store.names() == []


@pytest.fixture
def late_listener(tool: Tool) -> Iterator[socket.socket]:
    """Holds the first port without listening: free to a probe, and taken as soon as it listens."""
    with socket.socket() as late:
        late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = next(p for p in range(settings.FIRST_PORT, 9000) if not is_bound("127.0.0.1", p))
        late.bind(("127.0.0.1", port))
        yield late


def _listen_when_recorded(tool: Tool, late: socket.socket) -> threading.Thread:
    record = tool.store.folder(RECIPE) / "deployment.json"

    def wait() -> None:
        until(record.exists, "no record")
        late.listen()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_port_that_is_taken_between_check_and_bind_is_left_for_the_next(
    tool: Tool, late_listener: socket.socket
) -> None:
    thread = _listen_when_recorded(tool, late_listener)
    started = tool.run("up", RECIPE, "-d", "--json")
    thread.join()
    lost = late_listener.getsockname()[1]
    assert f"port {lost} was taken in the meantime" in started.stderr
    assert json.loads(started.stdout)["port"] > lost


def test_an_explicit_port_that_is_lost_is_an_error(tool: Tool, late_listener: socket.socket) -> None:
    thread = _listen_when_recorded(tool, late_listener)
    port = late_listener.getsockname()[1]
    refused = tool.run("up", RECIPE, "-d", "--port", str(port), code=6)
    thread.join()
    assert f"process {os.getpid()}" in refused.stderr
    assert tool.left_over() == []


def test_two_ups_at_once_make_one_deployment(tool: Tool) -> None:
    both = [tool.start("up", RECIPE, "-d") for _ in range(2)]
    for each in both:
        each.ends(0)
    servers = {d["pid"] for d in tool.json("ps")["deployments"]}
    assert len(servers) == 1
    assert sum("starting sim-chain at" in each.stderr for each in both) == 1


def test_no_wait_then_a_second_up_waits_and_can_be_interrupted(tool: Tool) -> None:
    slow = ("--set", "stages.talk.engine_settings.load_s=6")
    started = tool.json("up", RECIPE, "--no-wait", *slow)
    assert started["state"] == "starting"
    assert tool.json("ps")["deployments"][0]["state"] == "starting"
    interrupted = tool.start("up", RECIPE, *slow)
    interrupted.until("waiting for sim-chain")
    interrupted.signal(signal.SIGINT)
    interrupted.ends(130)
    assert tool.server().pid == started["pid"]
    patient = tool.run("up", RECIPE, *slow)
    assert "already up" in patient.stderr
    assert tool.server().pid == started["pid"]


def test_damaged_records(tool: Tool) -> None:
    """Of nothing: replaced. Of a living deployment: refused, and ended by `down`."""
    tool.store.prepare(RECIPE, "{}")
    (tool.store.folder(RECIPE) / "deployment.json").write_bytes(b"\0")
    started = tool.run("up", RECIPE, "-d", "--json")
    assert "damaged" in started.stderr
    served = json.loads(started.stdout)

    (tool.store.folder(RECIPE) / "plan.json").write_text("{")
    assert "its file is damaged" in tool.run("up", RECIPE, code=3).stderr

    (tool.store.folder(RECIPE) / "deployment.json").write_text("{ damaged")
    (listed,) = tool.json("ps")["deployments"]
    assert listed["state"] == "damaged"
    assert "omnictl down sim-chain" in listed["reason"]
    assert "omnictl down sim-chain" in tool.run("up", RECIPE, code=5).stderr
    stopped = tool.json("down", RECIPE)["stopped"][0]
    assert served["pid"] in stopped["killed"]
    assert tool.left_over() == []
    assert not is_bound("127.0.0.1", served["port"])


def test_a_public_bind_needs_a_key_and_the_key_stays_secret(tool: Tool, tmp_path: Path) -> None:
    assert "no API key" in tool.run("up", RECIPE, "--host", "0.0.0.0", code=3).stderr
    assert tool.store.names() == []
    key_file = tmp_path / "keys"
    key_file.write_text("first-secret\nsecond-secret\n")
    # Proxies that lead nowhere: nothing on this machine may be asked through them.
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://192.0.2.1:9")
    served = tool.up("--host", "0.0.0.0", "--api-key-file", str(key_file), environment=proxies)
    again = tool.run("up", RECIPE, "--host", "0.0.0.0", "--api-key-file", str(key_file))
    assert served["url"].startswith("http://127.0.0.1:")
    assert httpx.get(f"{served['url']}/v1/models", trust_env=False).status_code == 401
    headers = {"Authorization": "Bearer second-secret"}
    assert httpx.get(f"{served['url']}/v1/models", headers=headers, trust_env=False).status_code == 200
    assert tool.run("chat", "hello", environment=proxies).stdout.startswith("word0")  # the file is remembered
    assert tool.json("ps")["deployments"][0]["state"] == "ready"
    assert run_printed_request(again.stdout)["choices"][0]["message"]["content"].startswith("word0")
    denied = tool.run("chat", "hello", code=2, environment={"OMNICTL_API_KEY": "wrong"})
    assert "OMNICTL_API_KEY" in denied.stderr
    arguments = Path(f"/proc/{served['pid']}/cmdline").read_bytes()
    record = (tool.store.folder(RECIPE) / "deployment.json").read_text()
    assert b"secret" not in arguments
    assert "secret" not in record


def test_dry_run_shows_plan_and_command_and_starts_nothing(tool: Tool) -> None:
    shown = tool.json("up", RECIPE, "--dry-run", "--set", "stages.think.slots=3")
    assert shown["command"][1:4] == ["-P", "-m", "runtime.serve"]
    assert str(shown["port"]) in shown["command"]
    assert next(s for s in shown["plan"]["stages"] if s["name"] == "think")["slots"] == 3
    assert "runtime.serve" in tool.run("up", RECIPE, "--dry-run").stdout
    assert tool.store.names() == []


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("up", "sim-chian"), 2, "sim-chain"),
        (("up", RECIPE, "--set", "stages.think.slotz=3"), 3, "slots"),
        (("up", RECIPE, "--name", "No Good"), 3, "--name"),
        (("up", RECIPE, "--port", "0"), 2, "--port"),
        (("up", RECIPE, "--host", "192.0.2.7"), 3, "192.0.2.7"),
        (("up", RECIPE, "--api-key-file", "/nonexistent"), 3, "/nonexistent"),
        (("up", RECIPE, "--nonsense"), 2, "--nonsense"),
        (("down", "nothing"), 8, "nothing"),
        (("down", "x", "--all"), 3, "--all"),
        (("down",), 8, "nothing is deployed"),
        (("logs",), 8, "nothing is deployed"),
        (("chat", "hello"), 8, "nothing is deployed"),
        (("ps", "--name"), 2, "--name"),
    ],
)
def test_refusals_have_their_exit_codes(tool: Tool, arguments: tuple[str, ...], code: int, text: str) -> None:
    assert text in tool.run(*arguments, code=code).stderr
    assert tool.store.names() == []


def test_down_all_of_nothing_is_fine(tool: Tool) -> None:
    assert tool.json("down", "--all") == {"stopped": []}
