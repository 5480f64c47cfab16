"""Audio files to 16 kHz mono samples.

Any container, codec, sample rate and number of channels that the installed decoder knows; which those are is found
out by decoding clips, not by believing a list. Knows nothing of models. Stages that hear call it.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import EnvironmentProblem, OmniError, UnsupportedMedia
from runtime.programs.loading import require_module

SAMPLE_RATE_HZ = 16_000
MIN_RATE_HZ, MAX_RATE_HZ = 4_000, 768_000
PARAM = "audio"

CLIPS = {
    "wav": ("wav", "pcm_s16le"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "ogg": ("ogg", "libopus"),
    "opus": ("ogg", "libopus"),
    "m4a": ("ipod", "aac"),
    "mp4": ("mp4", "aac"),
    "webm": ("webm", "libopus"),
    "mkv": ("matroska", "libopus"),
    "aac": ("adts", "aac"),
    "aiff": ("aiff", "pcm_s16be"),
}
"""Format -> container and codec of the clip that proves it."""
ALIASES = {"mpga": "mp3", "mpeg": "mp3", "oga": "ogg", "wave": "wav", "x-wav": "wav", "aif": "aiff", "weba": "webm"}

_CONTAINERS = "wav,w64,aiff,au,caf,flac,ogg,mp3,aac,mov,mp4,m4a,matroska,webm"
"""Nothing but files that hold their own sound: a playlist could make the decoder open other files and addresses."""
_UNKNOWN_SIZE_BYTES = 0x7FFF_0000
"""From here on a wav's size means that its writer did not know it: each writer of streams has a number of its own."""
_SIZE_SLACK_BYTES = 64
"""Some writers count their header as samples."""

FloatArray = npt.NDArray[np.float32]
FileBytes = bytes | memoryview | npt.NDArray[np.uint8]


class AudioDecoder:
    """Holds the decoder's libraries; EnvironmentProblem naming the one that cannot be imported."""

    def __init__(self, stage: str) -> None:
        self._av: Any = require_module("av", stage)
        self._soxr: Any = require_module("soxr", stage)
        self.formats: tuple[str, ...] = ()
        """Names of the formats of which a generated clip came back whole."""
        self.formats = tuple(name for name, clip in CLIPS.items() if self._can_decode(*clip))

    def check_format(self, name: str) -> None:
        """For the format that a client says it sends, "" if it says none: what the data is, decoding finds out.

        UnsupportedMedia for one that we do not know; EnvironmentProblem for one that this installation lacks.
        """
        name = name.lower().removeprefix("audio/")
        canonical = ALIASES.get(name, name)
        if not name or canonical in self.formats:
            return
        if canonical in CLIPS:
            raise EnvironmentProblem(
                f"the audio decoder of this installation (PyAV {self._av.__version__}) cannot decode {canonical}",
                hint=f"send one of {', '.join(self.formats)}, or install another build of av",
            )
        raise UnsupportedMedia(
            f"audio format {name!r} is unknown; expected one of {', '.join(self.formats)}", param=PARAM
        )

    def decode(self, data: FileBytes, max_s: float) -> FloatArray:
        """Samples [n] at 16 kHz, the mean of all channels; UnsupportedMedia when the data is no sound or is damaged.

        Reading stops as soon as there is more than `max_s`, whatever the file says of its length: who wants no
        more than that looks at the length of what he got.
        """
        blocks: list[FloatArray] = []
        num_samples = 0
        try:
            for block in self._resampled(data):
                blocks.append(block)
                num_samples += len(block)
                if num_samples > max_s * SAMPLE_RATE_HZ:
                    break
        except self._av.error.DecoderNotFoundError as exc:
            raise EnvironmentProblem(
                f"the audio decoder of this installation (PyAV {self._av.__version__}) lacks a codec: {exc}",
                hint=f"send one of {', '.join(self.formats)}, or install another build of av",
            ) from exc
        except self._av.FFmpegError as exc:
            raise self._undecodable(f"{exc.strerror or exc}", num_samples) from exc
        if num_samples == 0:
            raise self._undecodable("it holds no samples", 0)
        samples = np.concatenate(blocks)
        if not np.isfinite(samples).all():
            raise self._undecodable("some of its samples are no numbers", 0)
        return samples

    def _undecodable(self, reason: str, num_samples: int) -> UnsupportedMedia:
        where = f" after {num_samples / SAMPLE_RATE_HZ:.2f} s" if num_samples else ""
        return UnsupportedMedia(
            f"the audio cannot be decoded{where}: {reason}; expected one of {', '.join(self.formats)}", param=PARAM
        )

    def _resampled(self, data: FileBytes) -> Iterator[FloatArray]:
        """Mono blocks at 16 kHz, so that a long file never lies in memory at its own rate."""
        resampler, rate_hz = None, 0
        for samples, frame_rate_hz in self._mono_blocks(data):
            if resampler is None:
                rate_hz = frame_rate_hz
                resampler = self._soxr.ResampleStream(rate_hz, SAMPLE_RATE_HZ, 1, dtype="float32", quality="HQ")
            if frame_rate_hz != rate_hz:
                raise self._undecodable(f"its sample rate changes from {rate_hz} to {frame_rate_hz} Hz", 0)
            yield resampler.resample_chunk(samples)
        if resampler is not None:
            yield resampler.resample_chunk(np.zeros(0, np.float32), last=True)

    def _mono_blocks(self, data: FileBytes) -> Iterator[tuple[FloatArray, int]]:
        file = io.BytesIO(bytes(data))
        if file.getbuffer().nbytes == 0:
            raise self._undecodable("it is empty (0 bytes)", 0)
        expected_bytes, found_bytes = wav_sizes(file.getbuffer())
        if found_bytes + _SIZE_SLACK_BYTES < expected_bytes:
            raise self._undecodable(
                f"its header promises {expected_bytes} bytes of samples, and {found_bytes} are there: it is damaged", 0
            )
        with self._av.open(file, options={"format_whitelist": _CONTAINERS}) as container:
            if not container.streams.audio:
                raise self._undecodable("it has no audio track", 0)
            as_float = self._av.AudioResampler(format="fltp")
            for frame in container.decode(audio=0):
                if not MIN_RATE_HZ <= frame.sample_rate <= MAX_RATE_HZ:
                    raise self._undecodable(
                        f"its sample rate is {frame.sample_rate} Hz, not {MIN_RATE_HZ} to {MAX_RATE_HZ} Hz", 0
                    )
                for converted in as_float.resample(frame):
                    yield converted.to_ndarray().mean(axis=0), converted.sample_rate

    # ---- self test -----------------------------------------------------------------------------------

    def _can_decode(self, container: str, codec: str) -> bool:
        """Whether half a second of a tone, encoded here, comes back with its length and its level."""
        tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(24_000) / 48_000)).astype(np.float32)
        try:
            samples = self.decode(self._encode(tone, 48_000, container, codec), max_s=2.0)
        except (self._av.FFmpegError, self._av.codec.codec.UnknownCodecError, OmniError):
            return False
        return 0.45 <= len(samples) / SAMPLE_RATE_HZ <= 0.7 and 0.2 < float(np.abs(samples).max()) < 0.8

    def _encode(self, samples: FloatArray, rate_hz: int, container: str, codec: str) -> bytes:
        out = io.BytesIO()
        frame = self._av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate_hz
        with self._av.open(out, "w", format=container) as file:
            stream = file.add_stream(codec, rate=rate_hz, layout="mono")
            for packet in [*stream.encode(frame), *stream.encode(None)]:
                file.mux(packet)
        return out.getvalue()


def wav_sizes(data: memoryview) -> tuple[int, int]:
    """Bytes of samples that a wav's header promises, and those that follow it.

    Both are 0 for what is no wav, or is one that was written as a stream, whose header does not know.
    """
    if bytes(data[:4]) != b"RIFF" or bytes(data[8:12]) != b"WAVE":
        return 0, 0
    start = 12
    while start + 8 <= len(data):
        name, size_bytes = struct.unpack_from("<4sI", data, start)
        start += 8
        if name == b"data":
            return (size_bytes, len(data) - start) if size_bytes < _UNKNOWN_SIZE_BYTES else (0, 0)
        start += size_bytes + size_bytes % 2
    return 0, 0
