"""The media of a chat request: files come in, in any order; what a model's preprocessing takes goes out, in the order
of the messages. Keeps to the limits of the stage and refuses by the client's name of the file.

Knows no model. The programs of stages that hear and see use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from runtime.errors import ConfigError, InvalidRequest, StageError, UnsupportedMedia, UnsupportedValue
from runtime.payload import Payload
from runtime.plan import Strict
from runtime.programs.media.audio import SAMPLE_RATE_HZ, AudioDecoder, FloatArray
from runtime.programs.media.image import ImageDecoder
from runtime.programs.media.video import Frames, VideoDecoder, VideoLimits

PARAM = "messages"
OPTIONS = "mm_processor_kwargs"
MAX_COUNTS = {"audio": 16, "image": 16, "video": 4}
"""Of a request."""
MAX_FRAME_PIXELS = 768 * 32 * 32
"""What the preprocessing of these models makes larger frames down to, in one piece, for which there may be no room."""


MIN_CLIP_SAMPLES = 400
"""The window of the spectrogram that the models hear."""


class MediaLimits(Strict):
    """Settings of a stage. Each bounds all media of its kind in a request together, but max_video_s each video."""

    max_audio_s: float = Field(600.0, gt=0)
    max_image_pixels: int = Field(50_000_000, ge=1)
    max_video_s: float = Field(120.0, gt=0)
    max_video_frames: int = Field(256, ge=1, description="that the model sees")
    video_fps: float = Field(2.0, gt=0, description="frames that the model sees of a second, where a request says none")


def split_settings(given: Mapping[str, Any], where: str) -> tuple[MediaLimits, dict[str, Any]]:
    """(limits, the settings that are none). ConfigError naming `where` and what is out of range."""
    own = {name: value for name, value in given.items() if name in MediaLimits.model_fields}
    try:
        limits = MediaLimits(**own)
    except ValidationError as exc:
        problems = tuple(f"{error['loc'][0]}: {error['input']!r}: {error['msg']}" for error in exc.errors())
        raise ConfigError(f"{where}: {'; '.join(problems)}", problems=problems) from exc
    return limits, {name: value for name, value in given.items() if name not in own}


@dataclass(frozen=True, slots=True)
class MediaOptions:
    fps: float
    use_audio_in_video: bool = False


class MediaDecoders:
    """What the requests of a stage share. EnvironmentProblem when a decoder's library cannot be imported, ConfigError
    for a video_fps that cannot be.

    steps_per_s: positions in the prompt that a second of video takes, times the frames that are one for the model. The
    rates at which frames are sampled divide it, so that every frame has a whole position.
    """

    def __init__(self, stage: str, limits: MediaLimits, steps_per_s: int) -> None:
        self.limits, self.steps_per_s = limits, steps_per_s
        if not self._divides(limits.video_fps):
            raise ConfigError(f"stage {stage}: video_fps: {limits.video_fps:g}; {self._expected_fps}")
        self.audio, self.image = AudioDecoder(stage), ImageDecoder(stage)
        self.video = VideoDecoder(
            stage, VideoLimits(limits.max_video_s, limits.max_video_frames, max_frame_pixels=MAX_FRAME_PIXELS)
        )

    def options(self, params: Mapping[str, Any]) -> MediaOptions:
        """Of a request. InvalidRequest naming the option that cannot be honoured."""
        given = {name: value for name, value in params.get(OPTIONS, {}).items() if value is not None}
        for name in given:
            if name not in ("fps", "use_audio_in_video"):
                raise UnsupportedValue(f"{OPTIONS}.{name}: expected fps or use_audio_in_video", param=OPTIONS)
        sound, fps = given.get("use_audio_in_video", False), given.get("fps", self.limits.video_fps)
        if not isinstance(sound, bool):
            raise InvalidRequest(f"{OPTIONS}.use_audio_in_video: {sound!r}; expected true or false", param=OPTIONS)
        is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
        if not is_number or fps <= 0 or not self._divides(fps):
            raise InvalidRequest(f"{OPTIONS}.fps: {fps!r}; {self._expected_fps}", param=OPTIONS)
        return MediaOptions(float(fps), sound)

    def _divides(self, fps: float) -> bool:
        return (self.steps_per_s / fps).is_integer()

    @property
    def _expected_fps(self) -> str:
        return f"expected a number that divides {self.steps_per_s}, such as 0.5, 1 or 2"

    def facts(self) -> dict[str, Any]:
        return {
            "audio_formats": self.audio.formats,
            "image_formats": self.image.formats,
            "video_formats": self.video.formats,
        }


@dataclass(slots=True)
class RequestMedia:
    """One request's. Numbers count over all its media, whatever they are."""

    decoders: MediaDecoders
    options: MediaOptions
    _clips: dict[int, FloatArray] = field(default_factory=dict)
    """Samples at 16 kHz, of audio and, if the request wants it, of the sound of videos."""
    _images: dict[int, Any] = field(default_factory=dict)
    _videos: dict[int, Frames] = field(default_factory=dict)

    def take(self, payload: Payload) -> None:
        """A file: tensor data uint8 [n]; meta index, modality, format and the client's name for it."""
        index, modality = payload.meta["index"], payload.meta.get("modality", "audio")
        name, data = payload.meta.get("name") or f"{modality} {index}", payload.tensors["data"]
        with _named(name):
            if modality == "audio":
                self.decoders.audio.check_format(payload.meta.get("format", ""))
                self._hear(index, data)
            elif modality == "image":
                self.decoders.image.check_format(payload.meta.get("format", ""))
                used = sum(image.width * image.height for image in self._images.values())
                self._images[index] = self.decoders.image.decode(data, self.decoders.limits.max_image_pixels - used)
            elif modality == "video":
                self.decoders.video.check_format(payload.meta.get("format", ""))
                self._see(index, data)
            else:
                raise StageError(f"{modality!r} is no medium")

    def _see(self, index: int, data: Any) -> None:
        self._videos[index] = self.decoders.video.decode(data, self.options.fps)
        limit = self.decoders.limits.max_video_frames
        if sum(map(len, self._videos.values())) > limit:
            raise InvalidRequest(
                f"the request has more than {limit} frames of video at {self.options.fps:g} frames/s",
                hint=f"ask for fewer frames a second ({OPTIONS}.fps), or send less video",
            )
        if self.options.use_audio_in_video:
            try:
                self._hear(index, data)
            except UnsupportedMedia as exc:
                exc.hint = f"leave out {OPTIONS}.use_audio_in_video, or send a video with sound"
                raise

    def _hear(self, index: int, data: Any) -> None:
        max_s = self.decoders.limits.max_audio_s
        left_s = max_s - sum(map(len, self._clips.values())) / SAMPLE_RATE_HZ
        samples = self.decoders.audio.decode(data, left_s)
        if len(samples) > left_s * SAMPLE_RATE_HZ:
            raise InvalidRequest(
                f"the request has more than {max_s:g} s of audio",
                hint="send less at a time; the limit is the thinker's setting max_audio_s",
            )
        if len(samples) < MIN_CLIP_SAMPLES:
            raise InvalidRequest(
                f"the audio has {len(samples)} samples at {SAMPLE_RATE_HZ} Hz; expected at least {MIN_CLIP_SAMPLES}"
            )
        self._clips[index] = samples

    def for_prompt(self, order: Sequence[tuple[str, int]]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """(media, options) of a Prompt for the (modality, index) of the parts of its messages."""
        self._check(order)
        sounds = [index for modality, index in order if modality == "audio" or index in self._clips]
        media = {
            "audio": [(self._clips[index], SAMPLE_RATE_HZ) for index in sounds],
            "image": [self._images[index] for modality, index in order if modality == "image"],
            "video": [self._videos[index] for modality, index in order if modality == "video"],
        }
        options: dict[str, Any] = {"fps": self.options.fps} if self._videos else {}
        if self._videos and self.options.use_audio_in_video:
            options["use_audio_in_video"] = True
        return {modality: items for modality, items in media.items() if items}, options

    def _check(self, order: Sequence[tuple[str, int]]) -> None:
        counts = Counter(modality for modality, _ in order)
        for modality, count in counts.items():
            if count > MAX_COUNTS[modality]:
                raise InvalidRequest(
                    f"{PARAM}: {count} of {modality}; the limit is {MAX_COUNTS[modality]}", param=PARAM
                )
        if self.options.use_audio_in_video and counts["audio"] and counts["video"]:
            raise InvalidRequest(
                f"{OPTIONS}.use_audio_in_video: the model takes the sound of videos, or audio clips, not both",
                hint="send the clips in a request of their own",
                param=OPTIONS,
            )
        found = {"audio": self._clips, "image": self._images, "video": self._videos}
        missing = [f"{modality} {index}" for modality, index in order if index not in found[modality]]
        if missing:
            raise StageError(f"{PARAM}: no data of {missing[0]} came")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """What a medium is refused for, with its name."""
    try:
        yield
    except InvalidRequest as exc:
        exc.message, exc.param = f"{name}: {exc.message}", PARAM
        raise
