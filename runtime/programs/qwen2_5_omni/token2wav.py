"""Program `qwen2_5_omni.token2wav`: a request's codes to its waveform, all at once.

The noise that the waveform is made from reaches over the whole of it, so a request is begun when its last code is
there. Owns a request's codes. The module engine calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from runtime.engines.base import End, LoadContext, StageWork
from runtime.engines.module import ModuleResult
from runtime.errors import InvalidRequest, OmniError, StageError, WeightsError
from runtime.payload import Payload
from runtime.plan import PayloadKind, Strict
from runtime.programs.loading import read_settings
from runtime.programs.qwen2_5_omni.config import read_config
from runtime.programs.qwen2_5_omni.speakers import Speaker, choose, read_speakers
from runtime.programs.qwen2_5_omni.synthesizer import Codes, Samples, Synthesizer
from runtime.programs.qwen3_omni.checkpoint import Checkpoint

SAMPLE_RATE_HZ = 24_000
GREEDY_SEED = 0
"""Makes the noise of speech that nobody sampled."""


class Token2WavSettings(Strict):
    """There are none."""


@dataclass(slots=True)
class _State:
    request_id: str
    epoch: int
    speaker: Speaker
    seed: int | None
    """Of the codes, if they were sampled; else the request's own."""
    codes: list[Codes] = field(default_factory=list)
    """Each [1, n]."""
    num_codes: int = 0
    fed_all: bool = False


class Token2Wav:
    max_batch = 1
    """Requests have different lengths, and each is long enough to fill a device."""

    def __init__(self, synthesizer: Synthesizer, speakers: Mapping[str, Speaker]) -> None:
        self._synthesizer, self._speakers = synthesizer, speakers
        self._counters = {"codes": 0.0, "audio_s": 0.0}

    def open(self, work: StageWork) -> _State:
        speed = work.params.get("speed")
        if speed not in (None, 1):
            raise InvalidRequest(f"speed: {speed!r}; this model speaks at its own speed, 1 only", param="speed")
        seed = work.params.get("seed", work.params.get("sampling", {}).get("seed"))
        return _State(work.request_id, work.epoch, choose(self._speakers, work.params.get("voice")), seed)

    def feed(self, state: _State, payload: Payload) -> None:
        if payload.tensors:
            state.codes.append(self._checked(state, payload).copy())
            state.num_codes += state.codes[-1].shape[1]
            state.seed = payload.meta.get("seed", state.seed)
        if payload.last:
            state.fed_all = True

    def ready(self, state: _State) -> bool:
        return state.fed_all

    def run(self, states: Sequence[_State]) -> Sequence[ModuleResult | OmniError]:
        (state,) = states
        result = ModuleResult(end=End())
        if state.num_codes:
            samples = self._spoken(state)
            meta = {"sample_rate_hz": SAMPLE_RATE_HZ}
            result.payloads.append(
                Payload(PayloadKind.MEDIA, state.request_id, state.epoch, meta=meta, tensors={"samples": samples})
            )
        audio_s = state.num_codes * self._synthesizer.samples_per_code / SAMPLE_RATE_HZ
        result.end = End(usage={"audio_s": audio_s, "frames": float(state.num_codes)})
        self._counters["codes"] += state.num_codes
        self._counters["audio_s"] += audio_s
        return [result]

    def _spoken(self, state: _State) -> Samples:
        seed = GREEDY_SEED if state.seed is None else state.seed
        samples = self._synthesizer.speak(np.concatenate(state.codes, axis=1)[0], state.speaker, seed)
        if not np.isfinite(samples).all():
            raise StageError(f"token2wav: {state.num_codes} codes gave samples that are no numbers")
        return samples

    def _checked(self, state: _State, payload: Payload) -> Codes:
        """codes: int32 [1, n]; StageError when they are not what a talker sends."""
        codes, synthesizer = payload.tensors.get("codes"), self._synthesizer
        if codes is None or codes.ndim != 2 or codes.shape[0] != 1 or codes.dtype != np.int32:
            found = "none" if codes is None else f"{codes.dtype} {codes.shape}"
            raise StageError(f"token2wav: got codes {found}; expected int32 (1, n)")
        if codes.size and not 0 <= codes.min() <= codes.max() < synthesizer.num_codes:
            raise StageError(
                f"token2wav: codes {codes.min()} to {codes.max()}; expected 0 to {synthesizer.num_codes - 1}"
            )
        if state.num_codes + codes.shape[1] > synthesizer.max_codes:
            raise StageError(
                f"token2wav: more than {synthesizer.max_codes} codes, which the network cannot place",
                hint="lower the talker's max_tokens",
            )
        return codes

    def facts(self) -> Mapping[str, Any]:
        rate = SAMPLE_RATE_HZ / self._synthesizer.samples_per_code
        return {"sample_rate_hz": SAMPLE_RATE_HZ, "frames_per_s": rate, "voices": tuple(self._speakers)}

    def counters(self) -> Mapping[str, float]:
        return self._counters

    def close(self) -> None:
        del self._synthesizer


def load(context: LoadContext) -> Token2Wav:
    """ConfigError for settings that cannot be honoured, WeightsError when the checkpoint is not this model's."""
    import torch

    read_settings(Token2WavSettings, context)
    config, speakers = read_config(context), read_speakers(context)
    assert context.weights_dir is not None  # read_config has read from it
    torch.set_num_threads(context.num_threads)
    context.progress("loading the vocoder")
    try:
        synthesizer = Synthesizer(config, Checkpoint(context.weights_dir), context.devices[0])
    except RuntimeError as exc:
        raise WeightsError(
            f"stage {context.stage.name}: {context.weights_dir}: {exc}", hint="fetch the weights with `omnictl pull`"
        ) from exc
    return Token2Wav(synthesizer, speakers)
