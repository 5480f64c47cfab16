"""Program `sidekick.ear`: audio clips of a request, as files, to their text.

Owns a request's clips, limits and place in the clip at work; one window of up to 30 s a run, so that a long clip does
not hold up a short one. Knows nothing of chats or of what becomes of the text. The module engine calls it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field

from runtime.engines.base import End, LoadContext, StageWork
from runtime.engines.module import ModuleResult
from runtime.errors import InvalidRequest, OmniError, StageError, UnsupportedMedia
from runtime.payload import Payload
from runtime.plan import PayloadKind, Strict
from runtime.programs.loading import read_settings, require_files
from runtime.programs.media.audio import PARAM, SAMPLE_RATE_HZ, AudioDecoder, FloatArray
from runtime.programs.sidekick.logmel import FRAMES_PER_S, log_mel
from runtime.programs.sidekick.sound import sound_span
from runtime.programs.sidekick.transcript import (
    MAX_WINDOW_S,
    Heard,
    TimedTokens,
    complete_parts,
    first_round,
    is_speech,
    next_window,
)
from runtime.programs.sidekick.whisper import FILES, Recognizer

log = logging.getLogger(__name__)

TAIL_S = 3.0
"""Silence after a short window: the model must see that the speech is over."""
MAX_TEMPERATURE = 1.0


class EarSettings(Strict):
    compute_type: Literal["int8", "float32"] = "int8"
    max_audio_s: float = Field(120.0, gt=0, description="of all clips of a request together")
    min_window_s: float = Field(
        10.0, gt=0, le=MAX_WINDOW_S, description="the model takes time by the window; 30 is what it was trained on"
    )


class SpeechModel(Protocol):
    """What the ear needs of a recognizer; `whisper.Recognizer` is the real one."""

    first_timestamp: int

    @property
    def languages(self) -> tuple[str, ...]: ...
    def encode(self, features: FloatArray) -> Any: ...
    def detect_language(self, encoded: Any) -> str: ...
    def prompt_tokens(self, text: str) -> list[int]: ...
    def transcribe(
        self, encoded: Any, language: str, prompt: Sequence[int], temperature: float, sound_s: float
    ) -> Heard: ...
    def text(self, tokens: Sequence[int]) -> str: ...
    def language(self, code: Any) -> str: ...


@dataclass(frozen=True, slots=True)
class Clip:
    """A file as it came; `name` is what the client calls it."""

    data: Any
    index: int
    audio_format: str
    name: str


@dataclass(frozen=True, slots=True)
class Hearing:
    """A decoded clip and what has been heard of it: `samples` up to `position`, sound up to `stop`."""

    index: int
    samples: FloatArray
    position: int
    stop: int
    language: str | None
    segments: tuple[dict[str, Any], ...] = ()

    @property
    def duration_s(self) -> float:
        return len(self.samples) / SAMPLE_RATE_HZ

    @property
    def is_done(self) -> bool:
        return self.position >= self.stop


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a request is. Replaced as a whole once a run has passed."""

    clips: tuple[Clip, ...] = ()
    hearing: Hearing | None = None
    audio_s: float = 0.0
    num_tokens: int = 0
    num_windows: int = 0
    num_disbelieved: int = 0
    cut_off: bool = False


@dataclass(slots=True)
class RequestState:
    request_id: str
    epoch: int
    language: str | None
    prompt: list[int]
    temperature: float
    fed_all: bool = False
    progress: Progress = field(default_factory=Progress)


class Ear:
    """One window a step: the model takes as long for a batch as for its rows, so a batch would only delay the first."""

    max_batch = 1

    def __init__(self, model: SpeechModel, decoder: AudioDecoder, settings: EarSettings) -> None:
        self._model, self._decoder, self._settings = model, decoder, settings
        self._counters = {"audio_s": 0.0, "windows": 0.0, "disbelieved_windows": 0.0}

    # ---- one request ---------------------------------------------------------------------------------

    def open(self, work: StageWork) -> RequestState:
        language, prompt = work.params.get("language"), work.params.get("prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise InvalidRequest(f"prompt: got {prompt!r}; expected text", param="prompt")
        return RequestState(
            work.request_id,
            work.epoch,
            language=None if language is None else self._model.language(language),
            prompt=self._model.prompt_tokens(prompt or ""),
            temperature=_temperature(work.params.get("temperature")),
        )

    def feed(self, state: RequestState, payload: Payload) -> None:
        if payload.tensors:
            data = payload.tensors.get("data")
            if data is None or data.dtype != np.uint8 or data.ndim != 1:
                raise StageError(
                    f"ear: a payload brought {sorted(payload.tensors)}; expected the bytes of a file in data"
                )
            index = int(payload.meta.get("index", 0))
            name = str(payload.meta.get("name", f"audio clip {index}"))
            clip = Clip(data, index, str(payload.meta.get("format", "")), name)
            self._decoder.check_format(clip.audio_format)
            state.progress = replace(state.progress, clips=(*state.progress.clips, clip))
        state.fed_all = state.fed_all or payload.last

    def ready(self, state: RequestState) -> bool:
        return state.progress.hearing is not None or bool(state.progress.clips) or state.fed_all

    # ---- a batch -------------------------------------------------------------------------------------

    def run(self, states: Sequence[RequestState]) -> Sequence[ModuleResult | OmniError]:
        steps = [self._step(state) for state in states]
        results: list[ModuleResult | OmniError] = []
        for state, step in zip(states, steps, strict=True):
            results.append(step if isinstance(step, OmniError) else self._commit(state, step))
        return results

    def _step(self, state: RequestState) -> Progress | OmniError:
        """One window further. Changes nothing of the request: a batch in which another one fails is run again."""
        progress = state.progress
        try:
            if progress.hearing is None and progress.clips:
                progress = self._decode_next(progress, state.language)
        except OmniError as exc:
            return exc
        if progress.hearing is None or progress.hearing.is_done:
            return progress
        return self._hear_window(state, progress, progress.hearing)

    def _decode_next(self, progress: Progress, language: str | None) -> Progress:
        clip, *others = progress.clips
        max_s = self._settings.max_audio_s
        try:
            samples = self._decoder.decode(clip.data, max_s - progress.audio_s)
        except UnsupportedMedia as exc:
            raise UnsupportedMedia(f"{clip.name}: {exc.message}", param=exc.param) from exc
        audio_s = progress.audio_s + len(samples) / SAMPLE_RATE_HZ
        if audio_s > max_s:
            raise InvalidRequest(
                f"{clip.name}: the request has more than {max_s:g} s of audio",
                param=PARAM,
                hint="send less at a time; the limit is the ear's setting max_audio_s",
            )
        start, stop = sound_span(samples) or (0, 0)
        hearing = Hearing(clip.index, samples, start, stop, language)
        return replace(progress, clips=tuple(others), hearing=hearing, audio_s=audio_s)

    def _hear_window(self, state: RequestState, progress: Progress, hearing: Hearing) -> Progress:
        window = next_window(hearing.samples, hearing.position, hearing.stop)
        samples = hearing.samples[window.start : window.stop]
        passed_over = replace(hearing, position=window.stop)
        if sound_span(samples) is None:
            return replace(progress, hearing=passed_over)
        encoded = self._model.encode(log_mel(samples, self._num_frames(len(samples))))
        language = hearing.language or self._model.detect_language(encoded)
        sound_s = len(samples) / SAMPLE_RATE_HZ
        heard = self._model.transcribe(encoded, language, state.prompt, state.temperature, sound_s)
        progress = replace(
            progress, num_windows=progress.num_windows + 1, num_tokens=progress.num_tokens + heard.num_steps
        )
        if not self._believes(heard):
            log.info(
                "request %s: clip %d: %.1f to %.1f s disbelieved: no_speech_prob %.2f, avg_logprob %.2f, %d tokens",
                state.request_id,
                hearing.index,
                window.start / SAMPLE_RATE_HZ,
                window.stop / SAMPLE_RATE_HZ,
                heard.no_speech_prob,
                heard.average_log_prob,
                len(heard.tokens),
            )
            return replace(progress, hearing=passed_over, num_disbelieved=progress.num_disbelieved + 1)
        parts, position = complete_parts(heard, self._model.first_timestamp, window)
        segments = tuple(self._segment(part, heard, window.start / SAMPLE_RATE_HZ) for part in parts)
        hearing = replace(hearing, position=position, language=language, segments=(*hearing.segments, *segments))
        is_cut_off = progress.cut_off or (heard.cut_off and position == window.stop)
        return replace(progress, hearing=hearing, cut_off=is_cut_off)

    def _believes(self, heard: Heard) -> bool:
        words = [token for token in heard.tokens if token < self._model.first_timestamp]
        return is_speech(heard, self._model.text(words[: first_round(words)]))

    def _segment(self, part: TimedTokens, heard: Heard, offset_s: float) -> dict[str, Any]:
        """How sure the model is, it says of a window: that is what each of its segments has."""
        return {
            "start": round(offset_s + part.start_s, 3),
            "end": round(offset_s + part.end_s, 3),
            "text": self._model.text(part.tokens),
            "tokens": list(part.tokens),
            "avg_logprob": heard.average_log_prob,
            "no_speech_prob": heard.no_speech_prob,
        }

    def _num_frames(self, num_samples: int) -> int:
        """Whole seconds of spectrogram for a window: itself and some silence, within the model's bounds."""
        window_s = max(self._settings.min_window_s, num_samples / SAMPLE_RATE_HZ + TAIL_S)
        return min(math.ceil(window_s), int(MAX_WINDOW_S)) * FRAMES_PER_S

    def _commit(self, state: RequestState, progress: Progress) -> ModuleResult:
        result = ModuleResult()
        hearing = progress.hearing
        self._counters["windows"] += progress.num_windows - state.progress.num_windows
        self._counters["disbelieved_windows"] += progress.num_disbelieved - state.progress.num_disbelieved
        if hearing is not None and hearing.is_done:
            result.payloads.append(_transcript(state, hearing))
            self._counters["audio_s"] += hearing.duration_s
            progress = replace(progress, hearing=None)
        state.progress = progress
        if state.fed_all and progress.hearing is None and not progress.clips:
            usage = {"audio_s": progress.audio_s, "completion_tokens": float(progress.num_tokens)}
            result.end = End(reason="length" if progress.cut_off else "stop", usage=usage)
        return result

    # ---- the stage -----------------------------------------------------------------------------------

    def facts(self) -> Mapping[str, Any]:
        return {
            "audio_formats": list(self._decoder.formats),
            "languages": list(self._model.languages),
            "max_audio_s": self._settings.max_audio_s,
            "compute_type": self._settings.compute_type,
        }

    def counters(self) -> Mapping[str, float]:
        return self._counters

    def close(self) -> None:
        del self._model


def _temperature(value: Any) -> float:
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_TEMPERATURE:
        raise InvalidRequest(
            f"temperature: got {value!r}; expected a number from 0 to {MAX_TEMPERATURE:g}", param="temperature"
        )
    return float(value)


def _transcript(state: RequestState, hearing: Hearing) -> Payload:
    meta = {
        "text": "".join(segment["text"] for segment in hearing.segments).strip(),
        "index": hearing.index,
        "language": hearing.language or "",
        "duration_s": hearing.duration_s,
        "segments": [{**segment, "text": segment["text"].strip()} for segment in hearing.segments],
    }
    return Payload(PayloadKind.TEXT, state.request_id, state.epoch, meta=meta)


def load(context: LoadContext) -> Ear:
    settings = read_settings(EarSettings, context)
    folder = require_files(context, *FILES)[0].parent
    context.progress("testing the audio decoder")
    decoder = AudioDecoder(context.stage.name)
    context.progress("loading the speech recognizer")
    model = Recognizer(folder, settings.compute_type, context.num_threads, context.stage.name)
    program = Ear(model, decoder, settings)
    context.progress("warming up the speech recognizer")
    tone = np.sin(np.arange(SAMPLE_RATE_HZ, dtype=np.float32) * 0.2)
    model.transcribe(model.encode(log_mel(tone, program._num_frames(len(tone)))), "en", [], 0.0, sound_s=1.0)
    return program
