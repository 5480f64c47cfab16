"""Qwen3-Omni over HTTP as its users have it: three worker processes, the official SDK in strict mode. Sound comes while
the model still thinks, and a seed gives the same sound in any company.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionChunk
from PIL import Image

from runtime.plan import EdgeMode, Plan
from runtime.warmup import tone_wav
from tests.deploy import until
from tests.golden.omni_plan import WEIGHTS, omni_plan
from tests.server.serving import Served, served

MODEL = "tiny-omni"
START_TIMEOUT_S = 400.0
NUM_TEXT_TOKENS = 20
FRAME_SAMPLES = 1920
USAGE = {"include_usage": True}
STRANGERS = (
    "What is two plus two?",
    "你好, 今天天气怎么样?",
    "Hello",
    "Tell me a story. " * 9,
    "Sing!",
    "And now?",
    "Why?",
)
MAX_ATTEMPTS = 5
NUM_WORDS_FIRST = 8
"""Enough for the first chunk of sound: a frame takes a word."""
SPOKEN: dict[str, Any] = {"modalities": ["text", "audio"], "audio": {"voice": "Ethan", "format": "pcm16"}}

pytestmark = pytest.mark.timeout(600)  # two processes import vllm


@pytest.fixture(scope="module")
def server(omni_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("omni-http")
    (folder / "weights").mkdir()
    (folder / "weights" / WEIGHTS).symlink_to(omni_checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNICTL_WEIGHTS_DIR", str(folder / "weights"))
        patch.setenv("OMP_NUM_THREADS", "1")
        with served(_plan(), folder, wait=False) as server:
            deployment = server.deployment
            ready = until(lambda: deployment.phase in ("ready", "failed"), START_TIMEOUT_S, deployment)
            asyncio.run_coroutine_threadsafe(ready, server.loop).result(START_TIMEOUT_S + 10)
            assert deployment.phase == "ready", deployment.failure
            yield server


def _plan() -> Plan:
    """The talker samples, unless a request says otherwise. A process that is stopped is not taken for a dead one."""
    plan = omni_plan(EdgeMode.CHUNKED, (("thinker",), ("talker",), ("code2wav",)), temperature=0.9)
    return plan.model_copy(update={"limits": plan.limits.model_copy(update={"beat_timeout_s": START_TIMEOUT_S})})


@pytest.fixture
def openai(server: Served) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


def ask(openai: OpenAI, content: Any = "Hello", **fields: Any) -> list[ChatCompletionChunk]:
    """A streamed answer."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TEXT_TOKENS, **fields}
    return list(openai.chat.completions.create(model=MODEL, stream=True, **body))


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def audio_of(chunks: list[ChatCompletionChunk]) -> bytes:
    audio = [choice.delta.audio for chunk in chunks for choice in chunk.choices if choice.delta.audio]
    return b"".join(base64.b64decode(piece.data) for piece in audio if piece.data)


def test_sound_comes_while_the_thinker_stands_still(server: Served, openai: OpenAI) -> None:
    """The thinker's process is stopped after its first words: the sound that comes before it goes on cannot have waited
    for its end, and what it says afterwards shows that it had not ended. A thinker too quick to be stopped proves
    nothing: then again.
    """
    messages: Any = [{"role": "user", "content": "What is two plus two?"}]
    for _ in range(MAX_ATTEMPTS):
        num_said = num_said_after = num_heard = 0
        with contextlib.ExitStack() as stack:
            for chunk in openai.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=400, stream=True, **SPOKEN
            ):
                delta = chunk.choices[0].delta
                if delta.content and num_heard:
                    num_said_after += 1
                elif delta.content:
                    num_said += 1
                    if num_said == NUM_WORDS_FIRST:
                        stack.enter_context(standing_still(server, "thinker"))
                if delta.audio and delta.audio.data:
                    num_heard += 1
                    stack.close()
        assert num_heard
        if num_said_after > 1:  # one word could have been on its way
            return
    raise AssertionError(f"in {MAX_ATTEMPTS} attempts nothing was said after the first sound")


@contextlib.contextmanager
def standing_still(server: Served, stage: str) -> Iterator[None]:
    (pid,) = {row["pid"] for row in server.deployment.status()["stages"] if row["stage"] == stage}
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_seed_is_the_same_sound_alone_and_among_strangers(openai: OpenAI) -> None:
    alone = ask(openai, seed=7, **SPOKEN)
    with ThreadPoolExecutor(len(STRANGERS) + 1) as pool:
        strangers = [pool.submit(ask, openai, text, seed=n, **SPOKEN) for n, text in enumerate(STRANGERS, 100)]
        again = pool.submit(ask, openai, seed=7, **SPOKEN).result()
        assert all(audio_of(stranger.result()) for stranger in strangers)
    assert text_of(again) == text_of(alone)
    assert audio_of(again) == audio_of(alone)
    other = ask(openai, seed=8, **SPOKEN)
    assert text_of(other) == text_of(alone), "the thinker is greedy"
    assert audio_of(other) != audio_of(alone)


def test_a_stream_adds_up_to_the_whole_answer(openai: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    ask_whole: dict[str, Any] = {"messages": messages, "max_tokens": NUM_TEXT_TOKENS, "seed": 7, **SPOKEN}
    whole = openai.chat.completions.create(model=MODEL, **ask_whole)
    chunks = ask(openai, seed=7, stream_options=USAGE, **SPOKEN)
    message = whole.choices[0].message
    assert message.audio is not None
    assert text_of(chunks) == message.content == message.audio.transcript
    assert audio_of(chunks) == base64.b64decode(message.audio.data)
    assert sum(bool(c.choices and c.choices[0].delta.audio) for c in chunks) > 3, "it came in pieces"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage == whole.usage
    assert usage.completion_tokens_details is not None
    num_frames = usage.completion_tokens_details.audio_tokens or 0
    num_samples = len(audio_of(chunks)) // 2
    assert FRAME_SAMPLES * (num_frames - 1) < num_samples <= FRAME_SAMPLES * num_frames


def talking(openai: OpenAI, request_seed: int, **talker: Any) -> bytes:
    """The sound of an answer whose talker is told how to sample."""
    return audio_of(ask(openai, seed=request_seed, extra_body={"stage_params": {"talker": talker}}, **SPOKEN))


def test_the_talker_takes_its_own_sampling(openai: OpenAI) -> None:
    plain = audio_of(ask(openai, seed=7, **SPOKEN))
    assert talking(openai, 7) == plain
    assert talking(openai, 1, seed=7) == plain, "its own seed, in the first code and in the others"
    greedy = talking(openai, 1, temperature=0)
    assert greedy == talking(openai, 2, temperature=0) != plain
    assert talking(openai, 1, temperature=0, repetition_penalty=2) != greedy, "which says a code more than once"
    wild = talking(openai, 7, temperature=2)
    for given in ({"top_k": 1}, {"top_p": 0.05}, {"min_p": 0.9}, {"seed": 8}):
        assert talking(openai, 7, temperature=2, **given) != wild, given
    assert talking(openai, 7, repetition_penalty=1.05) == plain, "which is the deployment's value"
    assert len(talking(openai, 7, max_tokens=5)) // 2 in range(4 * FRAME_SAMPLES, 5 * FRAME_SAMPLES + 1)


def test_the_thinker_takes_its_own_over_the_common_ones(openai: OpenAI) -> None:
    chunks = ask(openai, extra_body={"stage_params": {"thinker": {"max_tokens": 3}}}, stream_options=USAGE)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"stage_params": {"code2wav": {"seed": 1}}, **SPOKEN}, "does not sample; stages that do: thinker, talker"),
        ({"stage_params": {"talker": {"seed": 1}}}, "nothing to do for this request"),
        ({"stage_params": {"talker": {"temperature": 0.001}}, **SPOKEN}, "stage_params: temperature: 0.001; expected"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "nova", "format": "wav"}}, "voices: ethan, chelsie"),
    ],
)
def test_what_is_refused(openai: OpenAI, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(BadRequestError, match=match):
        ask(openai, extra_body=fields)


def test_voices(server: Served, openai: OpenAI) -> None:
    """F118: each voice that is listed speaks, and each in its own way."""
    with server.http() as http:
        listed = http.get("/v1/audio/voices").json()
    assert listed["default"] == "ethan"
    names = [voice["id"] for voice in listed["data"] if "alias_of" not in voice]
    spoken = {audio_of(ask(openai, seed=7, modalities=["audio"], audio={"voice": n, "format": "pcm16"})) for n in names}
    assert len(spoken) == len(names) == 3


def test_a_model_without_a_task_says_so(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="not served by tiny-omni, whose tasks are chat and not speech"):
        openai.audio.speech.create(model=MODEL, input="hi", voice="ethan")


def test_it_hears_and_sees(openai: OpenAI) -> None:
    """The same file comes to the same in either kind of part; another one, or none, to something else."""
    asked, data = {"type": "text", "text": "What is it?"}, base64.b64encode(tone_wav()).decode()
    as_data = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    heard = text_of(ask(openai, [as_data, asked]))
    assert text_of(ask(openai, [sound(), asked])) == heard
    answers = {heard, text_of(ask(openai, [asked]))}
    answers |= {text_of(ask(openai, [asked, picture(colour)])) for colour in ("red", "blue")}
    assert len(answers) == 4


def test_it_speaks_of_what_it_heard_and_saw(openai: OpenAI) -> None:
    parts = [{"type": "text", "text": "Both?"}, picture("red"), sound()]
    assert audio_of(ask(openai, parts, **SPOKEN))


def sound() -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": data_url(tone_wav(), "audio/wav")}}


def picture(colour: str) -> dict[str, Any]:
    out = io.BytesIO()
    Image.new("RGB", (96, 64), colour).save(out, "png")
    return {"type": "image_url", "image_url": {"url": data_url(out.getvalue(), "image/png")}}


def data_url(data: bytes, content_type: str) -> str:
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"
