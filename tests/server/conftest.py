"""One server for most tests of this folder. Its stages fail for chosen seeds and prompts; see FAULTS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.gate import Gate
from tests.plans import sim_plan
from tests.server.serving import Served, served

THINK_FAILS, THINK_REFUSES, WAVE_FAILS, WAVE_FAILS_AT_ONCE, EAR_REFUSES = 101, 102, 103, 104, 105
THINK_IS_HELD, WAVE_IS_HELD = 106, 107
"""At the gate, before the fourth word, or the second piece of audio."""

NUM_PIECES = 6
"""Words of a chat answer and pieces of a speech answer (tests/plans.py has the former)."""

FAULTS: dict[str, list[dict[str, Any]]] = {
    "think": [
        {"action": "raise", "at_output": 3, "when": {"sampling.seed": THINK_FAILS}},
        {"action": "invalid", "when": {"sampling.seed": THINK_REFUSES}},
    ],
    "wave": [
        {"action": "raise", "at_output": 2, "when": {"seed": WAVE_FAILS}},
        {"action": "raise", "when": {"seed": WAVE_FAILS_AT_ONCE}},
    ],
    "ear": [
        {"action": "invalid", "when": {"sampling.seed": EAR_REFUSES}},
        {"action": "invalid", "when": {"prompt": "refuse"}},
        {"action": "raise", "when": {"prompt": "fail"}},
    ],
}


@pytest.fixture(scope="session")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, gate: Gate) -> Iterator[Served]:
    stages: dict[str, dict[str, Any]] = {name: {"faults": faults} for name, faults in FAULTS.items()}
    held = gate.fault(3, **{"sampling.seed": THINK_IS_HELD})
    stages["think"] = {"faults": [*FAULTS["think"], held]}
    stages["wave"] = {"faults": [*FAULTS["wave"], gate.fault(1, seed=WAVE_IS_HELD)]}
    stages["talk"] = {"num_outputs": NUM_PIECES}
    with served(sim_plan(stages=stages), tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def openai(server: Served) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client
