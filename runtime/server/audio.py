"""Audio on its way out: float samples to the bytes of a format, piece by piece, so that a clip can be sent
while it is still being made. Encoding is CPU work: `AudioTrack` runs it off the event loop.

A streamed wav has one header, whose sizes say "unknown"; a whole one says its true length.
"""

from __future__ import annotations

import asyncio
import base64
import io
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import av
import numpy as np
import numpy.typing as npt

from runtime.errors import StageError
from runtime.payload import Payload

SAMPLE_RATE_HZ = 24_000
"""Of everything that leaves: the rate that the public API promises for raw PCM."""
Samples = npt.NDArray[np.float32]

CONTENT_TYPES: Mapping[str, str] = {
    "pcm": f"audio/pcm;rate={SAMPLE_RATE_HZ};channels=1",
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg;codecs=opus",
    "aac": "audio/aac",
}
_CONTAINERS: Mapping[str, tuple[str, str, dict[str, str]]] = {
    # format -> container, codec, container options; an ogg page otherwise holds a second before it leaves
    "mp3": ("mp3", "libmp3lame", {}),
    "flac": ("flac", "flac", {}),
    "opus": ("ogg", "libopus", {"page_duration": "100000"}),
    "aac": ("adts", "aac", {}),
}
_BIT_RATE = 64_000
_UNKNOWN_SIZE = 0xFFFFFFFF


class AudioEncoder(Protocol):
    """Calls come from one thread at a time; samples are mono float32 in [-1, 1] at SAMPLE_RATE_HZ."""

    def encode(self, samples: Samples) -> bytes:
        """What can be sent now; may be empty."""

    def finish(self) -> bytes:
        """The rest. Called once, last."""


def make_encoder(audio_format: str) -> AudioEncoder:
    """An encoder for a key of CONTENT_TYPES."""
    if audio_format == "pcm":
        return PcmEncoder()
    if audio_format == "wav":
        return PcmEncoder(header=wav_header(_UNKNOWN_SIZE))
    return ContainerEncoder(audio_format)


def encode_clip(audio_format: str, pieces: list[Samples]) -> bytes:
    """A whole clip as one file that knows its length. Blocks: call it from a thread."""
    if audio_format in ("pcm", "wav"):
        data = b"".join(to_pcm(piece) for piece in pieces)
        return wav_header(len(data)) + data if audio_format == "wav" else data
    file = io.BytesIO()
    writer = ContainerWriter(audio_format, file)
    for piece in pieces:
        writer.write(piece)
    writer.close()
    return file.getvalue()


def to_pcm(samples: Samples) -> bytes:
    """Signed 16 bit little endian; what is beyond [-1, 1] is clipped."""
    pcm: bytes = np.rint(np.clip(samples, -1.0, 1.0) * 32767.0).astype("<i2").tobytes()
    return pcm


def wav_header(data_bytes: int) -> bytes:
    """44 bytes: RIFF, fmt, data."""
    riff_bytes = min(data_bytes + 36, _UNKNOWN_SIZE)
    byte_rate = SAMPLE_RATE_HZ * 2
    layout = struct.pack("<IHHIIHH", 16, 1, 1, SAMPLE_RATE_HZ, byte_rate, 2, 16)
    return struct.pack("<4sI8s", b"RIFF", riff_bytes, b"WAVEfmt ") + layout + struct.pack("<4sI", b"data", data_bytes)


class PcmEncoder:
    """Raw samples, after an optional header."""

    def __init__(self, header: bytes = b"") -> None:
        self._header = header

    def encode(self, samples: Samples) -> bytes:
        header, self._header = self._header, b""
        return header + to_pcm(samples)

    def finish(self) -> bytes:
        return b""


class ContainerWriter:
    """A codec in its container, written to a file. What can be seeked has its length written at the end."""

    def __init__(self, audio_format: str, file: Any) -> None:
        container, codec, options = _CONTAINERS[audio_format]
        self._container: Any = av.open(file, "w", format=container, options=options)
        self._stream: Any = self._container.add_stream(codec, rate=SAMPLE_RATE_HZ, layout="mono")
        self._stream.bit_rate = _BIT_RATE
        self._num_samples = 0

    def write(self, samples: Samples) -> None:
        if samples.size == 0:
            return
        pcm = np.frombuffer(to_pcm(samples), np.int16)[None]
        frame: Any = av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
        frame.sample_rate = SAMPLE_RATE_HZ
        frame.pts = self._num_samples
        self._num_samples += samples.size
        self._mux(frame)

    def close(self) -> None:
        self._mux(None)
        self._container.close()

    def _mux(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)


class ContainerEncoder:
    """A container whose bytes are taken as they are written."""

    def __init__(self, audio_format: str) -> None:
        self._pipe = _Pipe()
        self._writer = ContainerWriter(audio_format, self._pipe)

    def encode(self, samples: Samples) -> bytes:
        self._writer.write(samples)
        return self._pipe.take()

    def finish(self) -> bytes:
        self._writer.close()
        return self._pipe.take()


class _Pipe:
    """The file of a stream. Has no `seek`, so nothing is patched afterwards."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._written.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        data = b"".join(self._written)
        self._written.clear()
        return data


def samples_of(payload: Payload) -> Samples:
    """The samples of a `media` payload. StageError for a rate other than the one that we promise."""
    rate_hz = payload.meta.get("sample_rate_hz")
    samples = payload.tensors.get("samples")
    if samples is None:
        return np.empty(0, np.float32)
    if rate_hz != SAMPLE_RATE_HZ:
        raise StageError(f"the audio stage made samples at {rate_hz} Hz; expected {SAMPLE_RATE_HZ}")
    return samples.astype(np.float32, copy=False).reshape(-1)


class AudioTrack:
    """The audio of one streamed answer, encoded in threads, in order."""

    def __init__(self, audio_format: str) -> None:
        self._encoder = make_encoder(audio_format)
        self._num_samples = 0

    async def add(self, payload: Payload) -> bytes:
        """The bytes that can be sent after this payload; may be empty."""
        samples = samples_of(payload)
        self._num_samples += samples.size
        return await asyncio.to_thread(self._encoder.encode, samples) if samples.size else b""

    async def finish(self) -> bytes:
        """The last bytes. StageError when there was no sound at all."""
        require_sound(self._num_samples)
        return await asyncio.to_thread(self._encoder.finish)


def require_sound(num_samples: int) -> None:
    """StageError: audio was asked for, and an answer without it is not an answer."""
    if num_samples == 0:
        raise StageError("audio was asked for and the model made none", hint="the text may have nothing to pronounce")


class Base64Stream:
    """Bytes in pieces to base64 in pieces that can be decoded one by one as well as joined.

    Pieces leave in multiples of six bytes: no padding inside, and no 16 bit sample cut in two.
    """

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> str:
        data = self._rest + data
        whole = len(data) - len(data) % 6
        self._rest = data[whole:]
        return base64.b64encode(data[:whole]).decode()

    def finish(self) -> str:
        return base64.b64encode(self._rest).decode()
