"""Qwen3-Omni's thinker and talker on a GPU against transformers on a CPU, eager and with captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime.engines.ar.engine import ArEngine
from tests.golden import test_omni_talker as talking
from tests.golden import test_omni_thinker as thinking
from tests.golden.conftest import omni_checkpoint, omni_model, omni_references
from tests.golden.omni_reference import NUM_CODEC_TOKENS
from tests.golden.omni_stages import context, make_omni_engine

if TYPE_CHECKING:
    from tests.golden.omni_reference import Reference

__all__ = ["omni_checkpoint", "omni_model", "omni_references"]

DEVICES = ("cuda:0",)
NAMES = ("short", "long", "chinese")
TOLERANCE = 1e-3
"""Of the largest number: kernels of a GPU add in another order, and in blocks."""

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@contextmanager
def thinker(folder: Path, **arguments: Any) -> Iterator[tuple[ArEngine, dict[str, list[int]]]]:
    program, seen = thinking.make_thinker(folder)
    program.devices = DEVICES
    engine = make_omni_engine(folder, program, thinking.KV_BYTES_PER_TOKEN, **arguments)
    assert type(engine.core._runner).__name__ == "TappedGPUModelRunner"
    yield engine, seen
    engine.close()


@contextmanager
def talker(folder: Path, **arguments: Any) -> Iterator[ArEngine]:
    from runtime.programs.qwen3_omni.talker import load

    settings = {"temperature": 0.0, "max_tokens": NUM_CODEC_TOKENS}
    program = load(replace(context(folder, "talker", **settings), devices=DEVICES))
    engine = make_omni_engine(folder, program, talking.KV_BYTES_PER_TOKEN, **arguments)
    assert type(engine.core._runner).__name__ == "FedGPUModelRunner"
    yield engine
    engine.close()


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_the_thinker(
    omni_checkpoint: Path,
    omni_references: dict[str, Reference],
    enforce_eager: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thinking, "TOLERANCE", TOLERANCE)
    with thinker(omni_checkpoint, enforce_eager=enforce_eager) as (engine, seen):
        case = thinking.Case(engine, seen, omni_references)
        for name in NAMES:
            case.ask(name, name, thinking.HIDDEN, "text")
        for name, stream in case.drain().items():
            case.check(stream, name)


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_the_talker(omni_checkpoint: Path, omni_references: dict[str, Reference], enforce_eager: bool) -> None:
    with talker(omni_checkpoint, enforce_eager=enforce_eager) as engine:
        case = talking.Case(engine, omni_references)
        for name in NAMES:
            case.whole(name)
        for name, stream in case.drain().items():
            case.check(stream, name)


def test_both_have_the_bytes_of_their_plans_on_one_gpu(omni_checkpoint: Path) -> None:
    """The second one starts although the first has told vLLM of no share."""
    with thinker(omni_checkpoint) as (first, _), talker(omni_checkpoint) as second:
        for engine, bytes_per_token in ((first, thinking.KV_BYTES_PER_TOKEN), (second, talking.KV_BYTES_PER_TOKEN)):
            caches = engine.core._runner.kv_caches
            assert sum(cache.nbytes for cache in caches) == 128 * thinking.BLOCK_SIZE * bytes_per_token
            assert all(cache.device.type == "cuda" for cache in caches)
