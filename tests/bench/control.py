"""The control plane alone: a three-stage chunked graph of `sim` stages, so that all that is measured is ours.

    python -m tests.bench.control [--write]

For each concurrency: the makespan of all requests sent at once over the critical-path bound of one (the stages
are timed and have room for all, so an ideal control plane takes no longer for many), and the CPU time of server
and workers per stage output.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from runtime.deployment import Deployment
from runtime.plan import EdgeMode
from runtime.requests import Done
from tests.bench.report import write_report
from tests.deploy import AUDIO, TEXT, ask, deployed, spec
from tests.plans import sim_plan

CONCURRENCY = (1, 32, 256, 1024)
NUM_OUTPUTS = 40
STAGES = {
    "think": {"first_output_s": 0.2, "interval_s": 0.05, "num_outputs": NUM_OUTPUTS, "slots": 2048, "batch_size": 2048},
    "talk": {"first_output_s": 0.05, "interval_s": 0.03, "output_bytes": 4096, "slots": 2048, "batch_size": 2048},
    "wave": {"first_output_s": 0.05, "interval_s": 0.02, "output_bytes": 9600, "slots": 2048, "batch_size": 2048},
}
SPREAD_S = 1.0
"""Arrivals are spread over a second, as those of clients are."""


@dataclass(frozen=True)
class Result:
    concurrency: int
    makespan_s: float
    bound_s: float
    num_events: int
    cpu_s: float

    @property
    def ratio(self) -> float:
        return self.makespan_s / self.bound_s

    @property
    def cpu_us_per_event(self) -> float:
        return self.cpu_s / self.num_events * 1e6


def critical_path_s() -> float:
    """When the last output of one request leaves the last stage if nothing but the stages took time."""
    done_s = [0.0] * NUM_OUTPUTS  # of the stage before
    for stage in STAGES.values():
        free_s = 0.0
        for number in range(NUM_OUTPUTS):
            cost_s = float(stage["first_output_s"] if number == 0 else stage["interval_s"])
            free_s = max(done_s[number], free_s) + cost_s
            done_s[number] = free_s
    return done_s[-1]


def cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


async def measure(deployment: Deployment, concurrency: int) -> Result:
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    step_s = SPREAD_S / concurrency

    async def one(number: int) -> float:
        await asyncio.sleep(number * step_s)
        began_s = time.monotonic()
        events = await ask(deployment, spec("chat", [TEXT, AUDIO]), timeout_s=120)
        assert isinstance(events[-1], Done)
        return time.monotonic() - began_s

    before_s, began_s = cpu_s(processes), time.monotonic()
    await asyncio.gather(*(one(n) for n in range(concurrency)))
    makespan_s = time.monotonic() - began_s
    bound_s = critical_path_s() + (concurrency - 1) * step_s
    return Result(concurrency, makespan_s, bound_s, concurrency * NUM_OUTPUTS * 3, cpu_s(processes) - before_s)


async def run() -> list[Result]:
    processes = (("ear",), ("think",), ("talk",), ("wave",))
    plan = sim_plan(mode=EdgeMode.CHUNKED, processes=processes, stages=STAGES, limits={"max_queued": 2048})
    with tempfile.TemporaryDirectory() as folder:
        async with deployed(plan, Path(folder)) as deployment:
            await measure(deployment, 8)  # warm
            return [await measure(deployment, c) for c in CONCURRENCY]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write docs/measurements/control.md")
    arguments = parser.parse_args()
    results = asyncio.run(run())
    most = results[-1]
    rows = [
        (r.concurrency, f"{r.bound_s:.2f}", f"{r.makespan_s:.2f}", f"{r.ratio:.3f}", f"{r.cpu_us_per_event:.0f}")
        for r in results
    ]
    write_report(
        "control",
        title="Control plane",
        command="make bench-control",
        about=(
            f"Three `sim` stages in three processes, chunked edges (text inline, 4 KiB and 9.4 KiB payloads), "
            f"{NUM_OUTPUTS} outputs a stage and request. Requests arrive over {SPREAD_S:g} s. The bound is the "
            "critical path of the stages' own times; CPU is that of server and workers together."
        ),
        columns=("concurrent requests", "bound, s", "makespan, s", "makespan / bound", "CPU us per stage output"),
        rows=rows,
        notes=(
            f"At {most.concurrency} the bound is out of reach for the cores: {most.num_events} outputs took "
            f"{most.cpu_s:.1f} CPU seconds. An output gets cheaper with concurrency, for messages come in bursts."
        ),
        write=arguments.write,
    )


if __name__ == "__main__":
    main()
