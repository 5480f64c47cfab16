"""Program `sidekick.code2wav`: the talker's latents to a waveform, chunk by chunk, while the talker goes on.

Owns a request's segments (one per clause), its place in them and its synthesizer. The network sees a chunk with the
frames around it, within its segment; the signal processing runs through the whole request. Knows nothing of texts.
The module engine calls it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import Field

from runtime.engines.base import End, LoadContext, StageWork
from runtime.engines.module import ModuleResult
from runtime.errors import InvalidRequest, OmniError, StageError, WeightsError
from runtime.payload import Payload
from runtime.plan import PayloadKind, Strict
from runtime.programs.loading import open_session, read_settings, require_files
from runtime.programs.media.playback import Player
from runtime.programs.sidekick.chunk_policy import Chunk, ChunkPolicy
from runtime.programs.sidekick.synthesis import (
    HELD_BACK_FRAMES,
    HOP,
    NUM_BINS,
    SAMPLE_RATE_HZ,
    FloatArray,
    Spectra,
    Synthesizer,
    no_spectra,
)

NUM_CHANNELS = 130
REACH_FRAMES = 27
"""How far the network looks to either side: nine convolutions of width 7."""
MAX_SEED = 2**63

Network = Callable[[FloatArray], Spectra]
"""latents [NUM_CHANNELS, n] -> spectra of the n frames."""


class Code2WavSettings(Strict):
    first_chunk_frames: int = Field(32, gt=0)
    steady_chunk_frames: int = Field(120, gt=0)
    context_frames: int = Field(REACH_FRAMES, ge=0)
    worst_rtf: float = Field(0.8, gt=0, lt=1)
    max_batch: int = Field(4, gt=0)


@dataclass(slots=True)
class Segment:
    """Frames that belong together: latents [NUM_CHANNELS, n], f0 [n]. Complete once nothing can be added."""

    latents: FloatArray
    f0: FloatArray
    complete: bool = False

    @property
    def num_frames(self) -> int:
        return len(self.f0)

    def extend(self, latents: FloatArray, f0: FloatArray) -> None:
        self.latents = np.concatenate([self.latents, latents], axis=1)
        self.f0 = np.concatenate([self.f0, f0])


@dataclass(slots=True)
class RequestState:
    """`first_frames`, `sent_frames` and `position` (in the first segment) say where the request is."""

    request_id: str
    epoch: int
    seed: int
    synthesizer: Synthesizer
    segments: list[Segment] = field(default_factory=list)
    position: int = 0
    first_frames: int = 0
    sent_frames: int = 0
    fed_all: bool = False
    reason: str = "stop"
    player: Player = field(default_factory=Player)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a run found out about one request; takes effect only when the whole batch has passed."""

    synthesizer: Synthesizer
    samples: FloatArray
    chunk: Chunk | None
    ends: bool


class Code2Wav:
    """Rows of a batch go through the network one at a time: its dynamic int8 scales span a whole input, so in a
    common tensor each request would hear the others. A batch only spares turns of the engine.
    """

    def __init__(self, network: Network, settings: Code2WavSettings, *, reach_frames: int = REACH_FRAMES) -> None:
        self.max_batch = settings.max_batch
        self._network = network
        self._policy = ChunkPolicy(
            first_chunk_frames=settings.first_chunk_frames,
            steady_chunk_frames=settings.steady_chunk_frames,
            context_frames=settings.context_frames,
            worst_rtf=settings.worst_rtf,
            held_back_frames=HELD_BACK_FRAMES,
        )
        self._policy.require_context(reach_frames)
        self._counters = {"frames": 0.0, "chunks": 0.0, "audio_s": 0.0, "compute_s": 0.0, "underruns": 0.0}

    # ---- one request ---------------------------------------------------------------------------------

    def open(self, work: StageWork) -> RequestState:
        seed = work.params.get("seed")
        if seed is None:
            seed = secrets.randbits(32)
        elif not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < MAX_SEED:
            raise InvalidRequest(f"seed: got {seed!r}; expected a whole number from 0 to {MAX_SEED - 1}", param="seed")
        return RequestState(work.request_id, work.epoch, seed, Synthesizer(seed))

    def feed(self, state: RequestState, payload: Payload) -> None:
        if payload.tensors:
            latents, f0 = _checked(payload)
            if state.segments and not state.segments[-1].complete:
                segment = state.segments[-1]
                segment.extend(latents, f0)
            else:
                segment = Segment(latents, f0)
                if len(f0):
                    state.segments.append(segment)
            segment.complete = bool(payload.meta.get("segment_last", True))
        if payload.meta.get("reason") == "length":
            state.reason = "length"
        if payload.last:
            state.fed_all = True
            for segment in state.segments:
                segment.complete = True

    def ready(self, state: RequestState) -> bool:
        return self._next_chunk(state) is not None or (state.fed_all and not state.segments)

    def _next_chunk(self, state: RequestState) -> Chunk | None:
        if not state.segments:
            return None
        segment = state.segments[0]
        size = self._policy.size(state.first_frames, state.sent_frames)
        return self._policy.next_chunk(size, state.position, segment.num_frames, complete=segment.complete)

    # ---- a batch -------------------------------------------------------------------------------------

    def run(self, states: Sequence[RequestState]) -> Sequence[ModuleResult | OmniError]:
        started_s = time.thread_time()
        steps = [self._decode(state) for state in states]
        self._counters["compute_s"] += time.thread_time() - started_s
        return [self._commit(state, step) for state, step in zip(states, steps, strict=True)]

    def _decode(self, state: RequestState) -> _Step:
        """Changes nothing of the request: a batch in which another one fails is run again."""
        synthesizer, chunk = state.synthesizer.fork(), self._next_chunk(state)
        if chunk is None:
            samples = synthesizer.push(no_spectra(), np.zeros(0, np.float32), last=True)
            return _Step(synthesizer, samples, None, ends=True)
        segment = state.segments[0]
        spectra = self._network(segment.latents[:, chunk.context_start : chunk.context_stop])
        wanted = spectra.part(chunk.start - chunk.context_start, chunk.stop - chunk.context_start)
        ends = state.fed_all and len(state.segments) == 1 and chunk.stop == segment.num_frames
        samples = synthesizer.push(wanted, segment.f0[chunk.start : chunk.stop], last=ends)
        if not np.isfinite(samples).all():
            raise StageError(
                f"code2wav: frames {chunk.start} to {chunk.stop} of a segment gave samples that are no numbers"
            )
        return _Step(synthesizer, np.clip(samples, -1.0, 1.0), chunk, ends)

    def _commit(self, state: RequestState, step: _Step) -> ModuleResult:
        state.synthesizer = step.synthesizer
        if step.chunk is not None:
            self._advance(state, step.chunk)
        result = ModuleResult()
        if len(step.samples):
            self._note_arrival(state, len(step.samples) / SAMPLE_RATE_HZ)
            meta = {"sample_rate_hz": SAMPLE_RATE_HZ, "seed": state.seed}
            result.payloads.append(
                Payload(PayloadKind.MEDIA, state.request_id, state.epoch, meta=meta, tensors={"samples": step.samples})
            )
        if step.ends:
            audio_s = state.sent_frames * HOP / SAMPLE_RATE_HZ
            usage = {"audio_s": audio_s, "frames": float(state.sent_frames)}
            result.end = End(reason=state.reason, usage=usage)
        return result

    def _advance(self, state: RequestState, chunk: Chunk) -> None:
        state.first_frames = state.first_frames or chunk.num_frames
        state.sent_frames += chunk.num_frames
        state.position = chunk.stop
        segment = state.segments[0]
        if segment.complete and chunk.stop == segment.num_frames:
            state.segments.pop(0)
            state.position = 0
        self._counters["chunks"] += 1
        self._counters["frames"] += chunk.num_frames

    def _note_arrival(self, state: RequestState, audio_s: float) -> None:
        """Follow a player who starts with the first samples; count how often it has nothing left to play."""
        self._counters["underruns"] += state.player.add(audio_s, time.monotonic())
        self._counters["audio_s"] += audio_s

    # ---- the stage -----------------------------------------------------------------------------------

    def facts(self) -> Mapping[str, Any]:
        policy = self._policy
        return {
            "sample_rate_hz": SAMPLE_RATE_HZ,
            "frames_per_s": SAMPLE_RATE_HZ / HOP,
            "first_chunk_frames": policy.first_chunk_frames,
            "steady_chunk_frames": policy.steady_chunk_frames,
            "context_frames": policy.context_frames,
        }

    def counters(self) -> Mapping[str, float]:
        return self._counters

    def close(self) -> None:
        del self._network


def _checked(payload: Payload) -> tuple[FloatArray, FloatArray]:
    """latents and f0 of a payload; StageError when they are not what a talker sends."""
    latents, f0 = payload.tensors.get("latents"), payload.tensors.get("f0")
    if latents is None or f0 is None:
        raise StageError(f"code2wav: a payload brought {sorted(payload.tensors)}; expected latents and f0")
    if latents.ndim != 2 or f0.shape != latents.shape[1:] or latents.shape[0] != NUM_CHANNELS:
        raise StageError(
            f"code2wav: got latents {latents.shape} and f0 {f0.shape}; expected ({NUM_CHANNELS}, n) and (n,)"
        )
    if latents.dtype != np.float32 or f0.dtype != np.float32:
        raise StageError(f"code2wav: got latents {latents.dtype} and f0 {f0.dtype}; expected float32")
    if not (np.isfinite(latents).all() and np.isfinite(f0).all()):
        raise StageError("code2wav: latents or f0 hold values that are no numbers")
    return latents, f0


class OnnxNetwork:
    """`code2wav.onnx` as a Network."""

    _OUTPUTS = ("lh", "theta", "ln", "lr", "phi")

    def __init__(self, session: Any) -> None:
        self._session = session

    def __call__(self, latents: FloatArray) -> Spectra:
        outputs = self._session.run(self._OUTPUTS, {"latents": np.ascontiguousarray(latents[None])})
        return Spectra(*(np.ascontiguousarray(output[0].T) for output in outputs))


def load(context: LoadContext) -> Code2Wav:
    settings = read_settings(Code2WavSettings, context)
    (path,) = require_files(context, "code2wav.onnx")
    context.progress("loading the vocoder")
    network = OnnxNetwork(open_session(path, context.num_threads, context.stage.name))
    program = Code2Wav(network, settings)
    context.progress("warming up the vocoder")
    num_frames = settings.first_chunk_frames + settings.context_frames
    spectra = network(np.zeros((NUM_CHANNELS, num_frames), np.float32))
    if any(part.shape != (num_frames, NUM_BINS) for part in spectra):
        raise WeightsError(
            f"stage {context.stage.name}: {path} gave {[part.shape for part in spectra]} for {num_frames} frames;"
            f" expected five of {(num_frames, NUM_BINS)}",
            hint="fetch the weights again with `omnictl pull`",
        )
    return program
