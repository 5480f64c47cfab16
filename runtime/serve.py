"""The server process: listens at once, starts the deployment, serves until told to stop.

    python -P -m runtime.serve --plan FILE --host H --port P --state-dir DIR

SIGTERM and SIGINT drain and end with 0; a second one ends at once. Logs go to DIR/logs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from runtime.deployment import Deployment
from runtime.errors import ConfigError, OmniError, PortInUse
from runtime.plan import Plan
from runtime.server.app import create_app
from runtime.server.settings import ServerSettings, media_settings

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
CONNECTIONS_TIMEOUT_S = 5


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: stopping is in our order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. PortInUse when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise PortInUse(f"cannot listen on {host}:{port}: {exc.strerror}", hint="choose another --port") from exc
    listener.listen(2048)
    listener.setblocking(False)
    return listener


async def serve(
    plan: Plan, plan_file: Path, state_dir: Path, listener: socket.socket, settings: ServerSettings
) -> None:
    """Serve until SIGTERM or SIGINT."""
    deployment = Deployment(plan, plan_file, state_dir / "logs")
    app = create_app(deployment, plan, settings)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=CONNECTIONS_TIMEOUT_S
    )
    server = _Server(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("second signal: ending at once")
            os._exit(130)  # the workers end by their parent-death signal
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    deployment.start()
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
        await deployment.drain()
        server.should_exit = True
        await serving
    finally:
        await deployment.stop()


def api_keys(host: str) -> tuple[str, ...]:
    """OMNICTL_API_KEY, or the lines of the file that OMNICTL_API_KEY_FILE names. A public bind needs one."""
    keys = [os.environ.get("OMNICTL_API_KEY", "")]
    if file := os.environ.get("OMNICTL_API_KEY_FILE"):
        try:
            keys += Path(file).read_text().splitlines()
        except OSError as exc:
            raise ConfigError(f"OMNICTL_API_KEY_FILE: cannot read {file}: {exc.strerror}") from exc
    found = tuple(key.strip() for key in keys if key.strip())
    if not found and host not in LOOPBACK:
        raise ConfigError(
            f"host {host} is reachable from outside and there is no API key",
            hint="set OMNICTL_API_KEY or OMNICTL_API_KEY_FILE, or listen on 127.0.0.1",
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="runtime.serve")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = ServerSettings(api_keys=api_keys(arguments.host), media=media_settings(os.environ))
        plan = Plan.model_validate_json(arguments.plan.read_bytes())
        listener = bind(arguments.host, arguments.port)
        asyncio.run(serve(plan, arguments.plan, arguments.state_dir, listener, settings))
    except OmniError as error:
        log.error("%s%s", error, f" ({error.hint})" if error.hint else "")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
