"""What is asked of a deployment that is up: ps, chat, logs, a second up. One deployment for all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnictl.client import Client
from runtime.errors import InvalidRequest, ModelNotFound
from tests.cli.tool import COMMAND, RECIPE, Tool, run_printed_request, until

NAME = "omnictl_terminals_total"
ANSWER = "".join(f"word{n} " for n in range(32))


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tool]:
    tool = Tool(tmp_path_factory.mktemp("served"))
    tool.up()
    yield tool
    tool.close()


@pytest.fixture
def client(tool: Tool) -> Iterator[Client]:
    with Client(tool.store.load(RECIPE).url) as client:
        yield client


def test_ps(tool: Tool) -> None:
    (listed,) = tool.json("ps")["deployments"]
    assert httpx.get(f"{listed['url']}/ready", trust_env=False).json()["ready"] is True
    assert (listed["name"], listed["state"], listed["model"]) == (RECIPE, "ready", "omnictl/sim-chain")
    assert listed["pid"] == tool.server().pid
    assert [row["stage"] for row in listed["stages"]] == ["ear", "think", "talk", "wave"]
    assert all(row["state"] == "ready" and row["pid"] and row["resident_bytes"] for row in listed["stages"])
    assert listed["tasks"]["chat"]["audio"]["ready"] is True
    table = tool.run("ps").stdout
    assert RECIPE in table
    assert "think" in table


def test_the_printed_request_can_be_copied(tool: Tool) -> None:
    answer = run_printed_request(tool.run("up", RECIPE).stdout)
    assert answer["choices"][0]["message"]["content"] == ANSWER


def test_the_same_again_is_reported_and_anything_else_is_refused(tool: Tool) -> None:
    first = tool.json("up", RECIPE)
    assert first["state"] == "ready"
    assert first["model_names"][0] == RECIPE
    assert set(first["endpoints"]) == {"chat", "speech", "transcription"}
    assert first["pid"] == tool.server().pid

    other_plan = tool.run("up", RECIPE, "--set", "stages.think.slots=7", code=3)
    assert "plan.stages[think].slots: 1024 -> 7" in other_plan.stderr
    assert "omnictl down sim-chain" in other_plan.stderr
    other_port = tool.run("up", RECIPE, "--port", "18999", code=3)
    assert f"port: {first['port']} -> 18999" in other_port.stderr
    other_key = tool.run("up", RECIPE, code=3, environment={"OMNICTL_API_KEY": "k"})
    assert "API keys" in other_key.stderr
    own_port = tool.run("up", RECIPE, "--name", "second", "--port", str(first["port"]), code=6)
    assert "omnictl down sim-chain" in own_port.stderr
    assert tool.server().pid == first["pid"]


def test_chat_streams_text_and_tells_times(tool: Tool) -> None:
    asked = tool.run("chat", "hello")
    assert asked.stdout == ANSWER + "\n"
    assert "first text" in asked.stderr
    assert "first audio" not in asked.stderr
    assert tool.run("chat", stdin="from a pipe").stdout == ANSWER + "\n"


def test_chat_shows_text_before_the_answer_is_complete(tool: Tool) -> None:
    started = tool.start("chat", "hello")
    until(lambda: "word1" in started.stdout, "no text", started.process)
    assert "word31" not in started.stdout
    started.ends(0)


def test_chat_by_voice_in_both_directions(tool: Tool, tmp_path: Path) -> None:
    spoken, answer = tmp_path / "spoken.wav", tmp_path / "answer.wav"
    first = tool.run("chat", "hello", "--audio-out", str(spoken))
    assert "first audio" in first.stderr
    document = tool.json("chat", "--voice-in", str(spoken), "--audio-out", str(answer))
    assert document["text"].startswith(ANSWER)  # and what the voice adds to the text
    assert 0 < document["first_text_s"] < document["total_s"]
    assert 0 < document["first_audio_s"] < document["total_s"]
    assert document["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == 33
    with wave.open(str(answer)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        assert file.getnframes() / 24000 == pytest.approx(document["audio_s"])
        assert document["audio_s"] > 5


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((" ",), "empty"),
        (("x", "--voice-in", "/nonexistent.wav"), "/nonexistent.wav"),
        (("x", "--voice-in", __file__), "format"),
        (("x", "--image", "/nonexistent.png"), "/nonexistent.png"),
        (("x", "--image", __file__), "sim-chain takes no image but text, audio"),
        (("x", "--video", __file__), "sim-chain takes no video but text, audio"),
        (("x", "--audio-out", "/nonexistent/a.wav"), "/nonexistent"),
        (("x", "--audio-out", "a.ogg"), "--audio-out a.ogg: ends in '.ogg'; expected .wav"),
        (("x", "--audio-out", "a"), "--audio-out a: ends in ''; expected .wav"),
    ],
)
def test_chat_refuses(tool: Tool, arguments: tuple[str, ...], text: str) -> None:
    assert text in tool.run("chat", *arguments, code=2).stderr


def test_a_dialogue_at_a_terminal(tool: Tool) -> None:
    terminal, end = os.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat"], stdin=end, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=tool.environment
    )
    os.close(end)
    os.write(terminal, b"one\n\ntwo\n\x04")
    out, err = process.communicate(timeout=100)
    os.close(terminal)
    assert process.returncode == 0, err
    assert out.decode() == (ANSWER + "\n") * 2


def test_logs_by_stage(tool: Tool) -> None:
    voice = tool.run("logs", "talk").stdout
    assert "talk.0 is ready" in voice
    assert "wave.0 is ready" in voice
    assert "think.0" not in voice
    all_files = tool.json("logs")["lines"]
    assert {row["file"] for row in all_files} == {"server", "text", "voice"}
    last = tool.run("logs", "server", "--lines", "1").stdout
    assert last.count("\n") == 1
    assert "one of: server" in tool.run("logs", "nope", code=3).stderr
    assert tool.run("logs", "-f", "--json", code=2)


def test_speech_and_transcription_through_the_client(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "speech.wav"
    file.write_bytes(b"".join(client.speech(RECIPE, "hello")))
    assert file.read_bytes().startswith(b"RIFF")
    assert client.transcribe(RECIPE, file) == "word0"


def test_the_servers_errors_keep_their_class(client: Client, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nobody"):
        list(client.chat("nobody", [{"role": "user", "content": "hello"}]))
    with pytest.raises(InvalidRequest, match="input"):
        list(client.speech(RECIPE, ""))
    with pytest.raises(InvalidRequest, match="nothing.wav"):
        client.transcribe(RECIPE, tmp_path / "nothing.wav")


def test_an_answer_that_is_not_read_to_its_end_is_aborted(tool: Tool, client: Client) -> None:
    deltas = client.chat(RECIPE, [{"role": "user", "content": "hello"}])
    assert next(delta.text for delta in deltas if delta.text) == "word0 "
    deltas.close()  # type: ignore[attr-defined]

    def num_aborted() -> float:
        lines = httpx.get(f"{client.url}/metrics", trust_env=False).text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith(NAME) and 'kind="aborted"' in line]
        return sum(map(float, values))

    until(lambda: num_aborted() == 1, "no abort was counted")


def test_doctor_sees_the_deployment(tool: Tool) -> None:
    findings: list[dict[str, Any]] = tool.json("doctor", code=0)["findings"]
    (row,) = [f for f in findings if f["group"] == "deployments"]
    assert (row["name"], row["level"]) == (RECIPE, "OK")


def test_ctrl_c_during_an_answer(tool: Tool) -> None:
    started = tool.start("chat", "hello")
    started.until("word1")
    started.signal(signal.SIGINT)
    started.ends(130)
    assert "word31" not in started.stdout
