"""A real server for tests: uvicorn on a loopback port, in a thread with its own event loop, in front of a real
deployment of `sim` stages.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from openai import OpenAI

from runtime.deployment import Deployment
from runtime.plan import Plan
from runtime.serve import bind
from runtime.server.app import create_app
from runtime.server.settings import ServerSettings
from tests.deploy import PATIENCE_S, until

MODEL = "sim-chain"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Served:
    """`run` executes a coroutine on the server's own event loop."""

    port: int
    deployment: Deployment
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **settings: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **settings)

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, _strict_response_validation=True)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S + 10)

    def until(self, condition: Callable[[], Any]) -> None:
        self.run(until(condition, deployment=self.deployment))

    def terminals(self, task: str, kind: str) -> float:
        labels = {"task": task, "kind": kind}
        return self.deployment.metrics.get_sample_value("omnictl_terminals_total", labels) or 0.0


@contextlib.contextmanager
def served(plan: Plan, folder: Path, settings: ServerSettings | None = None, *, wait: bool = True) -> Iterator[Served]:
    """A server for the length of the block. With `wait` it is ready when the block begins."""
    started: Future[Served] = Future()
    thread = threading.Thread(target=asyncio.run, args=(_serve(plan, folder, settings, started, wait),))
    thread.start()
    try:
        server = started.result(PATIENCE_S + 10)
        try:
            yield server
        finally:
            server.loop.call_soon_threadsafe(server.stop.set)
    finally:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


async def _serve(
    plan: Plan, folder: Path, settings: ServerSettings | None, started: Future[Served], wait: bool
) -> None:
    plan_file = folder / "plan.json"
    plan_file.write_text(plan.model_dump_json())
    deployment = Deployment(plan, plan_file, folder / "logs")
    app = create_app(deployment, plan, settings or ServerSettings())
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    deployment.start()
    try:
        await until(lambda: server.started)
        if wait:
            await until(lambda: deployment.phase in ("ready", "failed"), deployment=deployment)
            assert deployment.phase == "ready", deployment.failure
        stop = asyncio.Event()
        started.set_result(Served(port, deployment, asyncio.get_running_loop(), stop))
        await stop.wait()
    except BaseException as exc:
        started.set_exception(exc)
        raise
    finally:
        await deployment.drain()
        server.should_exit = True
        await serving
        await deployment.stop()
