"""Qwen2.5-Omni's token2wav as a stage against transformers: the waveform, whoever else is being spoken for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from runtime.engines.module import ModuleEngine
from runtime.errors import ConfigError, InvalidRequest, StageError, WeightsError
from tests.golden.omni25_reference import NAMES, VOICE
from tests.golden.omni_stages import StageDriver, Stream, context
from tests.golden.tiny_qwen2_5_omni import CODEBOOK

if TYPE_CHECKING:
    from tests.golden.omni25_reference import Reference25

EDGE = "talker->token2wav"
TOLERANCE = 1e-5


def load(folder: Path, **settings: Any) -> ModuleEngine:
    from runtime.programs.qwen2_5_omni.token2wav import load

    return ModuleEngine(load(context(folder, "token2wav", family="qwen2_5_omni", **settings)))


@pytest.fixture(scope="module")
def engine(omni25_checkpoint: Path) -> Iterator[ModuleEngine]:
    engine = load(omni25_checkpoint)
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: ModuleEngine) -> StageDriver:
    return StageDriver(engine)


def open_(driver: StageDriver, request_id: str = "r", **params: Any) -> None:
    driver.open(request_id, "media", inputs=frozenset({EDGE}), **{"voice": VOICE, **params})


def feed(driver: StageDriver, codes: list[int], request_id: str = "r", **meta: Any) -> None:
    """One by one, and the end."""
    for code in codes:
        driver.feed(request_id, EDGE, "codec_codes", meta, {"codes": np.array([[code]], np.int32)})
    driver.feed(request_id, EDGE, "codec_codes", last=True)


def spoken(driver: StageDriver, codes: list[int], meta: dict[str, Any] | None = None, **params: Any) -> np.ndarray:
    open_(driver, **params)
    feed(driver, codes, **(meta or {}))
    return driver.drain()["r"].joined("samples")


def check(stream: Stream, reference: Reference25) -> None:
    samples = stream.joined("samples")
    assert samples.dtype == np.float32
    assert samples.shape == reference.samples.shape
    assert np.abs(samples - reference.samples.numpy()).max() <= TOLERANCE
    assert stream.end is not None
    assert stream.end.usage == {"audio_s": len(samples) / 24_000, "frames": len(reference.codes)}


def test_each_alone_and_all_together(driver: StageDriver, omni25_references: dict[str, Reference25]) -> None:
    for name in NAMES:
        open_(driver, name)
        feed(driver, omni25_references[name].codes, name)
        check(driver.drain()[name], omni25_references[name])
    for name in NAMES:
        open_(driver, name)
        open_(driver, f"doomed {name}")
        feed(driver, omni25_references[name].codes, name)
        feed(driver, [1, 2, 3], f"doomed {name}")
        driver.engine.abort(f"doomed {name}")
    streams = driver.drain()
    assert set(streams) == set(NAMES)
    for name, stream in streams.items():
        check(stream, omni25_references[name])


def test_nothing_is_begun_before_the_last_code(driver: StageDriver) -> None:
    open_(driver)
    driver.feed("r", EDGE, "codec_codes", {}, {"codes": np.zeros((1, 50), np.int32)})
    assert driver.engine.next_step_s() is None
    driver.feed("r", EDGE, "codec_codes", last=True)
    assert driver.drain()["r"].joined("samples").shape == (50 * 30,)


def test_noise_is_of_the_request(driver: StageDriver, omni25_model: Any) -> None:
    """From the seed of the codes, or else from the request's; the same as in transformers with that seed."""
    codes = [5, 6, 7, 8, 9, 10]
    greedy, seeded = spoken(driver, codes), spoken(driver, codes, seed=11)
    assert np.abs(greedy - seeded).max() > 1e-3
    assert np.array_equal(seeded, spoken(driver, codes, {"seed": 11}))
    assert np.array_equal(seeded, spoken(driver, codes, {"seed": 11}, seed=3))
    assert np.array_equal(seeded, spoken(driver, codes, sampling={"seed": 11}))
    speaker = omni25_model.speaker_map[VOICE]
    torch.manual_seed(11)
    with torch.inference_mode():
        expected = omni25_model.token2wav(torch.tensor([codes]), speaker["cond"], speaker["ref_mel"])
    assert np.abs(seeded - expected.numpy()).max() <= TOLERANCE
    state = torch.random.get_rng_state()
    spoken(driver, codes, seed=11)
    assert torch.equal(state, torch.random.get_rng_state()), "it drew from the generator that all share"


def test_every_voice_sounds_its_own(driver: StageDriver) -> None:
    codes = [5, 6, 7, 8, 9, 10]
    chelsie = spoken(driver, codes, voice=None)
    assert np.array_equal(chelsie, spoken(driver, codes, voice="Chelsie"))
    assert np.abs(chelsie - spoken(driver, codes)).max() > 1e-3
    open_(driver, voice="nobody")
    end = driver.drain()["r"].end
    assert end is not None
    assert isinstance(end.error, InvalidRequest)
    assert end.error.param == "voice"


def test_no_codes_are_no_sound(driver: StageDriver) -> None:
    open_(driver)
    feed(driver, [])
    stream = driver.drain()["r"]
    assert stream.payloads == []
    assert stream.end is not None
    assert stream.end.usage == {"audio_s": 0.0, "frames": 0.0}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((2, 2), np.int32), r"got codes int32 \(2, 2\); expected int32 \(1, n\)"),
        (np.zeros((1, 2), np.float32), "got codes float32"),
        (np.full((1, 2), CODEBOOK + 1, np.int32), f"expected 0 to {CODEBOOK}"),
        (np.full((1, 2), -1, np.int32), "codes -1 to -1"),
        (np.zeros((1, 1025), np.int32), "more than 1024 codes"),
    ],
)
def test_what_no_talker_sends(driver: StageDriver, bad: np.ndarray, message: str) -> None:
    open_(driver)
    driver.feed("r", EDGE, "codec_codes", {}, {"codes": bad})
    end = driver.drain()["r"].end
    assert end is not None
    assert isinstance(end.error, StageError)
    with pytest.raises(StageError, match=message):
        raise end.error


def test_another_speed_is_refused(driver: StageDriver) -> None:
    open_(driver, speed=1.5)
    end = driver.drain()["r"].end
    assert end is not None
    assert isinstance(end.error, InvalidRequest)
    assert end.error.param == "speed"


def test_settings_and_files_are_checked(tmp_path: Path, omni25_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="steps: unknown key"):
        load(omni25_checkpoint, steps=3)
    (tmp_path / "config.json").write_text((omni25_checkpoint / "config.json").read_text())
    (tmp_path / "spk_dict.pt").symlink_to(omni25_checkpoint / "spk_dict.pt")
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        load(tmp_path)
