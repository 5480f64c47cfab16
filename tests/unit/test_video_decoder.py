"""Video files as they come: which frames are taken, turned and shrunk ones, cut and odd ones."""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import av
import numpy as np
import pytest

from runtime.errors import InvalidRequest, UnsupportedMedia
from runtime.programs.media.audio import AudioDecoder
from runtime.programs.media.video import VideoDecoder, VideoLimits
from tests.video import Frames, grey_frames, video_file

LIMITS = VideoLimits(max_s=10, max_frames=16, max_frame_pixels=100_000)


@pytest.fixture(scope="module")
def decoder() -> VideoDecoder:
    return VideoDecoder("thinker", LIMITS)


def numbers(frames: Frames) -> list[int]:
    """Which frames of `grey_frames` these are."""
    return [round(float(frame[:, -4:].mean()) / 8) for frame in frames]


@pytest.mark.parametrize(("fps", "expected"), [(1, [0, 8]), (2, [0, 4, 8, 12]), (8, list(range(16))), (0.5, [0])])
def test_frames_are_those_on_display(decoder: VideoDecoder, fps: float, expected: list[int]) -> None:
    assert numbers(decoder.decode(video_file(grey_frames(16), 8), fps)) == expected


def test_pixels_come_back_as_they_were(decoder: VideoDecoder) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (4, 32, 48, 3), np.uint8)
    assert np.array_equal(decoder.decode(video_file(frames, 2), 2), frames)


def test_frames_that_are_shown_for_unequal_times(decoder: VideoDecoder) -> None:
    """As a phone records: a frame may stay on display for seconds."""
    data = video_file(grey_frames(4), 8, times=[0, 1, 17, 24])
    assert numbers(decoder.decode(data, 1)) == [0, 1, 1, 3]


def test_fewer_frames_than_asked_for_are_shown_again(decoder: VideoDecoder) -> None:
    assert numbers(decoder.decode(video_file(grey_frames(2), 1), 2)) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("container", "codec", "pixels"),
    [
        ("mp4", "libx264", "yuv420p"),
        ("mov", "mpeg4", "yuv420p"),
        ("webm", "libvpx-vp9", "yuv420p"),
        ("avi", "mjpeg", "yuvj420p"),
    ],
)
def test_containers(decoder: VideoDecoder, container: str, codec: str, pixels: str) -> None:
    decoder.check_format(f"video/{container}")
    frames = decoder.decode(video_file(grey_frames(16), 8, container=container, codec=codec, pixels=pixels), 2)
    assert frames.shape == (4, 32, 48, 3)
    assert numbers(frames) == pytest.approx([0, 4, 8, 12], abs=1)


def test_turned_as_its_header_says(decoder: VideoDecoder) -> None:
    """A phone held upright writes lying frames and a matrix."""
    data = video_file(grey_frames(4), 2, container="mp4", codec="libx264", pixels="yuv420p")
    lying = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    upright = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 32 << 16, 0, 1 << 30)
    where = data.index(b"tkhd")
    frames = decoder.decode(data[:where] + data[where:].replace(lying, upright, 1), 2)
    assert frames.shape == (4, 48, 32, 3)
    assert frames[0, :20].mean() > frames[0, -20:].mean() + 2, "the left half is not on top after a turn to the right"


def test_large_frames_are_made_smaller(decoder: VideoDecoder) -> None:
    frames = decoder.decode(video_file(grey_frames(2, 600, 800), 2), 2)
    assert frames.shape == (2, 272, 364, 3)
    assert numbers(frames) == [0, 1]


def test_its_sound_is_the_audio_decoders(decoder: VideoDecoder) -> None:
    sound = np.random.default_rng(0).uniform(-0.5, 0.5, 16_000).astype(np.float32)
    data = video_file(grey_frames(8), 8, sound=sound)
    assert decoder.decode(data, 2).shape[0] == 2
    assert np.allclose(AudioDecoder("thinker").decode(data, 10), sound, atol=1e-6)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_one_that_was_cut(decoder: VideoDecoder, container: str) -> None:
    rng = np.random.default_rng(0)
    codec, pixels = ("libx264", "yuv420p") if container == "mp4" else ("ffv1", "bgr0")
    data = video_file(
        rng.integers(0, 256, (32, 32, 48, 3), np.uint8), 8, container=container, codec=codec, pixels=pixels
    )
    with pytest.raises(UnsupportedMedia, match="the video cannot be decoded"):
        decoder.decode(data[: len(data) // 2], 2)


def test_a_cut_one_whose_header_is_in_front(decoder: VideoDecoder) -> None:
    data = video_file(np.random.default_rng(0).integers(0, 256, (32, 32, 48, 3), np.uint8), 8)
    with pytest.raises(
        UnsupportedMedia, match=r"its header promises 4.00 s, and [12]\.\d\d s are there: it is damaged"
    ):
        decoder.decode(data[: len(data) // 2], 2)


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "it is empty"), (b"no video", "Invalid data"), (bytes(5000), "Invalid data")]
)
def test_what_is_no_video(decoder: VideoDecoder, data: bytes, reason: str) -> None:
    with pytest.raises(UnsupportedMedia, match=reason):
        decoder.decode(data, 2)


def test_sound_alone(decoder: VideoDecoder) -> None:

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        track = file.add_stream("aac", rate=16_000, layout="mono")
        block = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        block.sample_rate = 16_000
        file.mux([*track.encode(block), *track.encode(None)])
    with pytest.raises(UnsupportedMedia, match="it has no video track"):
        decoder.decode(out.getvalue(), 2)


def test_a_playlist_opens_nothing(decoder: VideoDecoder) -> None:
    with pytest.raises(UnsupportedMedia):
        decoder.decode(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n", 2)


def test_too_long_is_refused_by_its_header(decoder: VideoDecoder) -> None:
    with pytest.raises(InvalidRequest, match="the video is longer than 10 s"):
        decoder.decode(video_file(grey_frames(11), 1), 1)


def test_too_many_frames(decoder: VideoDecoder) -> None:
    with pytest.raises(InvalidRequest, match="more than 16 frames at 8 frames/s") as caught:
        decoder.decode(video_file(grey_frames(17), 8), 8)
    assert "fps" in str(caught.value.hint)


def test_more_than_has_to_be_shown_is_not_decoded_without_end() -> None:
    """Few frames are wanted of either, and they are made small."""
    large = VideoDecoder("thinker", replace(LIMITS, max_source_pixels=64 * 48 - 1))
    with pytest.raises(InvalidRequest, match="frames are 64 x 48; at most 3071 pixels"):
        large.decode(video_file(np.zeros((1, 48, 64, 3), np.uint8), 1), 1)
    many = VideoDecoder("thinker", replace(LIMITS, max_s=4, max_source_fps=3))
    assert len(many.decode(video_file(grey_frames(12), 4), 1)) == 3
    with pytest.raises(InvalidRequest, match="more than 12 frames"):
        many.decode(video_file(grey_frames(13), 4), 1)


def test_all_length(decoder: VideoDecoder) -> None:
    with pytest.raises(InvalidRequest, match="the video is 1000 x 4 pixels"):
        decoder.decode(video_file(grey_frames(2, 4, 1000), 2), 2)


def test_a_format_that_nobody_knows(decoder: VideoDecoder) -> None:
    with pytest.raises(UnsupportedMedia, match="video format 'flv' is unknown; expected one of mp4"):
        decoder.check_format("video/flv")
