"""The encoders on their own: whole and in odd pieces, against an independent decoder."""

from __future__ import annotations

import base64
import io
import wave

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import StageError
from runtime.payload import Payload
from runtime.server.audio import CONTENT_TYPES, AudioTrack, Base64Stream, encode_clip, make_encoder, to_pcm
from tests.server.listening import MAX_CODEC_DELAY, RATE_HZ, kind_of, num_samples

TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(2 * RATE_HZ) / RATE_HZ)).astype(np.float32)
ODD_PIECES = np.split(TONE, [1, 2, 7, 1000, 1001, 9999, 24_001, 47_000])


def decoded(data: bytes) -> np.ndarray:
    """Float samples by PyAV, mono."""
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    samples = np.concatenate(frames, axis=1)[0]
    return samples / 32768.0 if samples.dtype == np.int16 else samples


@pytest.mark.parametrize("audio_format", CONTENT_TYPES)
@pytest.mark.parametrize("pieces", [[TONE], ODD_PIECES], ids=["one piece", "odd pieces"])
def test_a_tone_survives(audio_format: str, pieces: list[np.ndarray]) -> None:
    encoder = make_encoder(audio_format)
    data = b"".join([*(encoder.encode(piece) for piece in pieces), encoder.finish()])
    assert kind_of(data) == audio_format
    assert 0 <= num_samples(data) - TONE.size <= MAX_CODEC_DELAY
    if audio_format == "pcm":
        assert data == to_pcm(TONE)
        return
    heard = decoded(data)
    rate_hz = heard.size * RATE_HZ / num_samples(data)
    spectrum = np.abs(np.fft.rfft(heard * np.hanning(heard.size)))
    assert np.argmax(spectrum) * rate_hz / heard.size == pytest.approx(440, abs=2)
    assert np.abs(heard).max() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac"])
def test_encoders_do_not_hold_back(audio_format: str) -> None:
    """A streamed second of speech leaves in several pieces, the first of them early."""
    encoder = make_encoder(audio_format)
    sizes = [len(encoder.encode(piece)) for piece in np.split(TONE[:RATE_HZ], 8)]
    assert sum(map(bool, sizes)) >= 5
    assert any(sizes[:3])


@pytest.mark.parametrize("audio_format", ["wav", "flac", "mp3"])
def test_a_whole_clip_reads_in_ordinary_players(audio_format: str) -> None:
    data, rate_hz = soundfile.read(io.BytesIO(encode_clip(audio_format, ODD_PIECES)))
    assert rate_hz == RATE_HZ
    assert 0 <= data.size - TONE.size <= MAX_CODEC_DELAY


def test_a_whole_wav_knows_its_length() -> None:
    with wave.open(io.BytesIO(encode_clip("wav", ODD_PIECES))) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (TONE.size, RATE_HZ, 1)


def test_what_is_too_loud_is_clipped() -> None:
    loud = np.array([2.0, -2.0, 1.0, -1.0, 0.0], np.float32)
    assert np.frombuffer(to_pcm(loud), "<i2").tolist() == [32767, -32767, 32767, -32767, 0]


async def test_a_track_wants_the_promised_rate_and_some_sound() -> None:
    track = AudioTrack("pcm")
    with pytest.raises(StageError, match="at 16000 Hz; expected 24000"):
        await track.add(Payload("media", "r", meta={"sample_rate_hz": 16000}, tensors={"samples": TONE}))
    assert await track.add(Payload("media", "r")) == b""
    with pytest.raises(StageError, match="audio was asked for"):
        await track.finish()


@given(st.lists(st.binary(max_size=20)))
def test_base64_pieces_decode_alone_and_joined(pieces: list[bytes]) -> None:
    encoded = Base64Stream()
    texts = [*(encoded.add(piece) for piece in pieces), encoded.finish()]
    assert base64.b64decode("".join(texts), validate=True) == b"".join(pieces)
    assert b"".join(base64.b64decode(text, validate=True) for text in texts) == b"".join(pieces)
