"""Speech on the real weights: what streaming changes in the samples, and what talking and hearing cost.

Times are CPU seconds of this process, one thread a model, so that other work on the machine shows in them less than
in the clock. Sound is compared by signal-to-noise ratio: the energy of the whole utterance over that of the difference.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from hibari import dsp

from runtime.payload import Payload
from runtime.programs.sidekick import code2wav, ear, talker
from runtime.programs.sidekick.code2wav import Code2Wav, Code2WavSettings
from runtime.programs.sidekick.ear import Ear, EarSettings
from runtime.programs.sidekick.synthesis import HOP, SAMPLE_RATE_HZ, Synthesizer, no_spectra
from runtime.programs.sidekick.talker import Talker
from runtime.settings import weights_dir
from tests.bench.report import Section, write_page
from tests.golden.float_network import float_network
from tests.speech import SENTENCES, NoiseByFrame, clip, hand_over, load_context, run_request, snr_db, texts, work

WHOLE = Code2WavSettings(first_chunk_frames=10_000, steady_chunk_frames=10_000)
CHUNKS = {
    "32, then up to 120 frames (as served)": Code2WavSettings(),
    "32 frames": Code2WavSettings(first_chunk_frames=32, steady_chunk_frames=32),
    "80 frames": Code2WavSettings(first_chunk_frames=80, steady_chunk_frames=80),
}
CLIPS_S = (3, 10, 30, 60)
ROUNDS = 3


@dataclass(frozen=True)
class Speech:
    """The programs, and what the talker makes of the sentences."""

    mouth: Talker
    vocoder: Code2Wav
    listener: Ear
    latents: Sequence[Sequence[Payload]]

    def sound(self, settings: Code2WavSettings, number: int, seed: int = 1) -> np.ndarray:
        program = Code2Wav(self.vocoder._network, settings)
        return run_request(program, self.latents[number], seed=seed).samples


def load() -> Speech:
    voice = weights_dir() / "sidekick/voice"
    mouth = talker.load(load_context("talker", voice))
    latents = [hand_over(run_request(mouth, texts(sentence)).payloads, "latents") for sentence in SENTENCES]
    listener = ear.load(load_context("ear", weights_dir() / "sidekick/ear"))
    return Speech(mouth, code2wav.load(load_context("code2wav", voice)), listener, latents)


def cpu_s(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The least of several rounds."""
    times = []
    for _ in range(rounds):
        started_s = time.process_time()
        action()
        times.append(time.process_time() - started_s)
    return min(times)


# ---- samples -----------------------------------------------------------------------------------------


def signal_processing_section(speech: Speech) -> Section:
    """The same spectra, whole into the library and in chunks of 7 frames into ours."""
    worst, num_samples = 0.0, 0
    for payloads in speech.latents:
        tensors = payloads[0].tensors
        spectra, f0 = speech.vocoder._network(tensors["latents"]), tensors["f0"]
        expected = dsp.synth(*(part.T.copy() for part in spectra), f0, NoiseByFrame(1))
        synthesizer = Synthesizer(1)
        parts = [synthesizer.push(spectra.part(i, i + 7), f0[i : i + 7]) for i in range(0, len(f0), 7)]
        got = np.concatenate([*parts, synthesizer.push(no_spectra(), f0[:0], last=True)])
        assert len(got) == len(expected) == len(f0) * HOP
        worst, num_samples = max(worst, float(np.abs(got - expected).max())), num_samples + len(got)
    return Section(
        heading="Signal processing alone",
        about="The spectra of the sentences' first clauses, whole through `hibari.dsp.synth` and in chunks of 7 frames"
        " through ours, with the same noise: equal lengths, and the largest difference of a sample.",
        columns=("samples", "largest difference"),
        rows=[(num_samples, f"{worst:.1e}")],
    )


def chunk_section(speech: Speech) -> Section:
    numbers = range(len(speech.latents))
    in_float = replace(speech, vocoder=Code2Wav(float_network(weights_dir() / "sidekick/voice/code2wav.onnx"), WHOLE))
    truth, whole = ([s.sound(WHOLE, n) for n in numbers] for s in (in_float, speech))
    pairs = {"whole, int8": whole, "whole, int8, other noise seed": [speech.sound(WHOLE, n, seed=2) for n in numbers]}
    for name, settings in CHUNKS.items():
        pairs[f"chunks of {name}, int8"] = [speech.sound(settings, n) for n in numbers]
    pairs["chunks as served, float"] = [in_float.sound(Code2WavSettings(), n) for n in numbers]
    rows = [(name, _ratio(truth, sounds), _ratio(whole, sounds)) for name, sounds in pairs.items()]
    return Section(
        heading="Network in chunks against whole utterances",
        about="Ten sentences, 27 frames of context on either side, the same noise; mean SNR, and the lowest. The"
        " whole utterance in int8 is, sample for sample, what the uncut model and the library give.",
        columns=("decoded", "against the whole in float, dB", "against the whole in int8, dB"),
        rows=rows,
        notes="The signal processing adds nothing (above), and in float neither do the chunks. What int8 does to the"
        " chunks is no more than what it does to the whole utterance, only not the same: its scales span a network's"
        " input.",
    )


def _ratio(wanted: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> str:
    if all(np.array_equal(a, b) for a, b in zip(wanted, got, strict=True)):
        return "equal"
    ratios = [snr_db(a, b) for a, b in zip(wanted, got, strict=True)]
    return f"{np.mean(ratios):.1f} ({min(ratios):.1f})"


# ---- costs -------------------------------------------------------------------------------------------


def cost_section(speech: Speech) -> Section:
    audio_s = sum(len(p.tensors["f0"]) for payloads in speech.latents for p in payloads[:-1]) * HOP / SAMPLE_RATE_HZ
    costs = {"talker": cpu_s(lambda: [run_request(speech.mouth, texts(sentence)) for sentence in SENTENCES])}
    for name, settings in {"whole utterances": WHOLE, **CHUNKS}.items():
        costs[f"code2wav, chunks of {name}" if name in CHUNKS else "code2wav, whole"] = cpu_s(
            lambda settings=settings: [speech.sound(settings, n) for n in range(len(speech.latents))]
        )
    total = costs["talker"] + costs[f"code2wav, chunks of {next(iter(CHUNKS))}"]
    rows = [(name, f"{cost / audio_s:.4f}") for name, cost in costs.items()]
    return Section(
        heading="Speaking",
        about=f"CPU seconds per second of speech over the ten sentences ({audio_s:.1f} s).",
        columns=("stage", "real-time factor"),
        rows=[*rows, ("both, as served", f"{total / audio_s:.4f}")],
        notes=f"From the first clause's text to the first {28 * HOP / SAMPLE_RATE_HZ:.2f} s of sound:"
        f" {first_sound_s(speech) * 1000:.0f} ms of CPU.",
    )


def first_sound_s(speech: Speech) -> float:
    def speak() -> None:
        talking, sounding = speech.mouth.open(work("r")), speech.vocoder.open(work("r"))
        speech.mouth.feed(talking, texts(f"{SENTENCES[1]} And", "")[0])
        (spoken,) = speech.mouth.run([talking])
        speech.vocoder.feed(sounding, spoken.payloads[0])
        speech.vocoder.run([sounding])

    return cpu_s(speak)


def hearing_section(speech: Speech) -> Section:
    story = np.concatenate([speech.sound(Code2WavSettings(), n) for n in range(len(speech.latents))] * 3)
    full = Ear(speech.listener._model, speech.listener._decoder, EarSettings(min_window_s=30))
    rows = []
    for clip_s in CLIPS_S:
        payload = clip(story[: clip_s * SAMPLE_RATE_HZ])
        served, trained = (
            cpu_s(partial(run_request, program, [payload], language="en"), rounds=2)
            for program in (speech.listener, full)
        )
        rows.append((clip_s, f"{served:.2f}", f"{served / clip_s:.3f}", f"{trained:.2f}", f"{trained / clip_s:.3f}"))
    return Section(
        heading="Hearing",
        about="Whisper base, int8. The model takes time by the window, so a short clip is heard in a window of at least"
        " 10 s (`min_window_s`) and not in the 30 s that it was trained on.",
        columns=("clip, s", "CPU s", "real-time factor", "CPU s in 30 s windows", "real-time factor"),
        rows=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.speech", description=__doc__)
    parser.add_argument("--write", action="store_true", help="also write docs/measurements/speech.md")
    options = parser.parse_args()
    speech = load()
    sections = [
        measure(speech) for measure in (signal_processing_section, chunk_section, cost_section, hearing_section)
    ]
    write_page(
        "speech",
        title="Speech: streamed against whole, and what it costs",
        command="python -m tests.bench.speech --write",
        sections=sections,
        write=options.write,
    )


if __name__ == "__main__":
    main()
