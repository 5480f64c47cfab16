"""Host rules and port choice."""

from __future__ import annotations

import os

import msgspec
import pytest

from omnictl import settings
from omnictl.ports import check_host, choose_port, is_bound, local_url
from runtime.errors import ConfigError, EnvironmentProblem, PortInUse
from tests.cli.conftest import deployment, identity


def test_the_first_free_port_is_taken(listener, monkeypatch: pytest.MonkeyPatch) -> None:
    port = listener()
    monkeypatch.setattr(settings, "FIRST_PORT", port)
    assert choose_port("127.0.0.1", None, []) > port


def test_a_port_that_a_starting_deployment_will_bind_counts_as_taken() -> None:
    free = choose_port("127.0.0.1", None, [])
    starting = deployment("one", identity(os.getpid()), port=free)
    assert choose_port("127.0.0.1", None, [starting]) > free
    dead = msgspec.structs.replace(starting, process=msgspec.structs.replace(starting.process, start_ticks=1))
    assert choose_port("127.0.0.1", None, [dead]) == free


def test_a_taken_explicit_port_names_our_deployment(listener) -> None:
    port = listener()
    holder = deployment("first", identity(os.getpid()), port=port)
    with pytest.raises(PortInUse, match="deployment 'first'") as caught:
        choose_port("127.0.0.1", port, [holder])
    assert "omnictl down first" in str(caught.value.hint)


def test_a_taken_explicit_port_names_the_foreign_process(listener) -> None:
    port = listener()
    with pytest.raises(PortInUse, match=f"process {os.getpid()}") as caught:
        choose_port("127.0.0.1", port, [])
    assert caught.value.exit_code == 6


def test_no_free_port_at_all(listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "FIRST_PORT", listener())
    monkeypatch.setattr("omnictl.ports.NUM_PORTS_TRIED", 1)
    with pytest.raises(PortInUse, match="no port from"):
        choose_port("127.0.0.1", None, [])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_bind_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="no API key") as caught:
        check_host(host, has_api_key=False)
    assert "OMNICTL_API_KEY" in str(caught.value.hint)
    check_host(host, has_api_key=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_loopback_needs_none(host: str) -> None:
    check_host(host, has_api_key=False)


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid", "a b", "\u0100" * 70])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises((ConfigError, EnvironmentProblem), match="not an address of this machine"):
        check_host(host, has_api_key=True)


def test_urls_to_dial() -> None:
    assert local_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert local_url("::", 1) == "http://[::1]:1"
    assert local_url("localhost", 1) == "http://localhost:1"


def test_bound_or_not(listener) -> None:
    assert is_bound("127.0.0.1", listener())
    assert not is_bound("127.0.0.1", choose_port("127.0.0.1", None, []))
