"""Qwen3-Omni's code2wav as a stage: streamed in any way it equals the whole, and the whole equals transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from runtime.engines.module import ModuleEngine
from runtime.errors import ConfigError, InvalidRequest, StageError, WeightsError
from tests.golden.omni_reference import PARTS
from tests.golden.omni_stages import StageDriver, Stream, context
from tests.golden.tiny_qwen3_omni import CODEBOOK, NUM_CODE_GROUPS, SLIDING_WINDOW

if TYPE_CHECKING:
    from tests.golden.omni_reference import Reference

EDGE = "talker->code2wav"
TOLERANCE = 1e-5
NUM_FRAMES = 130
"""Several times what the network hears."""


def load(folder: Path, **settings: Any) -> ModuleEngine:
    from runtime.programs.qwen3_omni.code2wav import load

    return ModuleEngine(load(context(folder, "code2wav", **settings)))


@pytest.fixture(scope="module")
def engine(omni_checkpoint: Path) -> Iterator[ModuleEngine]:
    engine = load(omni_checkpoint)
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: ModuleEngine) -> StageDriver:
    return StageDriver(engine)


@pytest.fixture(scope="module")
def codes() -> np.ndarray:
    return np.random.default_rng(0).integers(0, CODEBOOK, (NUM_CODE_GROUPS, NUM_FRAMES)).astype(np.int32)


@pytest.fixture(scope="module")
def whole(omni_model: Any, codes: np.ndarray) -> np.ndarray:
    """What transformers makes of all codes at once."""
    with torch.inference_mode():
        return omni_model.code2wav(torch.from_numpy(codes).long()[None])[0, 0].numpy()


def speak(driver: StageDriver, codes: np.ndarray, sizes: list[int], request_id: str = "r", **params: Any) -> Stream:
    """Feed pieces of these sizes, as fast as the stage takes them."""
    driver.open(request_id, "media", inputs=frozenset({EDGE}), **params)
    start = 0
    for size in sizes:
        driver.feed(request_id, EDGE, "codec_codes", {}, {"codes": codes[:, start : start + size]})
        start += size
        while driver.engine.next_step_s() == 0.0:
            driver.step()
    assert start == codes.shape[1]
    driver.feed(request_id, EDGE, "codec_codes", last=True)
    return driver.drain()[request_id]


def assert_same(stream: Stream, expected: np.ndarray, num_frames: int) -> None:
    samples = stream.joined("samples")
    assert samples.dtype == np.float32
    assert samples.shape == expected.shape
    assert np.abs(samples - expected).max() <= TOLERANCE
    assert stream.end is not None
    assert stream.end.error is None
    assert stream.end.usage == {"audio_s": len(samples) / 24_000, "frames": num_frames}


@pytest.mark.parametrize("name", PARTS)
def test_the_reference_frame_by_frame(driver: StageDriver, omni_references: dict[str, Reference], name: str) -> None:
    reference = omni_references[name]
    codes = reference.codes.numpy().astype(np.int32)
    stream = speak(driver, codes, [1] * codes.shape[1])
    assert len(stream.payloads) > 1 or codes.shape[1] < 8
    assert_same(stream, reference.samples.numpy(), codes.shape[1])


def test_whole(driver: StageDriver, codes: np.ndarray, whole: np.ndarray) -> None:
    assert_same(speak(driver, codes, [NUM_FRAMES]), whole, NUM_FRAMES)


def test_frame_by_frame(driver: StageDriver, codes: np.ndarray, whole: np.ndarray) -> None:
    stream = speak(driver, codes, [1] * NUM_FRAMES, seed=0)
    sizes = [round(len(p.tensors["samples"]) / 1920) for p in stream.payloads]
    assert sizes == [4, 4, 8, 16, 25, 25, 25, 23]
    assert_same(stream, whole, NUM_FRAMES)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_any_size(driver: StageDriver, codes: np.ndarray, whole: np.ndarray, seed: int) -> None:
    chance, sizes = random.Random(seed), []
    while sum(sizes) < NUM_FRAMES:
        sizes.append(min(chance.randint(1, 40), NUM_FRAMES - sum(sizes)))
    assert_same(speak(driver, codes, sizes), whole, NUM_FRAMES)


def test_a_seed_gives_the_same_bits_however_the_frames_come(driver: StageDriver, codes: np.ndarray) -> None:
    streams = [speak(driver, codes, sizes, seed=7) for sizes in ([NUM_FRAMES], [1] * NUM_FRAMES, [7] * 18 + [4])]
    assert len({stream.joined("samples").tobytes() for stream in streams}) == 1


def test_chunks_follow_the_player(omni_checkpoint: Path, codes: np.ndarray, whole: np.ndarray) -> None:
    """A clock that the test moves: chunks are small while the player has little, and what waits leaves in time."""
    now_s = [100.0]
    engine = load(omni_checkpoint, reserve_s=0.25)
    engine.program._clock = lambda: now_s[0]
    driver, sizes, num_fed = StageDriver(engine), [], 0

    def feed(num_frames: int) -> None:
        nonlocal num_fed
        piece = codes[:, num_fed : num_fed + num_frames]
        num_fed += num_frames
        driver.feed("r", EDGE, "codec_codes", {}, {"codes": piece}, last=num_fed == NUM_FRAMES)

    def run() -> list[int]:
        num_before = len(sizes)
        while driver.engine.next_step_s() == 0.0:
            driver.step()
            sizes.append(int(engine.stats()["frames"]) - sum(sizes))
        return sizes[num_before:]

    driver.open("r", "media", inputs=frozenset({EDGE}))
    feed(4)
    assert run() == [4], "the first sound"
    feed(30)
    assert run() == [30], "a backlog"
    feed(24)
    assert run() == [], "34 frames are to be played: it waits for a chunk of the steady size"
    wait_s = driver.engine.next_step_s()
    assert wait_s is not None
    assert wait_s == pytest.approx(engine.stats()["audio_s"] - 0.25 - 25 * 0.08)
    now_s[0] += wait_s + 0.001
    assert run() == [24], "but not when the player runs low"
    assert engine.stats()["underruns"] == 0
    now_s[0] += 10
    feed(NUM_FRAMES - 58)
    assert run()[0] == 32, "a backlog, of which little at once while nothing is heard"
    assert engine.stats()["underruns"] == 1
    assert_same(driver.streams["r"], whole, NUM_FRAMES)
    engine.close()


def test_what_is_kept_of_a_request_is_bounded(driver: StageDriver, codes: np.ndarray) -> None:
    driver.open("r", "media", inputs=frozenset({EDGE}))
    program = driver.engine.program
    for _ in range(5):
        driver.feed("r", EDGE, "codec_codes", {}, {"codes": codes})
        driver.drain()
        (state,) = driver.engine._states.values()
        assert state.frames.shape[1] <= program.facts()["context_frames"] + 1
    driver.engine.abort("r")
    assert driver.drain() == {}


def test_requests_side_by_side(driver: StageDriver, codes: np.ndarray, whole: np.ndarray) -> None:
    for request_id in ("a", "b"):
        driver.open(request_id, "media", inputs=frozenset({EDGE}))
    driver.feed("a", EDGE, "codec_codes", {}, {"codes": codes})
    driver.feed("b", EDGE, "codec_codes", {}, {"codes": codes[:, ::-1]})
    for request_id in ("a", "b"):
        driver.feed(request_id, EDGE, "codec_codes", last=True)
    assert_same(driver.drain()["a"], whole, NUM_FRAMES)


def test_no_frames_are_no_sound(driver: StageDriver, codes: np.ndarray) -> None:
    stream = speak(driver, codes[:, :0], [])
    assert stream.payloads == []
    assert stream.end is not None
    assert stream.end.usage == {"audio_s": 0.0, "frames": 0.0}


def test_how_far_back_the_network_hears(engine: ModuleEngine, omni_model: Any, codes: np.ndarray) -> None:
    """A change of one frame is heard up to the reach behind it and no further; and so far it is heard."""
    vocoder = engine.program._vocoder
    assert vocoder.reach == 10 + 2 * (SLIDING_WINDOW - 1)
    changed = codes.copy()
    changed[:, 40] = (changed[:, 40] + 1) % CODEBOOK
    before, after = vocoder.decode(codes, 0), vocoder.decode(changed, 0)
    heard = np.flatnonzero(before != after) // vocoder.samples_per_frame
    assert heard.min() >= 39
    assert heard.max() <= 40 + vocoder.reach
    assert heard.max() > 40 + 2 * (SLIDING_WINDOW - 1), "the convolutions add nothing to the attention"


def test_a_context_too_small_is_refused(omni_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"stage code2wav: context_frames 39 is smaller than the 40 frames") as caught:
        load(omni_checkpoint, context_frames=39)
    assert "40 or more" in str(caught.value.hint)
    load(omni_checkpoint, context_frames=40).close()


def test_chunk_sizes_out_of_order_are_refused(omni_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="stage code2wav: first_chunk_frames 30, steady_chunk_frames 25"):
        load(omni_checkpoint, first_chunk_frames=30)


def test_settings_are_checked(omni_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"first_chunk_frame: unknown key \(did you mean 'first_chunk_frames'\?\)"):
        load(omni_checkpoint, first_chunk_frame=2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((3, 2), np.int32), r"got codes int32 \(3, 2\); expected int32 \(4, n\)"),
        (np.zeros((4, 2), np.float32), "got codes float32"),
        (np.full((4, 2), CODEBOOK, np.int32), f"expected 0 to {CODEBOOK - 1}"),
        (np.full((4, 2), -1, np.int32), "codes -1 to -1"),
    ],
)
def test_what_no_talker_sends(driver: StageDriver, bad: np.ndarray, message: str) -> None:
    driver.open("r", "media", inputs=frozenset({EDGE}))
    driver.feed("r", EDGE, "codec_codes", {}, {"codes": bad})
    end = driver.drain()["r"].end
    assert end is not None
    assert isinstance(end.error, StageError)
    with pytest.raises(StageError, match=message):
        raise end.error


def test_another_speed_is_refused(driver: StageDriver) -> None:
    driver.open("r", "media", inputs=frozenset({EDGE}), speed=1.5)
    end = driver.drain()["r"].end
    assert end is not None
    assert isinstance(end.error, InvalidRequest)
    assert end.error.param == "speed"


def test_weights_that_are_not_there(tmp_path: Path, omni_checkpoint: Path) -> None:
    (tmp_path / "config.json").write_text((omni_checkpoint / "config.json").read_text())
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(tmp_path)
