"""Audio files as they come: every container, rate and channel count, broken and odd ones; and Whisper's spectrogram."""

from __future__ import annotations

import io
import sys
import tracemalloc
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from transformers import WhisperFeatureExtractor

from runtime.errors import EnvironmentProblem, UnsupportedMedia
from runtime.programs.media import audio
from runtime.programs.media.audio import SAMPLE_RATE_HZ, AudioDecoder
from runtime.programs.sidekick.logmel import NUM_MELS, log_mel, mel_filters
from runtime.programs.sidekick.sound import block_rms, sound_span

FloatArray = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def decoder() -> AudioDecoder:
    return AudioDecoder("ear")


def tone(frequency_hz: float = 440, rate_hz: int = 44_100, duration_s: float = 0.5) -> FloatArray:
    time_s = np.arange(int(rate_hz * duration_s)) / rate_hz
    return (0.5 * np.sin(2 * np.pi * frequency_hz * time_s)).astype(np.float32)


def encode(
    samples: npt.NDArray[Any], rate_hz: int = 44_100, container: str = "WAV", subtype: str | None = None
) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate_hz, format=container, subtype=subtype)
    return out.getvalue()


def level_db(samples: npt.NDArray[Any]) -> float:
    """Against the tone's own level."""
    middle = samples[len(samples) // 4 : -len(samples) // 4]
    return float(20 * np.log10(np.sqrt(np.mean(np.square(middle))) / (0.5 / np.sqrt(2)) + 1e-12))


# ---- formats -------------------------------------------------------------------------------------------


def test_formats_are_proven_by_decoding(decoder: AudioDecoder) -> None:
    assert decoder.formats == ("wav", "flac", "mp3", "ogg", "opus", "m4a", "mp4", "webm", "mkv", "aac", "aiff")


@pytest.mark.parametrize(
    ("container", "subtype", "rate_hz"),
    [
        ("WAV", "PCM_16", 44_100),
        ("WAV", "PCM_24", 96_000),
        ("WAV", "PCM_U8", 11_025),
        ("WAV", "FLOAT", 16_000),
        ("WAV", "ULAW", 8_000),
        ("FLAC", None, 48_000),
        ("OGG", "VORBIS", 44_100),
        ("OGG", "OPUS", 24_000),
        ("MP3", None, 22_050),
        ("AIFF", None, 32_000),
    ],
)
@pytest.mark.parametrize("num_channels", [1, 2])
def test_any_container_rate_and_channels(
    decoder: AudioDecoder, container: str, subtype: str | None, rate_hz: int, num_channels: int
) -> None:
    channels = np.repeat(tone(rate_hz=rate_hz)[:, None], num_channels, axis=1)
    samples = decoder.decode(encode(channels, rate_hz, container, subtype), max_s=10)
    assert samples.dtype == np.float32
    assert len(samples) / SAMPLE_RATE_HZ == pytest.approx(0.5, abs=0.02)
    assert level_db(samples) == pytest.approx(0.0, abs=0.5)
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    assert np.argmax(spectrum) * SAMPLE_RATE_HZ / len(samples) == pytest.approx(440, abs=3)


def test_channels_are_averaged(decoder: AudioDecoder) -> None:
    left_only = np.stack([tone(), np.zeros_like(tone())], axis=1)
    opposite = np.stack([tone(), -tone()], axis=1)
    assert level_db(decoder.decode(encode(left_only), 10)) == pytest.approx(-6.02, abs=0.1)
    assert level_db(decoder.decode(encode(opposite), 10)) < -60


def test_tones_above_8_khz_do_not_fold_back(decoder: AudioDecoder) -> None:
    for frequency_hz in (8_500, 9_000, 12_000, 20_000):
        assert level_db(decoder.decode(encode(tone(frequency_hz), subtype="FLOAT"), 10)) < -90
    assert level_db(decoder.decode(encode(tone(7_000), subtype="FLOAT"), 10)) == pytest.approx(0, abs=0.1)


def test_data_may_be_an_array_of_bytes(decoder: AudioDecoder) -> None:
    data = encode(tone())
    from_array = decoder.decode(np.frombuffer(data, np.uint8), 10)
    np.testing.assert_array_equal(from_array, decoder.decode(data, 10))


@pytest.mark.parametrize("size_bytes", [0, 0xFFFF_FFFF, 0x7FFF_FFFF, 0x7FFF_F000])
def test_a_stream_header_that_does_not_know_its_length_is_fine(decoder: AudioDecoder, size_bytes: int) -> None:
    data = bytearray(encode(tone(), subtype="PCM_16"))
    data[4:8] = data[40:44] = size_bytes.to_bytes(4, "little")
    assert len(decoder.decode(bytes(data), 10)) / SAMPLE_RATE_HZ == pytest.approx(0.5, abs=0.01)


# ---- bad input -----------------------------------------------------------------------------------------

WAV, FLAC, MP3 = encode(tone()), encode(tone(), container="FLAC"), encode(tone(), container="MP3")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"hello" * 100,
        bytes(1000),
        WAV[:30],
        WAV[:44],
        FLAC[:60],
        MP3[:100],
        b"\x89PNG\r\n\x1a\n" + bytes(100),
        WAV[:22] + b"\x00\x00" + WAV[24:],
        WAV[:24] + b"\x00\x00\x00\x00" + WAV[28:],
        encode(tone(rate_hz=2000), 2000),
        encode(np.zeros(0, np.float32)),
        encode(np.full(1000, np.nan, np.float32), subtype="FLOAT"),
        encode(np.full(1000, np.inf, np.float32), subtype="FLOAT"),
        b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:1/a.wav\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
    ],
)  # fmt: skip
def test_what_is_no_sound_is_refused(decoder: AudioDecoder, data: bytes) -> None:
    with pytest.raises(UnsupportedMedia) as caught:
        decoder.decode(data, 10)
    assert caught.value.param == "audio"
    assert "wav" in caught.value.message


@pytest.mark.parametrize("container", ["FLAC", "MP3"])
def test_damage_after_a_good_beginning_is_refused(decoder: AudioDecoder, container: str) -> None:
    noise = np.random.default_rng(0).standard_normal(44_100).astype(np.float32) * 0.1
    data = encode(noise, container=container)
    damaged = data[: len(data) // 2] + (bytes(20_000) if container == "MP3" else b"")
    with pytest.raises(UnsupportedMedia, match=r"cannot be decoded after 0\.\d\d s"):
        decoder.decode(damaged, 10)


def test_a_wav_that_was_cut_is_refused_with_its_sizes(decoder: AudioDecoder) -> None:
    data = encode(tone(), subtype="PCM_16")
    assert len(data) == 44 + 44_100
    with pytest.raises(UnsupportedMedia, match="promises 44100 bytes of samples, and 14670 are there"):
        decoder.decode(data[: len(data) // 3], 10)
    before = data[:12] + b"JUNK" + (3).to_bytes(4, "little") + b"abc\0" + data[12:]
    assert len(decoder.decode(before, 10)) == 8000
    with pytest.raises(UnsupportedMedia, match="promises 44100 bytes of samples, and 44000 are there"):
        decoder.decode(before[:-100], 10)


def test_a_wav_that_counts_its_header_or_has_more_behind_is_whole(decoder: AudioDecoder) -> None:
    data = bytearray(encode(tone(), subtype="PCM_16"))
    assert len(decoder.decode(bytes(data) + b"LIST\x04\0\0\0abcd", 10)) == 8000
    data[40:44] = len(data).to_bytes(4, "little")
    assert len(decoder.decode(bytes(data), 10)) == 8000


def test_reading_stops_beyond_the_limit(decoder: AudioDecoder) -> None:
    """A small file that unpacks to ten minutes costs no more memory than the limit."""
    data = encode(np.zeros(600 * 16_000, np.float32), 16_000, "FLAC")
    assert len(data) < 300_000
    tracemalloc.start()
    samples = decoder.decode(data, max_s=5)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 5 < len(samples) / SAMPLE_RATE_HZ < 6
    assert peak_bytes < 3_000_000


def test_many_distinct_files_leave_nothing_behind(decoder: AudioDecoder) -> None:
    files = [encode(tone(300 + n, 16_000, 0.1), 16_000) for n in range(50)]
    decoder.decode(files[0], 10)
    tracemalloc.start()
    for n in range(500):
        decoder.decode(files[n % len(files)], 10)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept_bytes < 200_000


# ---- what the client says and what is installed --------------------------------------------------------


@pytest.mark.parametrize("name", ["", "wav", "WAV", "audio/mpeg", "mpga", "m4a", "webm"])
def test_formats_that_a_client_may_name(decoder: AudioDecoder, name: str) -> None:
    decoder.check_format(name)


def test_a_format_that_nobody_knows_is_refused_by_name(decoder: AudioDecoder) -> None:
    with pytest.raises(UnsupportedMedia, match="'midi' is unknown; expected one of wav, flac"):
        decoder.check_format("midi")


def test_a_format_that_this_installation_lacks_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(audio.CLIPS, "mp3", ("mp3", "no_such_codec"))
    decoder = AudioDecoder("ear")
    assert "mp3" not in decoder.formats
    with pytest.raises(EnvironmentProblem, match="cannot decode mp3"):
        decoder.check_format("mp3")


@pytest.mark.parametrize("library", ["av", "soxr"])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(EnvironmentProblem, match=f"stage ear: the library '{library}' cannot be imported") as caught:
        AudioDecoder("ear")
    assert "pip install" in str(caught.value.hint)


# ---- where there is sound ------------------------------------------------------------------------------


def test_sound_span() -> None:
    silence, sound = np.zeros(16_000, np.float32), tone(rate_hz=16_000, duration_s=1.0)
    assert sound_span(silence) is None
    assert sound_span(np.full(16_000, 1e-4, np.float32)) is None
    assert sound_span(np.concatenate([silence, sound, silence])) == (16_000 - 1600, 32_000 + 1600)
    assert sound_span(sound[:100]) == (0, 100)


def test_block_rms_of_a_short_last_block() -> None:
    np.testing.assert_allclose(block_rms(np.full(330, 0.5, np.float32)), [0.5, 0.5])


# ---- spectrogram ---------------------------------------------------------------------------------------


def test_mel_filters_equal_the_reference() -> None:
    np.testing.assert_allclose(mel_filters(), WhisperFeatureExtractor().mel_filters.T, atol=1e-12)


@pytest.mark.parametrize("num_samples", [1, 100, 16_000, 400_001, 480_000, 500_000])
def test_log_mel_equals_the_reference(num_samples: int) -> None:
    rng = np.random.default_rng(num_samples)
    samples = (0.1 * rng.standard_normal(num_samples) + 0.3 * np.sin(np.arange(num_samples) * 0.1)).astype(np.float32)
    reference = WhisperFeatureExtractor()(samples, sampling_rate=16_000, return_tensors="np").input_features[0]
    ours = log_mel(samples, 3000)
    assert ours.shape == (NUM_MELS, 3000)
    np.testing.assert_allclose(ours, reference, atol=2e-5)


def test_log_mel_of_a_short_window_is_the_beginning_of_the_long_one() -> None:
    samples = tone(rate_hz=16_000, duration_s=2.0)
    np.testing.assert_allclose(log_mel(samples, 500), log_mel(samples, 3000)[:, :500], atol=1e-6)
