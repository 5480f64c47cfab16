"""How well stages overlap: the published load of Qwen3-Omni on `sim` stages with step times like the real model's.

    python -m tests.bench.overlap [--write] [--scale 10]

The workload is 2500 tokens in and 900 out at concurrency 32. All counts are divided by the scale, step times are
not, so a run takes seconds and what is ours weighs no less. The ideal is what the same engines need when messages,
payloads and the server take no time (tests/bench/ideal.py); efficiency is the ideal over what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.deployment import Deployment
from runtime.plan import EdgeMode, Modality, Plan
from runtime.requests import Delta, Done
from tests.bench.ideal import IdealRun
from tests.bench.report import Section, write_page
from tests.deploy import AUDIO, TEXT, deployed, spec, until
from tests.plans import sim_plan

CONCURRENCY = 32
NUM_PROMPT_TOKENS, NUM_TEXT_TOKENS = 2500, 900
NUM_FRAMES = 2000
STEP_TOKENS = 2048
FRAMES_PER_CHUNK = 25
STAGES = ("think", "talk", "wave")
STEPS: dict[str, dict[str, float]] = {
    "think": {"step_s": 0.0065, "step_s_per_request": 0.0003, "prefill_s_per_token": 40e-6},
    "talk": {"step_s": 0.014, "step_s_per_request": 0.001, "prefill_s_per_token": 10e-6},
    "wave": {"step_s": 0.010, "step_s_per_request": 0.003},
}
SOURCES = f"""\
Assumed, after the published benchmark of the reference system (2500 in, 900 out, one replica a stage; 32 s and 90 s
end-to-end at concurrency 1 and 32, real-time factors 0.19 and 0.58: so about 160 s or {NUM_FRAMES} frames of audio,
a frame every 15 and 46 ms, and a text token every 7 and 16 ms):

| stage | step, ms | and per request, ms | prompt, us a token | makes |
| --- | --- | --- | --- | --- |
| thinker | 6.5 | 0.3 | 40, at most {STEP_TOKENS} tokens a step | {NUM_TEXT_TOKENS} tokens |
| talker, with its code predictor | 14 | 1 | 10 | a frame a token, then more, {NUM_FRAMES} frames in all |
| code2wav | 10 | 3 | | a piece of audio for {FRAMES_PER_CHUNK} frames |"""


@dataclass(frozen=True)
class Case:
    name: str
    processes: tuple[tuple[str, ...], ...]
    mode: EdgeMode = EdgeMode.CHUNKED

    def plan(self, scale: int) -> Plan:
        prompt = {"prompt_tokens": NUM_PROMPT_TOKENS // scale, "step_tokens": STEP_TOKENS // scale}
        num_text, num_frames = NUM_TEXT_TOKENS // scale, NUM_FRAMES // scale
        common: dict[str, Any] = {"slots": 2 * CONCURRENCY, "batch_size": 2 * CONCURRENCY}
        stages = {
            "think": {**common, **STEPS["think"], **prompt, "num_outputs": num_text},
            "talk": {**common, **STEPS["talk"], **prompt, "tail_outputs": num_frames - num_text, "output_bytes": 128},
            "wave": {**common, **STEPS["wave"], "pieces_per_output": FRAMES_PER_CHUNK, "output_bytes": 192_000},
        }
        return sim_plan(mode=self.mode, processes=(("ear",), *self.processes), stages=stages)


SEPARATE = (("think",), ("talk",), ("wave",))
MODES = (Case("chunked", SEPARATE), Case("whole", SEPARATE, EdgeMode.WHOLE))
SWEEP = (
    Case("1 / 1 / 1, three processes", SEPARATE),
    Case("1 / 1 / 1, two processes", (("think",), ("talk", "wave"))),
    Case("1 / 1 / 1, one process", (("think", "talk", "wave"),)),
    Case("2 / 1 / 1", (("think",), ("think.1",), ("talk",), ("wave",))),
    Case("1 / 1 / 2", (("think",), ("talk",), ("wave",), ("wave.1",))),
    Case("1 / 2 / 1", (("think",), ("talk",), ("talk.1",), ("wave",))),
    Case("1 / 4 / 1", (("think",), ("talk",), ("talk.1",), ("talk.2",), ("talk.3",), ("wave",))),
    Case("2 / 2 / 2", (("think",), ("think.1",), ("talk",), ("talk.1",), ("wave",), ("wave.1",))),
)


@dataclass
class Answer:
    first_s: dict[Modality, float] = field(default_factory=dict)
    total_s: float = 0.0


@dataclass(frozen=True)
class Result:
    case: Case
    ideal_s: float
    makespan_s: float
    answers: list[Answer]
    used: dict[str, float]
    """Stage -> share of the makespan that its replicas spent in steps, on average."""

    @property
    def efficiency(self) -> float:
        return self.ideal_s / self.makespan_s

    def median(self, modality: Modality) -> float:
        return statistics.median(answer.first_s[modality] for answer in self.answers)


async def measure(case: Case, scale: int) -> Result:
    plan = case.plan(scale)
    with tempfile.TemporaryDirectory() as folder:
        async with deployed(plan, Path(folder)) as deployment:
            before = await _engine_s(deployment)
            began_s = time.monotonic()
            answers = await asyncio.gather(*(_one(deployment, began_s) for _ in range(CONCURRENCY)))
            makespan_s = time.monotonic() - began_s
            after = await _engine_s(deployment)
    used = {s: (after[s] - before[s]) / plan.stage(s).replicas / makespan_s for s in STAGES}
    return Result(case, IdealRun(plan, CONCURRENCY).makespan_s(), makespan_s, answers, used)


async def _one(deployment: Deployment, began_s: float) -> Answer:
    answer = Answer()
    event: Any = None
    async for event in await deployment.submit(spec("chat", [TEXT, AUDIO])):
        if isinstance(event, Delta):
            answer.first_s.setdefault(event.modality, time.monotonic() - began_s)
    assert isinstance(event, Done), event
    answer.total_s = time.monotonic() - began_s
    return answer


async def _engine_s(deployment: Deployment) -> dict[str, float]:
    """Seconds in steps of all replicas of each stage, as of two beats from now: the latest may be of before."""
    replicas = [replica for pool in deployment.orchestrator.pools for replica in pool.replicas]
    for _ in range(2):
        seen = [replica.stats for replica in replicas]
        await until(lambda: all(r.stats is not s for r, s in zip(replicas, seen, strict=True)), 30)  # noqa: B023
    return {s: sum(r.stats.counters["engine_seconds"] for r in replicas if r.stage == s and r.stats) for s in STAGES}


def sections(modes: list[Result], sweep: list[Result], scale: int) -> list[Section]:
    whole_over_chunked = modes[1].makespan_s / modes[0].makespan_s
    return [
        Section(
            about=(
                f"{CONCURRENCY} requests at once, text and audio. Counts are divided by {scale}, step times are not. "
                "The ideal is what the same engines need when nothing else takes time.\n\n" + SOURCES
            ),
            columns=("edges", "ideal, s", "measured, s", "efficiency", "first text, s", "first audio, s"),
            rows=[
                (
                    r.case.name,
                    f"{r.ideal_s:.2f}",
                    f"{r.makespan_s:.2f}",
                    f"{r.efficiency:.3f}",
                    f"{r.median(TEXT):.2f}",
                    f"{r.median(AUDIO):.2f}",
                )
                for r in modes
            ],
            notes=f"Whole edges take {whole_over_chunked:.2f} times as long. First outputs are medians.",
        ),
        Section(
            heading="Replicas and placements",
            about="Replicas of thinker / talker / code2wav, chunked; the stages are used for these shares of the time.",
            columns=("replicas", "ideal, s", "measured, s", "efficiency", "thinker", "talker", "code2wav"),
            rows=[
                (
                    r.case.name,
                    f"{r.ideal_s:.2f}",
                    f"{r.makespan_s:.2f}",
                    f"{r.efficiency:.3f}",
                    *(f"{r.used[stage]:.0%}" for stage in STAGES),
                )
                for r in sweep
            ],
        ),
    ]


def run(scale: int = 10, *, write: bool) -> None:
    modes = [asyncio.run(measure(case, scale)) for case in MODES]
    sweep = [asyncio.run(measure(case, scale)) for case in SWEEP]
    write_page(
        "overlap",
        title="Overlap of stages",
        command="make bench-overlap",
        sections=sections(modes, sweep, scale),
        write=write,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write docs/measurements/overlap.md")
    parser.add_argument("--scale", type=int, default=10, help="divides the counts of tokens and frames")
    arguments = parser.parse_args()
    run(arguments.scale, write=arguments.write)


if __name__ == "__main__":
    main()
