"""Run a deployment inside a test's event loop, with real worker processes, and talk to its orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from runtime.deployment import Deployment
from runtime.orchestrator import RequestHandle
from runtime.payload import Payload
from runtime.plan import Modality, Plan
from runtime.requests import Event, RequestSpec

TEXT, AUDIO = Modality.TEXT, Modality.AUDIO
PATIENCE_S = 100.0
"""For whatever must come: how long it takes says nothing on a machine that is busy with other things."""


@contextlib.asynccontextmanager
async def deployed(plan: Plan, folder: Path, *, wait: bool = True) -> AsyncIterator[Deployment]:
    plan_file = folder / "plan.json"
    plan_file.write_text(plan.model_dump_json())
    deployment = Deployment(plan, plan_file, folder / "logs")
    deployment.start()
    try:
        if wait:
            await until(lambda: deployment.phase in ("ready", "failed"), deployment=deployment)
            assert deployment.phase == "ready", deployment.failure
        yield deployment
    finally:
        await deployment.stop()


def hold_restart(folder: Path) -> Callable[[], None]:
    """The next worker that is started waits for its plan until what is returned is called, from a thread that may
    wait too."""
    plan_file = folder / "plan.json"
    plan = plan_file.read_text()
    plan_file.unlink()
    os.mkfifo(plan_file)

    def release() -> None:
        plan_file.write_text(plan)
        plan_file.unlink()
        plan_file.write_text(plan)

    return release


async def until(condition: Any, timeout_s: float = PATIENCE_S, deployment: Deployment | None = None) -> None:
    """Tests look at processes from outside, so they look often; nothing in the product does."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline_s:
            status = deployment.status() if deployment else ""
            raise AssertionError(f"not within {timeout_s} s: {status}")
        await asyncio.sleep(0.01)


def spec(
    task: str = "chat",
    modalities: Iterable[Modality] = (TEXT, AUDIO),
    *,
    audio: bool = False,
    timeout_s: float | None = None,
    open_inputs: frozenset[Modality] = frozenset(),
    **params: Any,
) -> RequestSpec:
    inputs: dict[Modality, list[Payload]] = {}
    if task != "transcription":
        inputs[TEXT] = [Payload("text", "", meta={"text": "hi", "messages": []})]
    if audio or task == "transcription":
        inputs[AUDIO] = [Payload("media", "", meta={"index": 0}, tensors={"data": np.zeros(50_000, np.uint8)})]
    return RequestSpec(
        task=task,
        modalities=tuple(modalities),
        inputs=inputs,
        params=params,
        timeout_s=timeout_s,
        open_inputs=open_inputs,
    )


async def collect(handle: RequestHandle, timeout_s: float = PATIENCE_S) -> list[Event]:
    async def read() -> list[Event]:
        return [event async for event in handle]

    return await asyncio.wait_for(read(), timeout_s)


async def ask(deployment: Deployment, request: RequestSpec, timeout_s: float = PATIENCE_S) -> list[Event]:
    return await collect(await deployment.submit(request), timeout_s)
