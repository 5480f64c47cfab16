"""Checkpoints of Qwen3-Omni that have a thinker alone: answers as from the whole one, nothing kept for a talker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.engines.ar.engine import ArEngine
from runtime.errors import InvalidRequest, WeightsError
from runtime.plan import REQUEST_INPUT
from tests.golden.ar_engines import assert_nothing_left
from tests.golden.omni_reference import NUM_TEXT_TOKENS, PARTS
from tests.golden.omni_stages import StageDriver, context, make_omni_engine, wav_file
from tests.golden.tiny_qwen3_omni import HEAD_DIM, NUM_KV_HEADS, THINKER_LAYERS

if TYPE_CHECKING:
    from tests.golden.omni_reference import Reference

SETTINGS = {"temperature": 0.0, "max_tokens": NUM_TEXT_TOKENS}
HALF = "\N{REPLACEMENT CHARACTER}"
"""What the last character may become if the answer ends within it."""
AUDIO: dict[str, Any] = {"type": "audio", "index": 0}
TEXT: dict[str, Any] = {"type": "text", "text": "What is it?"}


pytestmark = pytest.mark.timeout(400)  # what the first test waits for is built for the whole session


@pytest.fixture(scope="module")
def folder(omni_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as Thinking and Captioner are published: a configuration without a voice."""
    folder = tmp_path_factory.mktemp("text-only")
    for file in omni_checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text())
    config["enable_audio_output"] = False
    del config["talker_config"], config["code2wav_config"]
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[ArEngine]:
    from runtime.programs.qwen3_omni.captioner import load

    program = load(context(folder, "thinker", **SETTINGS))
    engine = make_omni_engine(folder, program, THINKER_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4)
    yield engine
    engine.close()


def test_answers_are_those_of_the_whole_checkpoint_and_no_row_is_kept(
    engine: ArEngine, folder: Path, omni_references: dict[str, Reference]
) -> None:
    from runtime.programs.qwen3_omni.thinker import load

    thinker = ArEngine(engine.core, load(context(folder, "thinker", **SETTINGS)))
    driver = StageDriver(thinker)
    for name in PARTS:
        driver.ask(name, name, "text")
    tokenizer = engine.core.tokenizer
    for name, stream in driver.drain().items():
        text = tokenizer.decode(omni_references[name].text_ids, skip_special_tokens=True)
        assert stream.text.rstrip(HALF) == text.rstrip(HALF)
        assert stream.end.usage["completion_tokens"] == len(omni_references[name].text_ids)
    assert not hasattr(engine.core._runner, "tapped"), "vLLM's own worker runs it"
    assert_nothing_left(thinker)


def caption(engine: ArEngine, messages: list[dict[str, Any]], num_clips: int = 1) -> Any:
    driver = StageDriver(engine)
    driver.open("caption", "text", inputs=frozenset({REQUEST_INPUT}))
    for index in range(num_clips):
        driver.feed("caption", REQUEST_INPUT, "media", {"index": index, "format": "wav"}, {"data": wav_file()})
    driver.feed("caption", REQUEST_INPUT, "text", {"messages": messages}, last=True)
    stream = driver.drain()["caption"]
    assert stream.end is not None
    assert_nothing_left(engine)
    return stream


def test_a_clip_alone_is_described(engine: ArEngine) -> None:
    stream = caption(engine, [{"role": "user", "content": [AUDIO]}])
    assert stream.end.error is None
    assert stream.end.usage["completion_tokens"] == NUM_TEXT_TOKENS


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "Hello"}], "messages[0]"),
        ([{"role": "user", "content": [AUDIO, TEXT]}], "messages[0].content[1]"),
        ([{"role": "user", "content": [TEXT, AUDIO]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [AUDIO, {"type": "audio", "index": 1}]}], "messages[0].content[1]"),
        ([{"role": "system", "content": "Rhyme."}, {"role": "user", "content": [AUDIO]}], "messages[0].role"),
        ([{"role": "user", "content": [AUDIO]}, {"role": "assistant", "content": "Rain."}], "messages[1].role"),
        ([{"role": "user", "content": [AUDIO]}] * 2, "messages[1]"),
    ],
)
def test_a_captioner_takes_nothing_else(engine: ArEngine, messages: list[dict[str, Any]], param: str) -> None:
    error = caption(engine, messages, num_clips=2).end.error
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    assert "one audio clip" in error.message


@pytest.mark.parametrize("stage", ["talker", "code2wav"])
def test_it_cannot_speak(folder: Path, stage: str) -> None:
    from runtime.programs import load_program

    with pytest.raises(WeightsError, match="has a thinker alone") as caught:
        load_program(context(folder, stage))
    assert "answers in text" in str(caught.value.hint)
