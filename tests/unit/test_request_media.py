"""The media of a chat request: taken in any order, given in that of the messages, within the limits of the stage."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile
from PIL import Image

from runtime.errors import ConfigError, InvalidRequest, StageError, UnsupportedMedia, UnsupportedValue
from runtime.payload import Payload
from runtime.programs.media.request import MediaDecoders, MediaLimits, RequestMedia, split_settings
from tests.video import grey_frames, video_file

LIMITS = MediaLimits(max_audio_s=3, max_image_pixels=10_000, max_video_s=5, max_video_frames=6)
STEPS_PER_S = 26


@pytest.fixture(scope="module")
def decoders() -> MediaDecoders:
    return MediaDecoders("thinker", LIMITS, STEPS_PER_S)


def request(decoders: MediaDecoders, **options: Any) -> RequestMedia:
    return RequestMedia(decoders, decoders.options({"mm_processor_kwargs": options}))


def file(index: int, modality: str, data: bytes, media_format: str = "") -> Payload:
    meta = {"index": index, "modality": modality, "format": media_format, "name": f"messages[0].content[{index}]"}
    return Payload("media", "r", meta=meta, tensors={"data": np.frombuffer(data, np.uint8)})


def sound(seconds: float = 1.0) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.full(int(16_000 * seconds), 0.1, np.float32), 16_000, format="WAV", subtype="FLOAT")
    return out.getvalue()


def image(grey: int, side: int = 20) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), (grey, grey, grey)).save(out, "png")
    return out.getvalue()


def clip(num_frames: int = 4, *, with_sound: bool = False) -> bytes:
    return video_file(grey_frames(num_frames), 2, sound=np.full(16_000, 0.2, np.float32) if with_sound else None)


def test_all_of_them_in_the_order_of_the_messages(decoders: MediaDecoders) -> None:
    media = request(decoders)
    for piece in (
        file(3, "audio", sound(), "wav"),
        file(0, "image", image(10)),
        file(2, "video", clip()),
        file(4, "image", image(30), "image/png"),
        file(1, "image", image(20)),
    ):
        media.take(piece)
    order = [("image", 0), ("image", 1), ("video", 2), ("audio", 3), ("image", 4)]
    found, options = media.for_prompt(order)
    assert [picture.getpixel((0, 0))[0] for picture in found["image"]] == [10, 20, 30]
    assert [len(samples) for samples, _ in found["audio"]] == [16_000]
    assert [frames.shape for frames in found["video"]] == [(4, 32, 48, 3)]
    assert options == {"fps": 2.0}


def test_text_alone_has_no_options(decoders: MediaDecoders) -> None:
    assert request(decoders, use_audio_in_video=True).for_prompt([]) == ({}, {})


def test_the_sound_of_videos_on_request(decoders: MediaDecoders) -> None:
    media = request(decoders, use_audio_in_video=True, fps=1)
    media.take(file(0, "video", clip(with_sound=True)))
    found, options = media.for_prompt([("video", 0)])
    ((samples, rate_hz),) = found["audio"]
    assert rate_hz == 16_000
    assert np.allclose(samples, 0.2)
    assert len(found["video"][0]) == 2
    assert options == {"fps": 1.0, "use_audio_in_video": True}


def test_a_silent_video_has_no_sound_to_take(decoders: MediaDecoders) -> None:
    with pytest.raises(UnsupportedMedia, match=r"^messages\[0\]\.content\[0\]: .* no audio track") as caught:
        request(decoders, use_audio_in_video=True).take(file(0, "video", clip()))
    assert caught.value.hint == "leave out mm_processor_kwargs.use_audio_in_video, or send a video with sound"


def test_sound_of_videos_and_clips_beside(decoders: MediaDecoders) -> None:
    media = request(decoders, use_audio_in_video=True)
    media.take(file(0, "video", clip(with_sound=True)))
    media.take(file(1, "audio", sound()))
    with pytest.raises(InvalidRequest, match=r"mm_processor_kwargs\.use_audio_in_video: the model takes the sound"):
        media.for_prompt([("video", 0), ("audio", 1)])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([("audio", sound(2))] * 2, "the request has more than 3 s of audio"),
        ([("image", image(1, 80))] * 2, "the image has 80 x 80 pixels; at most 3600 are taken here"),
        ([("video", clip())] * 2, "the request has more than 6 frames of video at 2 frames/s"),
        ([("image", b""), ("video", clip())], "the image cannot be decoded: it is empty"),
    ],
)
def test_limits_hold_for_all_together(decoders: MediaDecoders, pieces: list[tuple[str, bytes]], message: str) -> None:
    media = request(decoders)

    def take_all() -> None:
        for index, (modality, data) in enumerate(pieces):
            media.take(file(index, modality, data))

    with pytest.raises(InvalidRequest) as caught:
        take_all()
    assert message in caught.value.message
    assert caught.value.message.startswith("messages[0].content[")
    assert caught.value.param == "messages"


def test_too_short_to_be_heard(decoders: MediaDecoders) -> None:
    with pytest.raises(InvalidRequest, match="the audio has 399 samples at 16000 Hz; expected at least 400"):
        request(decoders).take(file(0, "audio", sound(399 / 16_000)))


def test_too_many(decoders: MediaDecoders) -> None:
    with pytest.raises(InvalidRequest, match="messages: 17 of image; the limit is 16"):
        request(decoders).for_prompt([("image", index) for index in range(17)])


def test_one_that_never_came(decoders: MediaDecoders) -> None:
    with pytest.raises(StageError, match="no data of image 0 came"):
        request(decoders).for_prompt([("image", 0)])


@pytest.mark.parametrize("fps", [0.5, 1, 2, 13, 26])
def test_rates_that_give_every_frame_a_whole_position(decoders: MediaDecoders, fps: float) -> None:
    assert request(decoders, fps=fps).options.fps == fps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fps": 3}, "mm_processor_kwargs.fps: 3; expected a number that divides 26, such as 0.5, 1 or 2"),
        ({"fps": 0}, "mm_processor_kwargs.fps: 0; expected"),
        ({"fps": True}, "mm_processor_kwargs.fps: True; expected"),
        ({"use_audio_in_video": 1}, "mm_processor_kwargs.use_audio_in_video: 1; expected true or false"),
        ({"max_pixels": 9}, "mm_processor_kwargs.max_pixels: expected fps or use_audio_in_video"),
    ],
)
def test_options_that_cannot_be_honoured(decoders: MediaDecoders, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request(decoders, **options)
    assert caught.value.message.startswith(message)
    assert isinstance(caught.value, UnsupportedValue) == ("max_pixels" in options)


def test_a_rate_of_the_stage_that_no_request_could_have() -> None:
    with pytest.raises(ConfigError, match="stage thinker: video_fps: 3; expected a number that divides 26"):
        MediaDecoders("thinker", MediaLimits(video_fps=3), STEPS_PER_S)


def test_settings() -> None:
    limits, rest = split_settings({"max_audio_s": 7, "temperature": 0.5}, "stage thinker")
    assert limits == MediaLimits(max_audio_s=7)
    assert rest == {"temperature": 0.5}
    with pytest.raises(ConfigError, match="stage thinker: video_fps: 0: Input should be greater than 0"):
        split_settings({"video_fps": 0}, "stage thinker")
