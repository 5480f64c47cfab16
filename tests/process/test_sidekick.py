"""What the model in the box must do, on its real weights, through the command, the endpoints and the official SDK."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jiwer
import openai
import psutil
import pytest

from tests.deploy import hold_restart
from tests.process.sidekick import Answer, Sidekick, ask, running, spoken, wav, words

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]

COUNTRIES = ("France", "Italy", "Spain", "Germany", "England", "Japan", "Russia", "Egypt", "Canada", "Greece")
STORY = "Write a long story about a fox and an owl who travel around the world."
LONG = "Tell me in five sentences how rain is made."
SENTENCES = (
    "The capital of France is Paris.",
    "Water boils at one hundred degrees.",
    "She walked slowly along the river bank.",
    "The train to London leaves at seven.",
    "Please open the window before you go.",
    "My brother plays the piano every evening.",
    "A red apple fell from the old tree.",
    "We are going to the market tomorrow morning.",
    "The children were laughing in the garden.",
    "He wrote a long letter to his friend.",
)


@pytest.fixture(scope="module")
def sidekick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidekick]:
    with running(tmp_path_factory.mktemp("sidekick")) as running_sidekick:
        yield running_sidekick


def speech(sidekick: Sidekick, text: str) -> bytes:
    return sidekick.client.audio.speech.create(
        model="sidekick", voice="heart", input=text, response_format="wav"
    ).read()


def hear(sidekick: Sidekick, data: bytes) -> str:
    file = io.BytesIO(data)
    file.name = "clip.wav"
    return sidekick.client.audio.transcriptions.create(model="sidekick", file=file).text


def test_text_only_requests_leave_the_speech_stages_alone(sidekick: Sidekick) -> None:
    before = {s: sidekick.metric("omnictl_stage_requests_total", stage=s) for s in ("ear", "talker", "code2wav")}
    for _ in range(3):
        answer = ask(sidekick.client, "What is the capital of France?", ["text"])
        assert "Paris" in answer.text
        assert answer.pcm == b""
    time.sleep(2.5)  # two beats: what the stages counted has arrived
    assert before == {s: sidekick.metric("omnictl_stage_requests_total", stage=s) for s in before}


def test_audio_comes_while_the_text_is_made(sidekick: Sidekick) -> None:
    """The thinker's process stands still after its first sentence until something of it was heard."""
    stages = sidekick.stages()
    thinker = stages["thinker"]["pid"]
    assert thinker not in (stages["talker"]["pid"], stages["code2wav"]["pid"])
    text, kinds = "", []
    with streamed(sidekick, STORY) as stream:
        for chunk in stream:
            delta = chunk.choices[0].delta
            if delta.content:
                text += delta.content
                kinds.append("text")
                if not text.endswith(". ") and ". " in text and "audio" not in kinds:
                    os.kill(thinker, signal.SIGSTOP)
            if delta.audio and delta.audio.data:
                kinds.append("audio")
                os.kill(thinker, signal.SIGCONT)
            if "audio" in kinds and kinds[-1] == "text":
                break
    assert kinds[-1] == "text", kinds


@contextlib.contextmanager
def streamed(sidekick: Sidekick, content: str) -> Iterator[Any]:
    """The chunks of a spoken answer, which may be left before its end."""
    stream = sidekick.client.chat.completions.create(
        model="sidekick",
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": "heart", "format": "pcm16"},
        stream=True,
    )
    with stream:
        yield stream


def test_a_spoken_question_gets_a_spoken_answer(sidekick: Sidekick) -> None:
    question = speech(sidekick, "What is the capital of France?")
    answer = ask(sidekick.client, [spoken(question)], ["text", "audio"])
    assert "Paris" in answer.text
    assert "paris" in words(hear(sidekick, wav(answer.samples)))


def test_what_is_said_is_heard(sidekick: Sidekick) -> None:
    heard = [words(hear(sidekick, speech(sidekick, sentence))) for sentence in SENTENCES]
    assert jiwer.wer([words(s) for s in SENTENCES], heard) <= 0.1, heard


def test_what_is_answered_is_heard(sidekick: Sidekick) -> None:
    """The audio of ten answers, transcribed by our own ear, against their texts."""
    said, heard = [], []
    for country in COUNTRIES:
        answer = ask(sidekick.client, f"What is the capital of {country}?", ["text", "audio"], max_tokens=40)
        said.append(words(answer.text))
        heard.append(words(hear(sidekick, wav(answer.samples))))
    assert all(said)
    assert jiwer.wer(said, heard) <= 0.1, list(zip(said, heard, strict=True))


def mixed(sidekick: Sidekick) -> list[Any]:
    """Eight requests of every kind, each with a key under which its result is compared."""
    question = speech(sidekick, "What is the capital of France?")
    client = sidekick.client
    options = {"max_tokens": 40, "seed": 5}
    return [
        lambda: ask(client, "What is the capital of France?", ["text"], **options),
        lambda: ask(client, "What is the capital of Italy?", ["text", "audio"], **options),
        lambda: ask(client, "Name three colours.", ["text", "audio"], **options),
        lambda: ask(client, [spoken(question)], ["text"], **options),
        lambda: ask(client, [spoken(question)], ["text", "audio"], **options),
        lambda: speech_seeded(sidekick, SENTENCES[0]),
        lambda: speech_seeded(sidekick, SENTENCES[7]),
        lambda: hear(sidekick, question),
    ]


def speech_seeded(sidekick: Sidekick, text: str) -> bytes:
    return sidekick.client.audio.speech.create(
        model="sidekick", voice="heart", input=text, response_format="pcm", extra_body={"seed": 5}
    ).read()


def content(result: Any) -> Any:
    return (result.text, result.pcm) if isinstance(result, Answer) else result


def test_eight_at_once_give_what_each_gives_alone(sidekick: Sidekick) -> None:
    requests = mixed(sidekick)
    alone = [content(request()) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        together = [content(f.result(timeout=300)) for f in [pool.submit(r) for r in requests]]
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one == other, f"request {number}"
    assert all(alone)


def test_streamed_and_whole_answers_agree(sidekick: Sidekick) -> None:
    options: dict[str, Any] = {"max_tokens": 30, "seed": 5}
    streamed = ask(sidekick.client, "Name three colours.", ["text", "audio"], **options)
    whole = sidekick.client.chat.completions.create(
        model="sidekick",
        messages=[{"role": "user", "content": "Name three colours."}],
        modalities=["text", "audio"],
        audio={"voice": "heart", "format": "pcm16"},
        **options,
    )
    message = whole.choices[0].message
    assert message.content == streamed.text
    assert message.audio is not None
    assert message.audio.transcript == streamed.text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_kill_9_of_a_stage_in_the_middle(sidekick: Sidekick) -> None:
    """One error, text goes on, readiness says so, the stage comes back, the next request works."""
    release = hold_restart(sidekick.folder)
    with streamed(sidekick, STORY) as stream:
        next(stream)
        os.kill(sidekick.stages()["talker"]["pid"], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
    assert httpx.get(f"{sidekick.url}/ready", timeout=60).status_code == 503
    with pytest.raises(openai.APIStatusError) as refused:
        speech(sidekick, "Hello.")
    assert refused.value.status_code == 503
    assert "Paris" in ask(sidekick.client, "What is the capital of France?", ["text"]).text
    release()
    sidekick.until_ready()
    assert ask(sidekick.client, "What is the capital of France?", ["text", "audio"]).pcm


def test_kill_9_of_the_thinker_and_the_ear(sidekick: Sidekick) -> None:
    for stage, content in (("thinker", LONG), ("ear", [spoken(speech(sidekick, SENTENCES[0]))])):
        outcome: list[Exception] = []
        os.kill(sidekick.stages()[stage]["pid"], signal.SIGSTOP)  # so that it cannot be through before it is killed
        asking = threading.Thread(target=lambda c=content, o=outcome: o.extend(failure(sidekick, c)))
        asking.start()
        deadline_s = time.monotonic() + 100
        while not sidekick.stages()[stage]["bound"]:
            assert time.monotonic() < deadline_s
        os.kill(sidekick.stages()[stage]["pid"], signal.SIGKILL)
        asking.join(100)
        assert len(outcome) == 1
        assert speech(sidekick, "Hello."), "the voice needs neither of them"
        sidekick.until_ready()
    assert "Paris" in ask(sidekick.client, "What is the capital of France?", ["text"]).text


def failure(sidekick: Sidekick, content: Any) -> list[Exception]:
    try:
        ask(sidekick.client, content, ["text"])
    except openai.APIError as exc:
        return [exc]
    return []


def test_nothing_is_left_after_down(tmp_path: Path) -> None:
    with running(tmp_path) as sidekick:
        port = int(sidekick.url.rsplit(":", 1)[1])
        pids = {row["pid"] for row in sidekick.stages().values()}
        processes = [psutil.Process(pid) for pid in pids]
        server = processes[0].parent()
        assert server is not None
        processes.append(server)
        # killed the hard way, then started anew, then taken down
        server.kill()
        psutil.wait_procs(processes, timeout=100)
        sidekick.omnictl("up", "sidekick", "-d", "--port", str(port), timeout_s=300)
        pids |= {server.pid, *(row["pid"] for row in sidekick.stages().values())}
        sidekick.down()
        assert json.loads(sidekick.omnictl("ps", "--json")) == {"deployments": []}
        assert not [f for f in Path(tempfile.gettempdir()).glob("omnictl-*") if int(f.name.split("-")[1]) in pids]
        assert not [p for p in Path("/dev/shm").glob("omnictl-*") if int(p.name.split("-")[1]) in pids]
        assert not [p for p in pids if psutil.pid_exists(p)]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{sidekick.url}/health", timeout=2)
