"""Clips for tests: each frame of one colour, so that it says which one it is; lossless, with a sound track if asked."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np
import numpy.typing as npt

SAMPLE_RATE_HZ = 16_000
Frames = npt.NDArray[np.uint8]


def grey_frames(num_frames: int, height: int = 32, width: int = 48) -> Frames:
    """uint8 [frames, height, width, 3]: frame n has the grey 8 n, its left half is brighter by 4."""
    frames = np.zeros((num_frames, height, width, 3), np.uint8)
    frames += (8 * np.arange(num_frames, dtype=np.uint8) % 240)[:, None, None, None]
    frames[:, :, : width // 2] += 4
    return frames


def video_file(
    frames: Frames,
    fps: int,
    *,
    container: str = "matroska",
    codec: str = "ffv1",
    pixels: str = "bgr0",
    times: list[int] | None = None,
    sound: npt.NDArray[np.float32] | None = None,
) -> bytes:
    """times: of the frames, in 1 / fps. sound: samples [n] at 16 kHz, kept as they are where the container can."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=fps, width=frames.shape[2], height=frames.shape[1])
        stream.pix_fmt = pixels
        track: Any = None
        if sound is not None:
            track = file.add_stream("pcm_f32le" if container == "matroska" else "aac", rate=SAMPLE_RATE_HZ)
            track.layout = "mono"
        for number, pixels_of_one in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels_of_one, format="rgb24")
            frame.pts = number if times is None else times[number]
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        if track is not None:
            block = av.AudioFrame.from_ndarray(
                sound[None], format="flt" if container == "matroska" else "fltp", layout="mono"
            )
            block.sample_rate = SAMPLE_RATE_HZ
            file.mux([*track.encode(block), *track.encode(None)])
    return out.getvalue()
