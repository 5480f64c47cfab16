"""The model in the box: its thinker beside `vllm serve`, speech chunked beside whole, start time and memory.

    python -m tests.bench.sidekick [--write]

What is compared runs in the same minutes, in turn, on the same machine; the ratios are what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from tests.bench.chat_load import Load, load
from tests.bench.report import Section, write_page
from tests.bench.vllm_serve import VllmServe
from tests.process.sidekick import Sidekick

ROUNDS = 3
TOPICS = (
    "rain", "bread", "the moon", "a library", "the sea", "a bicycle", "honey", "glass",
    "a volcano", "tea", "paper", "a clock", "snow", "a bridge", "wool", "salt",
)  # fmt: skip
MAX_TOKENS = 48
LONG_TOKENS = 120


def question(topic: str, number: int) -> dict[str, Any]:
    """No two questions are the same, so that no server answers from its prefix cache."""
    content = f"{number}. Tell me something about {topic}."
    return {"messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS}


def questions(model: str, count: int, offset: int, **more: Any) -> list[dict[str, Any]]:
    numbers = range(offset, offset + count)
    return [question(TOPICS[n % len(TOPICS)], n) | {"model": model} | more for n in numbers]


@contextmanager
def sidekick(folder: Path, *options: str) -> Iterator[tuple[Sidekick, float]]:
    """A deployment, and the seconds that `omnictl up` took."""
    folder.mkdir()
    began_s = time.perf_counter()
    running = Sidekick(folder, *options)
    try:
        yield running, time.perf_counter() - began_s
    finally:
        running.down()


# ---- the thinker beside vllm serve -------------------------------------------------------------------


def thinker_section(ours: Sidekick, theirs: VllmServe) -> Section:
    rows = []
    same_text = total = 0
    for concurrency in (1, 8):
        loads: dict[str, list[Load]] = {"ours": [], "theirs": []}
        for number in range(ROUNDS + 1):
            count, offset = max(3, concurrency), (concurrency * 100 + number) * 20
            ours_load = asyncio.run(load(ours.url, questions("sidekick", count, offset), concurrency))
            bodies = questions(theirs.model, count, offset, **theirs.sampling)
            theirs_load = asyncio.run(load(theirs.url, bodies, concurrency))
            if number:  # the first round warms both up
                loads["ours"].append(ours_load)
                loads["theirs"].append(theirs_load)
            texts = sorted(t.text for t in ours_load.timings), sorted(t.text for t in theirs_load.timings)
            same_text += sum(a == b for a, b in zip(*texts, strict=True))
            total += count
        for name, label in (("first_text_s", "time to first token"), ("end_s", "end to end")):
            one, other = (median(one.median(name) for one in loads[who]) for who in ("ours", "theirs"))
            ratios = [a.median(name) / b.median(name) for a, b in zip(loads["ours"], loads["theirs"], strict=True)]
            shown = (f"{one * 1e3:.0f}", f"{other * 1e3:.0f}", f"{median(ratios):.3f}")
            rows.append((concurrency, label, *shown, f"{min(ratios):.3f}-{max(ratios):.3f}"))
    return Section(
        heading="The thinker through our server, beside `vllm serve`",
        about=(
            f"Same weights, dtype, threads, cache and sampling; streamed, {MAX_TOKENS} tokens at most, no shared "
            f"prefix. Medians of {ROUNDS} rounds in turn after one to warm up; the ratio is the median of the rounds' "
            f"ratios. {same_text} of {total} answers were the same to the letter."
        ),
        columns=("concurrency", "", "omnictl, ms", "vllm serve, ms", "ratio", "ratios of the rounds"),
        rows=rows,
    )


# ---- speech ------------------------------------------------------------------------------------------


def spoken(number: int) -> dict[str, Any]:
    content = f"Explain in detail how {TOPICS[number % len(TOPICS)]} is made."
    return {
        "model": "sidekick",
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "heart", "format": "pcm16"},
        "max_tokens": LONG_TOKENS,
    }


def speech_section(chunked: Sidekick, whole: Sidekick) -> Section:
    loads: dict[str, list[Load]] = {"chunked": [], "whole": []}
    for number in range(ROUNDS + 1):
        bodies = [spoken(number)]
        for name, server in (("chunked", chunked), ("whole", whole)):
            found = asyncio.run(load(server.url, bodies, 1))
            if number:
                loads[name].append(found)

    def value(name: str, field: str) -> float:
        return median(one.median(field) for one in loads[name])

    def rtf(name: str) -> float:
        return median(t.end_s / t.audio_s for one in loads[name] for t in one.timings)

    def speech_rtf(name: str) -> float:
        return median((t.last_audio_s - t.first_audio_s) / t.audio_s for one in loads[name] for t in one.timings)

    rows: list[tuple[object, ...]] = []
    for field, label in (
        ("first_text_s", "first text, s"),
        ("last_text_s", "end of text, s"),
        ("first_audio_s", "first audio, s"),
        ("end_s", "end of audio, s"),
        ("audio_s", "speech made, s"),
    ):
        a, b = value("chunked", field), value("whole", field)
        rows.append((label, f"{a:.2f}", f"{b:.2f}", f"{a / b:.3f}"))
    a, b = rtf("chunked"), rtf("whole")
    rows.append(("real-time factor of the whole request", f"{a:.3f}", f"{b:.3f}", f"{a / b:.3f}"))
    a, b = speech_rtf("chunked"), speech_rtf("whole")
    rows.append(("real-time factor of speech, first to last audio", f"{a:.3f}", f"{b:.3f}", f"{a / b:.3f}"))
    share = value("chunked", "first_audio_s") / value("chunked", "last_text_s")
    return Section(
        heading="Speech: chunked edges beside whole ones",
        about=f"A long answer ({LONG_TOKENS} tokens at most), text and audio together, one request at a time.",
        columns=("", "chunked", "whole", "chunked / whole"),
        rows=rows,
        notes=f"Chunked, the first audio comes after {share:.0%} of the time that the text takes.",
    )


# ---- start and memory --------------------------------------------------------------------------------


def memory_bytes(process: psutil.Process) -> tuple[int, int]:
    """(resident, proportional) memory."""
    info = process.memory_full_info()
    return info.rss, info.pss


def help_s() -> float:
    """Seconds of `omnictl --help` as a process of its own."""
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        subprocess.run([sys.executable, "-P", "-m", "omnictl", "--help"], capture_output=True, check=True, timeout=30)
        times.append(time.perf_counter() - began_s)
    return median(times)


def start_section(running: Sidekick, up_s: float) -> Section:
    server = psutil.Process(next(iter(running.stages().values()))["pid"]).parent()
    assert server is not None
    names = {row["pid"]: row["process"] for row in running.stages().values()} | {server.pid: "server"}
    rows, totals = [], [0, 0]
    for pid, name in names.items():
        sizes = memory_bytes(psutil.Process(pid))
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
        rows.append((name, *(f"{size / 2**20:.0f}" for size in sizes)))
    rows.append(("all", *(f"{total / 2**20:.0f}" for total in totals)))
    return Section(
        heading="Start and memory",
        about=(
            f"`omnictl up sidekick -d` with the weights cached took {up_s:.1f} s, warm-up requests included. "
            f"`omnictl --help` took {help_s():.2f} s (median of 5)."
        ),
        columns=("process", "resident, MiB", "proportional, MiB"),
        rows=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write docs/measurements/sidekick.md")
    arguments = parser.parse_args()
    sections = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with sidekick(folder / "chunked") as (chunked, up_s):
            sections.append(start_section(chunked, up_s))
            with VllmServe(folder / "vllm") as theirs:
                sections.insert(0, thinker_section(chunked, theirs))
            whole_edges = ("--set", "edges.1.mode=whole", "--set", "edges.2.mode=whole", "--name", "whole")
            with sidekick(folder / "whole", *whole_edges) as (whole, _):
                sections.insert(1, speech_section(chunked, whole))
    title = "The model in the box"
    write_page("sidekick", title=title, command="make bench-sidekick", sections=sections, write=arguments.write)


if __name__ == "__main__":
    main()
