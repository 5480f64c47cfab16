"""Video files to the frames that were on display at regular moments, so many a second.

Reads what it needs of the file and no more, turns frames as the file says and makes large ones smaller, so that a clip
takes a bounded amount of memory. Its sound is the audio decoder's. Programs whose model sees call it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.errors import EnvironmentProblem, InvalidRequest, UnsupportedMedia
from runtime.programs.loading import require_module
from runtime.programs.media.audio import FileBytes
from runtime.programs.media.image import check_aspect_ratio

FORMATS = ("mp4", "mov", "webm", "mkv", "avi")
ALIASES = {"m4v": "mp4", "quicktime": "mov", "x-matroska": "mkv", "matroska": "mkv", "x-msvideo": "avi", "3gpp": "mp4"}
PARAM = "video"
_CONTAINERS = "mov,mp4,matroska,webm,avi"
"""Nothing but files that hold their own pictures: a playlist could make the decoder open other files and addresses."""
_MIN_SIDE = 4
_MISSING_SHARE, _MISSING_S = 0.1, 0.5
"""A clip that is shorter than its header says, by more than both, was cut: rounding accounts for less."""

_ASSUMED_FPS = 25
_QUARTER_TURN = 90

Frames = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """max_frames: sampled ones. Frames of more than max_frame_pixels are made smaller while they are read. What is left
    out or made smaller has to be decoded too: max_source_pixels of a frame, max_source_fps times max_s of them.
    """

    max_s: float
    max_frames: int
    max_frame_pixels: int
    max_source_pixels: int = 8192 * 4320
    max_source_fps: int = 120


class VideoDecoder:
    """EnvironmentProblem when PyAV cannot be imported."""

    formats = FORMATS

    def __init__(self, stage: str, limits: VideoLimits) -> None:
        self._av: Any = require_module("av", stage)
        self.limits = limits

    def check_format(self, name: str) -> None:
        """For the format that a client says it sends, "" if it says none: what the data is, decoding finds out."""
        name = name.lower().removeprefix("video/")
        if name and ALIASES.get(name, name) not in FORMATS:
            raise UnsupportedMedia(
                f"video format {name!r} is unknown; expected one of {', '.join(FORMATS)}", param=PARAM
            )

    def decode(self, data: FileBytes, fps: float) -> Frames:
        """uint8 [frames, height, width, 3]: what was on display at 0, 1 / fps, 2 / fps ... seconds.

        UnsupportedMedia when the data is no video or is damaged, InvalidRequest when it is more than the limits allow.
        """
        frames: list[Frames] = []
        seconds = 0.0
        try:
            for frame, seconds in self._shown(data):
                pixels: Frames | None = None
                while len(frames) / fps < seconds:
                    self._check_length(len(frames) + 1, seconds, fps)
                    pixels = self._pixels(frame) if pixels is None else pixels
                    frames.append(pixels)
        except self._av.error.DecoderNotFoundError as exc:
            raise EnvironmentProblem(
                f"the video decoder of this installation (PyAV {self._av.__version__}) lacks a codec: {exc}",
                hint="send H.264 in an mp4, or install another build of av",
            ) from exc
        except (self._av.FFmpegError, EOFError) as exc:
            raise self._undecodable(getattr(exc, "strerror", None) or str(exc), seconds) from exc
        if not frames:
            raise self._undecodable("it holds no frames")
        if len({frame.shape for frame in frames}) > 1:
            raise self._undecodable("the size of its frames changes")
        return np.stack(frames)

    def _check_length(self, num_frames: int, seconds: float, fps: float) -> None:
        if seconds > self.limits.max_s:
            raise InvalidRequest(
                f"the video is longer than {self.limits.max_s:g} s", hint="send a shorter one", param=PARAM
            )
        if num_frames > self.limits.max_frames:
            raise InvalidRequest(
                f"the video has more than {self.limits.max_frames} frames at {fps:g} frames/s",
                hint="ask for fewer frames a second (mm_processor_kwargs.fps), or send a shorter video",
                param=PARAM,
            )

    def _check_number(self, num_decoded: int) -> None:
        most = self.limits.max_s * self.limits.max_source_fps
        if num_decoded > most:
            raise InvalidRequest(
                f"the video holds more than {most:.0f} frames",
                hint=f"send {self.limits.max_s:g} s at most, with {self.limits.max_source_fps} frames a second at most",
                param=PARAM,
            )

    def _check_source(self, width: int, height: int) -> None:
        if width * height > self.limits.max_source_pixels:
            raise InvalidRequest(
                f"the video's frames are {width} x {height}; at most {self.limits.max_source_pixels} pixels are taken",
                hint="send it in a smaller size",
                param=PARAM,
            )

    def _shown(self, data: FileBytes) -> Iterator[tuple[Any, float]]:
        """(frame, until when it is on display), the first one from 0 s on. At the end it is checked that none are
        missing.
        """
        file = io.BytesIO(bytes(data))
        if file.getbuffer().nbytes == 0:
            raise self._undecodable("it is empty (0 bytes)")
        with self._av.open(file, options={"format_whitelist": _CONTAINERS}) as container:
            if not container.streams.video:
                raise self._undecodable("it has no video track")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            self._check_source(stream.codec_context.width, stream.codec_context.height)
            promised_s, found_s = (container.duration or 0) / self._av.time_base, 0.0
            self._check_length(0, promised_s, 1.0)
            frame_s = float(1 / (stream.average_rate or _ASSUMED_FPS))
            last, start_s, num_frames = None, 0.0, 0
            for packet in container.demux():
                if packet.pts is not None:
                    found_s = max(found_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
                for frame in packet.decode() if packet.stream_index == stream.index else ():
                    now_s = num_frames * frame_s if frame.time is None else frame.time
                    num_frames += 1
                    self._check_number(num_frames)
                    self._check_source(frame.width, frame.height)
                    if last is None:
                        start_s = now_s
                    else:
                        yield last, now_s - start_s
                    last = frame
            if last is not None:
                yield last, now_s - start_s + frame_s
            found_s -= (container.start_time or 0) / self._av.time_base
            if promised_s - found_s > max(_MISSING_S, _MISSING_SHARE * promised_s):
                raise self._undecodable(
                    f"its header promises {promised_s:.2f} s, and {found_s:.2f} s are there: it is damaged"
                )

    def _pixels(self, frame: Any) -> Frames:
        if frame.is_corrupt:
            raise self._undecodable("a frame is damaged")
        width, height = frame.width, frame.height
        check_aspect_ratio("video", width, height, PARAM)
        if min(width, height) < _MIN_SIDE:
            raise self._undecodable(f"its frames are {width} x {height} pixels")
        shrink = math.sqrt(min(1.0, self.limits.max_frame_pixels / (width * height)))
        if shrink < 1.0:
            width, height = (max(_MIN_SIDE, int(side * shrink) // 2 * 2) for side in (width, height))
        pixels = frame.to_ndarray(format="rgb24", width=width, height=height, interpolation="BICUBIC")
        return np.rot90(pixels, frame.rotation // _QUARTER_TURN)

    def _undecodable(self, reason: str, seconds: float = 0.0) -> UnsupportedMedia:
        where = f" after {seconds:.2f} s" if seconds else ""
        return UnsupportedMedia(
            f"the video cannot be decoded{where}: {reason}; expected one of {', '.join(FORMATS)}", param=PARAM
        )
