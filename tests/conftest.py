"""What every kind of test may use: golden files, and an environment without the user's own settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[Path, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing with them")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with a file, or write it there under --update-golden."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.is_file(), f"{path} is missing; make it with --update-golden"
        assert text == path.read_text(), f"{path} differs; if that is meant, write it anew with --update-golden"

    return compare


@pytest.fixture
def no_user_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither variables nor a user file of the person who runs the tests."""
    for name in os.environ:
        if name.startswith(("OMNICTL_", "CUDA_VISIBLE_DEVICES")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
