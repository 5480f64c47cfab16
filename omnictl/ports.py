"""Where a deployment listens: host rules, free ports, and who holds a taken one.

A check tells only what was true a moment ago: the server's own bind decides, and `launch` handles that.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Collection, Iterable

from omnictl import settings
from omnictl.state import Deployment
from runtime.errors import ConfigError, EnvironmentProblem, PortInUse

NUM_PORTS_TRIED = 200


def check_host(host: str, *, has_api_key: bool) -> None:
    """Refuse an address that this machine does not have, and a public one without an API key."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r}: not an address of this machine ({error})") from None
    if (reason := _bind_problem(host, 0)) is not None:
        raise ConfigError(f"--host {host!r}: not an address of this machine ({reason.strerror})")
    if not has_api_key and not all(_is_loopback(address) for address in addresses):
        raise ConfigError(
            f"--host {host!r} can be reached from other machines, and no API key is set",
            hint=f"set {settings.API_KEY_VARIABLE} or --api-key-file FILE, or keep --host {settings.DEFAULT_HOST}",
        )


def choose_port(host: str, wanted: int | None, deployments: Iterable[Deployment]) -> int:
    """The wanted port if it is free, else PortInUse; without a wish the first free one from 8091 on.

    Ports of living deployments count as taken: one that is starting may not have bound its port yet.
    """
    living = [d for d in deployments if d.is_alive]
    if wanted is not None:
        _require_free(host, wanted, living)
        return wanted
    return first_free_port(host, {d.port for d in living})


def first_free_port(host: str, taken: Collection[int]) -> int:
    last = settings.FIRST_PORT + NUM_PORTS_TRIED
    for port in range(settings.FIRST_PORT, last):
        if port not in taken and _bind_problem(host, port) is None:
            return port
    raise PortInUse(
        f"no port from {settings.FIRST_PORT} to {last - 1} is free on {host}", hint="choose one with --port"
    )


def in_use(host: str, port: int, deployments: Iterable[Deployment]) -> PortInUse:
    """The error that names who holds a port, as far as that can be seen."""
    for deployment in deployments:
        if deployment.port == port and deployment.is_alive:
            return PortInUse(
                f"port {port} on {host} is taken by deployment {deployment.name!r}",
                hint=f"omnictl down {deployment.name}, or choose another with --port",
            )
    holder = _foreign_holder(port)
    taken_by = f"taken by {holder}" if holder else "taken"
    return PortInUse(f"port {port} on {host} is {taken_by}", hint="leave --port out to take the first free one")


def is_bound(host: str, port: int) -> bool:
    """Whether somebody holds the port."""
    problem = _bind_problem(host, port)
    return problem is not None and problem.errno == errno.EADDRINUSE


def local_url(host: str, port: int) -> str:
    """The URL to dial from this machine for a bind address."""
    dialled = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{dialled}]:{port}" if ":" in dialled else f"http://{dialled}:{port}"


def _require_free(host: str, port: int, living: list[Deployment]) -> None:
    if any(d.port == port for d in living):
        raise in_use(host, port, living)
    if (problem := _bind_problem(host, port)) is None:
        return
    if problem.errno == errno.EADDRINUSE:
        raise in_use(host, port, living)
    raise EnvironmentProblem(f"port {port} on {host}: {problem.strerror}", hint="choose another with --port")


def _bind_problem(host: str, port: int) -> OSError | None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As the server does: connections that linger in TIME_WAIT do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            return error
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _foreign_holder(port: int) -> str | None:
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid and not connection.raddr:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    except psutil.Error:
        return None
    return None
