"""The client against servers that are gone, foreign, or break off."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnictl.client import Client, seen_part
from runtime.errors import ERRORS, OmniError, Overloaded, StageDied, Unauthorized, Unavailable
from tests.cli.scripted import Reply, scripted_server

QUESTION = [{"role": "user", "content": "hello"}]


def chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


def stream(*pieces: bytes, promised: int = 0) -> Reply:
    return Reply(200, b"".join(pieces), "text/event-stream", promised)


def failure(call: Callable[[Client], Any], reply: Reply) -> OmniError:
    with scripted_server(lambda path: reply) as port, Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(OmniError) as caught:
            call(client)
        return caught.value


def chat(client: Client) -> str:
    return "".join(delta.text for delta in client.chat("m", QUESTION))


def test_a_stream_is_read_to_its_end() -> None:
    reply = stream(
        b": keep-alive\n\n", chunk("a"), b'data: {"choices": [], "usage": {"n": 1}}\n\n', b"data: [DONE]\n\n"
    )
    with scripted_server(lambda path: reply) as port, Client(f"http://127.0.0.1:{port}") as client:
        deltas = list(client.chat("m", QUESTION))
    assert [delta.text for delta in deltas] == ["a", ""]
    assert deltas[-1].usage == {"n": 1}


@pytest.mark.parametrize(
    ("kind", "name", "content_type"),
    [("image", "a.PNG", "image/png"), ("video", "b.mp4", "video/mp4"), ("image", "c", "")],
)
def test_a_file_that_is_seen_goes_as_data(tmp_path: Path, kind: str, name: str, content_type: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"xyz")
    expected = {"url": f"data:{content_type};base64,eHl6"}
    assert seen_part(kind, file) == {"type": f"{kind}_url", f"{kind}_url": expected}


def test_an_error_in_the_middle_keeps_its_class() -> None:
    error = {"error": {"message": "stage think died", "code": "stage_died"}}
    died = failure(chat, stream(chunk("a"), b"data: " + json.dumps(error).encode() + b"\n\n"))
    assert isinstance(died, StageDied)
    assert str(died) == "stage think died"


@pytest.mark.parametrize("promised", [0, 10])
def test_a_stream_without_its_end_mark_is_an_error(promised: int) -> None:
    assert isinstance(failure(chat, stream(chunk("a"), promised=promised)), Unavailable)


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_error_code_of_ours_is_understood(name: str) -> None:
    code = ERRORS[name].code
    received = failure(chat, Reply.of({"error": {"message": "m", "code": code}}, 400))
    assert received.code == code
    assert received.exit_code == ERRORS[name].exit_code


def test_a_refused_key_names_the_variable() -> None:
    denied = failure(chat, Reply.of({"error": {"message": "no", "code": "invalid_api_key"}}, 401))
    assert isinstance(denied, Unauthorized)
    assert "OMNICTL_API_KEY" in str(denied.hint)


@pytest.mark.parametrize("call", [Client.ready, Client.status, chat])
@pytest.mark.parametrize(
    "reply",
    [Reply(404, b"<html>not here</html>", "text/html"), Reply(500, b"", "text/plain"), Reply(502, b"\xff\xfe")],
)
def test_a_foreign_server_is_not_taken_for_ours(call: Callable[[Client], Any], reply: Reply) -> None:
    assert isinstance(failure(call, reply), Unavailable)


@pytest.mark.parametrize("call", [Client.ready, Client.status])
def test_a_foreign_json_answer_is_not_taken_for_ours(call: Callable[[Client], Any]) -> None:
    assert "not an omnictl server" in str(failure(call, Reply.of({"status": "ok"})))


@pytest.mark.parametrize("call", [Client.ready, Client.status, chat])
def test_nobody_there(call: Callable[[Client], Any]) -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(Unavailable, match="nothing answers"):
        call(client)


def test_a_piece_that_is_not_json_is_an_error() -> None:
    assert isinstance(failure(chat, stream(chunk("a"), b"data: {oops\n\n")), Unavailable)


def test_overload_is_told_as_such() -> None:
    assert isinstance(failure(chat, Reply.of({"error": {"message": "full", "code": "overloaded"}}, 429)), Overloaded)
