"""Qwen3-Omni's tiny build through the whole product, beside the reference system's figures and beside `vllm serve`.

    python -m tests.bench.qwen3_omni [--part serve|chunked|overhead] [--write]

Random weights never say the end, so limits are lengths: each request is checked to have said just that many tokens and
frames. A part that is run alone leaves the other sections of the page as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from runtime.plan import Plan
from tests.bench.chat_load import Load, load
from tests.bench.report import Section, update_page
from tests.bench.vllm_serve import VllmServe
from tests.served import Served

NAME = "qwen3-omni"
NUM_TOKENS, NUM_FRAMES = 32, 100
FRAME_S = 0.08
CONCURRENCY = (1, 4, 8)
ROUNDS = 3
IDLE_S = 20.0
MIB = 1 << 20
LENGTH = ("--set", f"stages.talker.program_settings.max_tokens={NUM_FRAMES}")
WHOLE = ("--set", "edges.0.mode=whole", "--set", "edges.1.mode=whole", "--name", "whole")
REFERENCE = {1: ("0.46-0.52", "4.7-5.2", "-"), 4: ("-", "-", "-"), 8: ("1.1-1.7", "9.9-12.6", "0.62-0.80")}
"""Concurrency -> first audio s, end to end s, requests/s of the reference system, chunked, on a machine like this."""
_number = iter(range(1_000_000))


def bodies(model: str, count: int, *, audio: bool, **more: Any) -> list[dict[str, Any]]:
    """No two are the same, so that no server answers from its prefix cache."""
    body: dict[str, Any] = {"model": model, "max_tokens": NUM_TOKENS, "temperature": 0.0, **more}
    if audio:
        body |= {"modalities": ["text", "audio"], "audio": {"voice": "ethan", "format": "pcm16"}}
    return [
        body | {"messages": [{"role": "user", "content": f"{next(_number)}. Say something about the rain."}]}
        for _ in range(count)
    ]


def asked(url: str, model: str, concurrency: int, *, audio: bool, **more: Any) -> Load:
    """At least three requests and one a client; all of them as long as they were to be."""
    result = asyncio.run(load(url, bodies(model, max(3, concurrency), audio=audio, **more), concurrency))
    if audio:
        # the last frame is not complete: the network keeps a few samples of it back
        wrong = [t.audio_s for t in result.timings if not 0 <= NUM_FRAMES * FRAME_S - t.audio_s < FRAME_S]
        assert not wrong, f"seconds of speech {wrong}; expected {NUM_FRAMES * FRAME_S}"
    return result


@contextmanager
def deployment(folder: Path, *options: str) -> Iterator[tuple[Served, float]]:
    """A deployment of the tiny build, and the seconds that `omnictl up` took."""
    folder.mkdir()
    began_s = time.perf_counter()
    served = Served(folder, NAME, "--tiny", *LENGTH, *options)
    try:
        yield served, time.perf_counter() - began_s
    finally:
        served.down()


def processes(served: Served) -> list[psutil.Process]:
    server = psutil.Process(next(iter(served.stages().values()))["pid"]).parent()
    assert server is not None
    return [server, *server.children(recursive=True)]


def cpu_s(found: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in found)


# ---- serve -----------------------------------------------------------------------------------------------------


def serve_sections(folder: Path) -> list[Section]:
    with deployment(folder / "serve") as (served, up_s):
        found = processes(served)
        resident_mib = sum(process.memory_info().rss for process in found) / MIB
        asked(served.url, NAME, 1, audio=True)
        loads = {concurrency: asked(served.url, NAME, concurrency, audio=True) for concurrency in CONCURRENCY}
        text_ms, outside_ms = text_times_ms(served)
        before_s = cpu_s(found)
        time.sleep(IDLE_S)  # what is measured is a time in which nothing happens
        idle_percent = (cpu_s(found) - before_s) / IDLE_S * 100
    rows: list[tuple[object, ...]] = [
        ("start, s", f"{up_s:.1f}", "94", "<= 15"),
        ("processes", len(found), "8", ""),
        ("resident, MiB", f"{resident_mib:.0f}", "7700", "<= 1500"),
        ("text only, ms", f"{text_ms:.0f}", "293-375", ""),
        ("of which outside the engine, ms", f"{outside_ms:.0f}", "49-67", ""),
        (f"idle over {IDLE_S:.0f} s, % of a core", f"{idle_percent:.2f}", "10", "< 0.5"),
    ]
    return [
        Section(
            heading="Start, memory, idle",
            about=(
                "`omnictl up qwen3-omni --tiny -d` with the build cached, warm-up requests included. The reference's "
                "figures were taken on a two-core machine like this one, with a checkpoint of the same shape in "
                "bfloat16; ours runs in float32, for this processor computes no bfloat16. What of a text answer's time "
                "was not the thinker's engine is from its trace and the client's clock."
            ),
            columns=("", "omnictl", "reference", "goal"),
            rows=rows,
        ),
        speech_section(loads),
    ]


def speech_section(loads: dict[int, Load]) -> Section:
    rows = []
    for concurrency, one in loads.items():
        first_s, end_s, rate = one.median("first_audio_s"), one.median("end_s"), len(one.timings) / one.wall_s
        reference = REFERENCE[concurrency]
        ours = (f"{first_s:.2f}", f"{end_s:.2f}", f"{rate:.2f}")
        rows.append((concurrency, *(cell for pair in zip(ours, reference, strict=True) for cell in pair)))
    return Section(
        heading="Text and speech",
        about=(
            f"{NUM_TOKENS} tokens of text and {NUM_FRAMES} frames of speech a request, streamed, chunked edges. Goals: "
            "first audio 0.15 s and end to end 1.6 s at concurrency 1; 1.6 requests/s at 8."
        ),
        columns=("concurrency", "first audio, s", "reference", "end to end, s", "reference", "requests/s", "reference"),
        rows=rows,
    )


def text_times_ms(served: Served) -> tuple[float, float]:
    """Medians of a whole text answer, and of what of it was not the thinker's engine at work."""
    whole, outside = [], []
    for _ in range(5):
        (timing,) = asyncio.run(load(served.url, bodies(NAME, 1, audio=False), 1)).timings
        with httpx.Client(base_url=f"{served.url}/v1/omnictl", timeout=10) as client:
            newest = max(client.get("/traces").json()["data"], key=lambda row: row["started_at"])
            path = client.get(f"/traces/{newest['request_id']}").json()["path"]
        engine_ms = sum(part["ms"] for part in path if part["part"] == "thinker: engine")
        whole.append(timing.end_s * 1e3)
        outside.append(timing.end_s * 1e3 - engine_ms)
    return median(whole), median(outside)


# ---- chunked beside whole --------------------------------------------------------------------------------------


def chunked_sections(folder: Path) -> list[Section]:
    loads: dict[tuple[str, int], list[Load]] = {}
    with deployment(folder / "chunked") as (chunked, _), deployment(folder / "whole", *WHOLE) as (whole, _):
        for number in range(ROUNDS + 1):
            for concurrency in CONCURRENCY:
                for mode, served in (("chunked", chunked), ("whole", whole)):
                    found = asked(served.url, NAME, concurrency, audio=True)
                    if number:  # the first round warms both up
                        loads.setdefault((mode, concurrency), []).append(found)
    rows = []
    for concurrency in CONCURRENCY:
        for label, value in COMPARED:
            one, other = (median(value(found) for found in loads[mode, concurrency]) for mode in ("chunked", "whole"))
            rows.append((concurrency, label, f"{one:.3f}", f"{other:.3f}", f"{one / other:.3f}"))
    return [
        Section(
            heading="Chunked edges beside whole ones",
            about=(
                f"Two deployments, in turn; medians of {ROUNDS} rounds. Goal: end to end at most 1.05 of the whole's. "
                "The reference's chunked mode was 41-53 % slower end to end than its whole mode."
            ),
            columns=("concurrency", "", "chunked", "whole", "chunked / whole"),
            rows=rows,
        )
    ]


COMPARED: tuple[tuple[str, Callable[[Load], float]], ...] = (
    ("first text, s", lambda found: found.median("first_text_s")),
    ("first audio, s", lambda found: found.median("first_audio_s")),
    ("end to end, s", lambda found: found.median("end_s")),
    ("real-time factor", lambda found: median(t.end_s / t.audio_s for t in found.timings)),
)


# ---- the staged thinker beside vllm serve ------------------------------------------------------------------------


def overhead_sections(folder: Path) -> list[Section]:
    loads: dict[tuple[str, int], list[Load]] = {}
    with deployment(folder / "staged", "--set", "stages.thinker.slots=32") as (served, _):
        plan = Plan.model_validate_json((served.folder / "plan.json").read_bytes())
        with VllmServe(folder / "vllm", plan) as theirs:
            for number in range(ROUNDS + 1):
                for concurrency in (1, 32):
                    ours = asked(served.url, NAME, concurrency, audio=False)
                    more = {**theirs.sampling, "temperature": 0.0}
                    others = asked(theirs.url, theirs.model, concurrency, audio=False, **more)
                    if number:
                        loads.setdefault(("ours", concurrency), []).append(ours)
                        loads.setdefault(("theirs", concurrency), []).append(others)
    rows = []
    for concurrency in (1, 32):
        for name, label in (("first_text_s", "time to first token"), ("end_s", "end to end")):
            pairs = zip(loads["ours", concurrency], loads["theirs", concurrency], strict=True)
            ratios = [one.median(name) / other.median(name) for one, other in pairs]
            times = [
                median(found.median(name) for found in loads[who, concurrency]) * 1e3 for who in ("ours", "theirs")
            ]
            spread = f"{min(ratios):.3f}-{max(ratios):.3f}"
            rows.append((concurrency, label, *(f"{ms:.1f}" for ms in times), f"{median(ratios):.3f}", spread))
    return [
        Section(
            heading="The staged thinker beside `vllm serve`",
            about=(
                f"Text only, {NUM_TOKENS} tokens, greedy, the same checkpoint, dtype, cache and slots; medians of "
                f"{ROUNDS} rounds in turn after one to warm up. Goal: a ratio of 1.05 at most."
            ),
            columns=("concurrency", "", "omnictl, ms", "vllm serve, ms", "ratio", "ratios of the rounds"),
            rows=rows,
        )
    ]


PARTS: dict[str, Callable[[Path], list[Section]]] = {
    "serve": serve_sections,
    "chunked": chunked_sections,
    "overhead": overhead_sections,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all; may be repeated")
    parser.add_argument("--write", action="store_true", help="write docs/measurements/qwen3-omni.md")
    arguments = parser.parse_args()
    for part in arguments.part or PARTS:
        with tempfile.TemporaryDirectory() as name:
            sections = PARTS[part](Path(name))
        title = "Qwen3-Omni, tiny build"
        update_page(NAME, title=title, command="make bench-qwen3-omni", sections=sections, write=arguments.write)


if __name__ == "__main__":
    main()
