"""Program `qwen3_omni.code2wav`: the talker's frames of codes to a waveform, chunk by chunk, while the talker goes on.

A chunk is decoded with everything before it that it can hear, so how the frames came makes no difference to the
samples. Owns a request's frames and its place in them. The module engine calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import Field

from runtime.engines.base import End, LoadContext, StageWork
from runtime.engines.module import ModuleResult
from runtime.errors import ConfigError, InvalidRequest, OmniError, StageError, WeightsError
from runtime.payload import Payload
from runtime.plan import PayloadKind, Strict
from runtime.programs.loading import read_settings
from runtime.programs.media.playback import PlaybackPolicy, Player
from runtime.programs.qwen3_omni.checkpoint import Checkpoint
from runtime.programs.qwen3_omni.config import read_speaking_config
from runtime.programs.qwen3_omni.vocoder import Codes, Samples, Vocoder

SAMPLE_RATE_HZ = 24_000


class Code2WavSettings(Strict):
    first_chunk_frames: int = Field(4, gt=0)
    steady_chunk_frames: int = Field(25, gt=0)
    max_chunk_frames: int = Field(100, gt=0, description="at once, when so many are there")
    reserve_s: float = Field(0.25, ge=0, description="of the player's buffer that is not waited with")
    context_frames: int | None = Field(None, ge=0, description="default: as far back as the network hears")


@dataclass(slots=True)
class RequestState:
    """`frames` are the last ones, of which the first `num_sent - first` have been decoded. player: None for a request
    with a seed, which sounds the same every time to the last bit.
    """

    request_id: str
    epoch: int
    frames: Codes
    player: Player | None
    first: int = 0
    """Number of the first frame of `frames`."""
    num_sent: int = 0
    num_samples: int = 0
    fed_all: bool = False
    pending: list[Codes] = field(default_factory=list)

    @property
    def num_frames(self) -> int:
        return self.first + self.frames.shape[1] + sum(codes.shape[1] for codes in self.pending)

    @property
    def num_ready(self) -> int:
        return self.num_frames - self.num_sent


class Code2Wav:
    max_batch = 1
    """A common tensor would need a common length, and chunks are short: turns between requests cost nothing."""

    def __init__(
        self, vocoder: Vocoder, settings: Code2WavSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """ConfigError when the context is smaller than what the network hears, or chunk sizes are out of order."""
        context = vocoder.reach if settings.context_frames is None else settings.context_frames
        if context < vocoder.reach:
            raise ConfigError(
                f"context_frames {context} is smaller than the {vocoder.reach} frames that the network hears",
                hint=f"leave it out, or set it to {vocoder.reach} or more",
            )
        self._vocoder, self._context_frames, self._clock = vocoder, context, clock
        self._policy = PlaybackPolicy(
            vocoder.samples_per_frame / SAMPLE_RATE_HZ,
            settings.first_chunk_frames,
            settings.steady_chunk_frames,
            settings.max_chunk_frames,
            settings.reserve_s,
        )
        self._counters = {"frames": 0.0, "chunks": 0.0, "audio_s": 0.0, "underruns": 0.0}

    def open(self, work: StageWork) -> RequestState:
        speed = work.params.get("speed")
        if speed not in (None, 1):
            raise InvalidRequest(f"speed: {speed!r}; this model speaks at its own speed, 1 only", param="speed")
        player = Player() if work.params.get("seed") is None else None
        return RequestState(work.request_id, work.epoch, np.zeros((self._vocoder.num_groups, 0), np.int32), player)

    def feed(self, state: RequestState, payload: Payload) -> None:
        if payload.tensors:
            state.pending.append(self._checked(payload).copy())
        if payload.last:
            state.fed_all = True

    def ready(self, state: RequestState) -> bool:
        return state.fed_all or self._chunk_frames(state) > 0

    def ready_in_s(self, state: RequestState) -> float | None:
        return self._policy.wait_s(state.num_ready, state.num_sent, self._buffered_s(state))

    def _chunk_frames(self, state: RequestState) -> int:
        buffered_s = self._buffered_s(state)
        return self._policy.next_size(state.num_ready, state.num_sent, buffered_s, complete=state.fed_all)

    def _buffered_s(self, state: RequestState) -> float | None:
        return None if state.player is None else state.player.buffered_s(self._clock())

    def run(self, states: Sequence[RequestState]) -> Sequence[ModuleResult | OmniError]:
        (state,) = states
        state.frames = np.concatenate([state.frames, *state.pending], axis=1)
        state.pending.clear()
        result, num_frames = ModuleResult(), self._chunk_frames(state)
        if num_frames:
            samples = self._decoded(state, state.num_sent + num_frames)
            self._note_arrival(state, len(samples) / SAMPLE_RATE_HZ)
            result.payloads.append(self._audio(state, samples))
        if state.fed_all and state.num_sent == state.num_frames:
            usage = {"audio_s": state.num_samples / SAMPLE_RATE_HZ, "frames": float(state.num_sent)}
            result.end = End(usage=usage)
        return [result]

    def _decoded(self, state: RequestState, stop: int) -> Samples:
        """Samples up to frame `stop` that have not been sent, and the state as it is when they are.

        The network keeps the last samples of a chunk back until it knows the next frame, so a chunk begins with those
        that the one before could not make.
        """
        start = max(0, state.num_sent - 1)
        context_start = max(0, start - self._context_frames)
        codes = state.frames[:, context_start - state.first : stop - state.first]
        samples = self._vocoder.decode(codes, start - context_start)
        samples = samples[state.num_samples - start * self._vocoder.samples_per_frame :]
        if not np.isfinite(samples).all():
            raise StageError(f"code2wav: frames {state.num_sent} to {stop} gave samples that are no numbers")
        self._counters["chunks"] += 1
        self._counters["frames"] += stop - state.num_sent
        self._counters["audio_s"] += len(samples) / SAMPLE_RATE_HZ
        state.num_sent, state.num_samples = stop, state.num_samples + len(samples)
        num_old = max(0, stop - 1 - self._context_frames) - state.first
        state.frames, state.first = state.frames[:, num_old:], state.first + num_old
        return samples

    def _note_arrival(self, state: RequestState, audio_s: float) -> None:
        if state.player is not None:
            self._counters["underruns"] += state.player.add(audio_s, self._clock())

    def _audio(self, state: RequestState, samples: Samples) -> Payload:
        meta = {"sample_rate_hz": SAMPLE_RATE_HZ}
        return Payload(PayloadKind.MEDIA, state.request_id, state.epoch, meta=meta, tensors={"samples": samples})

    def _checked(self, payload: Payload) -> Codes:
        """codes: int32 [groups, n]; StageError when they are not what a talker sends."""
        codes, vocoder = payload.tensors.get("codes"), self._vocoder
        if codes is None or codes.ndim != 2 or codes.shape[0] != vocoder.num_groups or codes.dtype != np.int32:
            found = "none" if codes is None else f"{codes.dtype} {codes.shape}"
            raise StageError(f"code2wav: got codes {found}; expected int32 ({vocoder.num_groups}, n)")
        if codes.size and not 0 <= codes.min() <= codes.max() < vocoder.num_codes:
            raise StageError(f"code2wav: codes {codes.min()} to {codes.max()}; expected 0 to {vocoder.num_codes - 1}")
        return codes

    def facts(self) -> Mapping[str, Any]:
        vocoder = self._vocoder
        return {
            "sample_rate_hz": SAMPLE_RATE_HZ,
            "frames_per_s": SAMPLE_RATE_HZ / vocoder.samples_per_frame,
            "first_chunk_frames": self._policy.first_chunk_frames,
            "steady_chunk_frames": self._policy.steady_chunk_frames,
            "context_frames": self._context_frames,
        }

    def counters(self) -> Mapping[str, float]:
        return self._counters

    def close(self) -> None:
        del self._vocoder


def load(context: LoadContext) -> Code2Wav:
    """ConfigError for settings that cannot be honoured, WeightsError when the checkpoint is not this model's."""
    import torch

    settings, config = read_settings(Code2WavSettings, context), read_speaking_config(context)
    assert context.weights_dir is not None  # read_speaking_config has read from it
    torch.set_num_threads(context.num_threads)
    context.progress("loading the vocoder")
    tensors = Checkpoint(context.weights_dir).below("code2wav.")
    try:
        vocoder = Vocoder(config.code2wav, tensors, context.devices[0])
    except RuntimeError as exc:
        raise WeightsError(
            f"stage {context.stage.name}: {context.weights_dir}: {exc}", hint="fetch the weights with `omnictl pull`"
        ) from exc
    try:
        return Code2Wav(vocoder, settings)
    except ConfigError as exc:
        exc.message = f"stage {context.stage.name}: {exc.message}"
        raise
