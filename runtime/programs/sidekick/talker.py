"""Program `sidekick.talker`: text, as it is written, to the latents and the F0 of speech, clause by clause.

Owns the cutting of a request's text into pieces, their pronunciation and the pauses between them. What comes out
depends on the text and the speed alone, not on how the text was split on its way nor on other requests. Knows
nothing of waveforms. The module engine calls it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import Field

from runtime.engines.base import End, LoadContext, StageWork
from runtime.engines.module import ModuleResult
from runtime.errors import InvalidRequest, OmniError, StageError, WeightsError
from runtime.payload import Payload
from runtime.plan import PayloadKind, Strict
from runtime.programs.loading import open_session, read_settings, require_files, require_module
from runtime.programs.sidekick.speakable import Boundary, CutRules, Piece, SpeakableCutter

log = logging.getLogger(__name__)

SAMPLE_RATE_HZ = 24_000
FRAMES_PER_S = 80
VOICES = ("heart",)
MIN_SPEED, MAX_SPEED = 0.25, 4.0
MAX_PHONEMES = 400
"""The library's own bound for what the network gets at once."""

PAUSE_S = {
    Boundary.CLAUSE: 0.28,
    Boundary.LENGTH: 0.05,
    Boundary.SENTENCE: 0.5,
    Boundary.LINE: 0.5,
    Boundary.END: 0.5,
}
"""Silence kept at most between the end of a piece and the sound of the next, at speed 1. The network begins each piece
with 0.3 s of silence and ends it with 0.45 s, whatever follows; inside of a sentence it makes 0.1 to 0.35 s at a comma.
"""
LEAD_S = 0.05
"""Of which so much belongs to the beginning of the next piece, so that its first sound is not cut."""

ENERGY_CHANNEL = 129
SILENT_ENERGY = -0.8
"""Frames below this are at -70 dB or less."""

FloatArray = npt.NDArray[np.float32]
Network = Callable[[Sequence[int], float], tuple[FloatArray, FloatArray]]
"""(phoneme ids, speed) -> latents [130, n], f0 [n]."""
Pronounce = Callable[[str], str]
"""Text -> phonemes, "" when it cannot be said."""


class TalkerSettings(Strict):
    clause_min_chars: tuple[Annotated[int, Field(ge=1)], ...] = Field(CutRules().clause_min_chars, min_length=1)
    max_chars: tuple[Annotated[int, Field(ge=20)], ...] = Field(CutRules().max_chars, min_length=1)
    max_frames_per_phoneme: float = Field(16.0, gt=0, description="at speed 1; speech has 4 to 6")
    max_batch: int = Field(4, gt=0)


@dataclass(slots=True)
class RequestState:
    request_id: str
    epoch: int
    speed: float
    cutter: SpeakableCutter
    pieces: deque[Piece] = field(default_factory=deque)
    fed_all: bool = False
    text_chars: int = 0
    frames: int = 0
    segments: int = 0
    reason: str = "stop"


@dataclass(frozen=True, slots=True)
class _Utterance:
    """Speech of one segment and whether it had to be cut off."""

    text: str
    latents: FloatArray
    f0: FloatArray
    cut_off: bool


@dataclass(frozen=True, slots=True)
class _Step:
    """What a run made of one request; takes effect only when the whole batch has passed."""

    num_pieces: int
    utterances: list[_Utterance]
    ends: bool


class Talker:
    """Pieces go through the network one at a time, as they have different lengths and its int8 scales span a whole
    input: a batch only spares turns of the engine.
    """

    def __init__(
        self, network: Network, pronounce: Pronounce, vocabulary: Mapping[str, int], settings: TalkerSettings
    ) -> None:
        self.max_batch = settings.max_batch
        self._network, self._pronounce, self._vocabulary = network, pronounce, vocabulary
        self._rules = CutRules(settings.clause_min_chars, settings.max_chars)
        self._max_frames_per_phoneme = settings.max_frames_per_phoneme
        self._counters = {"pieces": 0.0, "frames": 0.0, "cut_off": 0.0}

    # ---- one request ---------------------------------------------------------------------------------

    def open(self, work: StageWork) -> RequestState:
        voice, speed = work.params.get("voice"), work.params.get("speed")
        if voice is not None and voice not in VOICES:
            raise InvalidRequest(f"voice: unknown voice {voice!r}; expected one of {', '.join(VOICES)}", param="voice")
        if speed is None:
            speed = 1.0
        is_number = isinstance(speed, int | float) and not isinstance(speed, bool)
        if not is_number or not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(
                f"speed: got {speed!r}; expected a number from {MIN_SPEED} to {MAX_SPEED}", param="speed"
            )
        return RequestState(work.request_id, work.epoch, float(speed), SpeakableCutter(self._rules))

    def feed(self, state: RequestState, payload: Payload) -> None:
        text = payload.meta.get("text", "")
        if not isinstance(text, str):
            raise StageError(f"talker: a payload brought text {text!r}; expected a string")
        state.text_chars += len(text)
        state.pieces += state.cutter.feed(text)
        if payload.last:
            state.pieces += state.cutter.finish()
            state.fed_all = True

    def ready(self, state: RequestState) -> bool:
        return bool(state.pieces) or state.fed_all

    # ---- a batch -------------------------------------------------------------------------------------

    def run(self, states: Sequence[RequestState]) -> Sequence[ModuleResult | OmniError]:
        steps = [self._speak_next(state) for state in states]
        return [self._commit(state, step) for state, step in zip(states, steps, strict=True)]

    def _speak_next(self, state: RequestState) -> _Step:
        """The first piece that can be said. Changes nothing of the request: a failed batch is run again."""
        num_pieces, utterances = 0, list[_Utterance]()
        for piece in state.pieces:
            num_pieces += 1
            utterances = self._speak(piece, state.speed)
            if utterances:
                break
        return _Step(num_pieces, utterances, ends=state.fed_all and num_pieces == len(state.pieces))

    def _speak(self, piece: Piece, speed: float) -> list[_Utterance]:
        """Usually one segment; several when the words have more phonemes than the network takes at once."""
        parts = _split_phonemes(self._pronounce(piece.spoken), MAX_PHONEMES)
        utterances = []
        for number, phonemes in enumerate(parts, 1):
            boundary = piece.boundary if number == len(parts) else Boundary.LENGTH
            text = piece.text if number == 1 else ""
            utterances.append(self._utter(text, phonemes, boundary, speed))
        return [u for u in utterances if len(u.f0)]

    def _utter(self, text: str, phonemes: str, boundary: Boundary, speed: float) -> _Utterance:
        ids = [0, *(self._vocabulary[p] for p in phonemes if p in self._vocabulary), 0]
        latents, f0 = self._network(ids, speed)
        span = _sound_span(latents[ENERGY_CHANNEL], boundary, speed)
        max_frames = math.ceil((FRAMES_PER_S + self._max_frames_per_phoneme * len(ids)) / speed)
        cut_off = span.stop - span.start > max_frames
        if cut_off:
            span = slice(span.start, span.start + max_frames)
        return _Utterance(text, np.ascontiguousarray(latents[:, span]), f0[span].copy(), cut_off)

    def _commit(self, state: RequestState, step: _Step) -> ModuleResult:
        result = ModuleResult()
        for _ in range(step.num_pieces):
            state.pieces.popleft()
        for utterance in step.utterances:
            result.payloads.append(self._payload(state, utterance))
            state.segments += 1
            state.frames += len(utterance.f0)
            if utterance.cut_off:
                state.reason = "length"
                self._counters["cut_off"] += 1
            self._counters["frames"] += len(utterance.f0)
        self._counters["pieces"] += step.num_pieces
        if step.ends:
            usage = {"text_chars": float(state.text_chars), "frames": float(state.frames)}
            result.end = End(reason=state.reason, usage=usage)
        return result

    @staticmethod
    def _payload(state: RequestState, utterance: _Utterance) -> Payload:
        meta: dict[str, Any] = {"text": utterance.text, "segment": state.segments, "segment_last": True}
        if utterance.cut_off:
            meta["reason"] = "length"
        tensors = {"latents": utterance.latents, "f0": utterance.f0}
        return Payload(PayloadKind.LATENTS, state.request_id, state.epoch, meta=meta, tensors=tensors)

    # ---- the stage -----------------------------------------------------------------------------------

    def facts(self) -> Mapping[str, Any]:
        return {"voices": list(VOICES), "sample_rate_hz": SAMPLE_RATE_HZ, "speed": [MIN_SPEED, MAX_SPEED]}

    def counters(self) -> Mapping[str, float]:
        return self._counters

    def close(self) -> None:
        del self._network, self._pronounce


def pronounced_somehow(pronounce: Pronounce) -> Pronounce:
    """Of a text that the library fails on, the words that it can say, and the others spelled."""

    def attempt(text: str, smaller: Callable[[str], str]) -> str:
        try:
            return pronounce(text)
        except Exception:  # it promises nothing about what it raises on odd input
            log.warning("no pronunciation for %r", text, exc_info=True)
            return smaller(text)

    def spelled(word: str) -> str:
        return attempt(" ".join(word), lambda _: "")

    return lambda text: attempt(text, lambda whole: " ".join(attempt(word, spelled) for word in whole.split()))


def _split_phonemes(phonemes: str, max_length: int) -> list[str]:
    """Parts of at most `max_length`, cut at spaces where there are any; none when nothing in them is a sound."""
    parts, rest = [], phonemes.strip()
    while len(rest) > max_length:
        space = rest.rfind(" ", 1, max_length + 1)
        cut = space if space > 0 else max_length
        parts.append(rest[:cut])
        rest = rest[cut:].strip()
    return [part for part in [*parts, rest] if any(c.isalpha() for c in part)]


def _sound_span(energy: FloatArray, boundary: Boundary, speed: float) -> slice:
    """Frames to keep: the sound, a little before it, and the pause that belongs after it. Empty without a sound."""
    loud = np.flatnonzero(energy > SILENT_ENERGY)
    if len(loud) == 0:
        return slice(0, 0)
    lead = round(LEAD_S * FRAMES_PER_S / speed)
    trail = round((PAUSE_S[boundary] - LEAD_S) * FRAMES_PER_S / speed)
    return slice(max(0, int(loud[0]) - lead), min(len(energy), int(loud[-1]) + 1 + max(0, trail)))


class OnnxNetwork:
    """`talker.onnx` as a Network."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def __call__(self, ids: Sequence[int], speed: float) -> tuple[FloatArray, FloatArray]:
        inputs = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        latents, f0 = self._session.run(("latents", "f0"), inputs)
        return latents[0], f0[0]


def load(context: LoadContext) -> Talker:
    stage = context.stage.name
    settings = read_settings(TalkerSettings, context)
    model, vocabulary = require_files(context, "talker.onnx", "vocab.json")
    context.progress("loading the talker")
    network = OnnxNetwork(open_session(model, context.num_threads, stage))
    try:
        phoneme_ids = msgspec.json.decode(vocabulary.read_bytes(), type=dict[str, int])
    except msgspec.MsgspecError as exc:
        raise WeightsError(f"stage {stage}: {vocabulary} is damaged: {exc}") from exc
    context.progress("loading the pronunciation")
    pronounce = pronounced_somehow(require_module("hibari.g2p", stage).G2P())
    program = Talker(network, pronounce, phoneme_ids, settings)
    context.progress("warming up the talker")
    program._speak(Piece("Ready", "Ready to speak zorbly.", Boundary.END), speed=1.0)
    return program
