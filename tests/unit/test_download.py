"""Transfers over a real connection that is cut, hangs, lies or refuses; resuming is proven by counting bytes."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from omnictl.download import DownloadLimits, RemoteFile, download, part_path
from runtime.errors import WeightsError
from tests.wheels import Behaviour, Index, serving

NAME = "voice.whl"
SIZE_BYTES = 300_000
CONTENT = random.Random(1).randbytes(SIZE_BYTES)
LIMITS = DownloadLimits(connect_timeout_s=30, read_timeout_s=30, max_attempts=3, backoff_s=0.01)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    folder = tmp_path / "index"
    folder.mkdir()
    (folder / NAME).write_bytes(CONTENT)
    with serving(folder) as index:
        yield index


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "here.whl"


def remote(index: Index, **changes: object) -> RemoteFile:
    values = {"url": index.url(NAME), "size_bytes": SIZE_BYTES, "sha256": hashlib.sha256(CONTENT).hexdigest()}
    return RemoteFile(**(values | changes))  # type: ignore[arg-type]


def fetch(source: RemoteFile, target: Path, limits: DownloadLimits = LIMITS) -> int:
    """Download; how many bytes the progress was told of in the end."""
    counted: list[int] = []
    timeout = httpx.Timeout(limits.read_timeout_s, connect=limits.connect_timeout_s)
    with httpx.Client(timeout=timeout, trust_env=False) as client:
        download(client, source, target, counted.append, limits)
    return sum(counted)


def test_a_file_arrives_whole(index: Index, target: Path) -> None:
    assert fetch(remote(index), target) == SIZE_BYTES
    assert target.read_bytes() == CONTENT
    assert not part_path(target).exists()
    assert [asked.range for asked in index.asked] == [None]


def test_a_cut_connection_is_continued_within_one_call(index: Index, target: Path) -> None:
    index.behaviour[NAME] = Behaviour(cut_after=[100_000, 50_000])
    assert fetch(remote(index), target) == SIZE_BYTES
    assert target.read_bytes() == CONTENT
    assert [asked.range for asked in index.asked] == [None, "bytes=100000-", "bytes=150000-"]
    assert index.sent_bytes(NAME) == SIZE_BYTES, "every byte was sent once"


def test_what_an_earlier_run_left_is_not_fetched_again(index: Index, target: Path) -> None:
    part_path(target).write_bytes(CONTENT[:200_000])
    assert fetch(remote(index), target) == 100_000
    assert target.read_bytes() == CONTENT
    assert index.sent_bytes(NAME) == 100_000


def test_a_complete_part_needs_no_request(index: Index, target: Path) -> None:
    part_path(target).write_bytes(CONTENT)
    fetch(remote(index), target)
    assert target.read_bytes() == CONTENT
    assert index.asked == []


def test_a_damaged_part_is_fetched_from_the_start(index: Index, target: Path) -> None:
    part_path(target).write_bytes(b"x" * 200_000)
    assert fetch(remote(index), target) == SIZE_BYTES - 200_000
    assert target.read_bytes() == CONTENT
    assert [asked.range for asked in index.asked] == ["bytes=200000-", None]


def test_a_part_that_is_too_long_is_fetched_from_the_start(index: Index, target: Path) -> None:
    part_path(target).write_bytes(b"x" * (SIZE_BYTES + 1))
    fetch(remote(index), target)
    assert target.read_bytes() == CONTENT


def test_a_host_that_ignores_ranges_is_read_from_the_start(index: Index, target: Path) -> None:
    part_path(target).write_bytes(CONTENT[:200_000])
    index.behaviour[NAME] = Behaviour(ignores_range=True)
    assert fetch(remote(index), target) == SIZE_BYTES - 200_000
    assert target.read_bytes() == CONTENT


def test_a_host_that_continues_elsewhere_is_read_from_the_start(index: Index, target: Path) -> None:
    part_path(target).write_bytes(CONTENT[:200_000])
    index.behaviour[NAME] = Behaviour(shifts_range=True)
    fetch(remote(index), target)
    assert target.read_bytes() == CONTENT
    assert [asked.range for asked in index.asked] == ["bytes=200000-", None]


def test_a_host_that_never_gets_further_is_given_up(index: Index, target: Path) -> None:
    index.behaviour[NAME] = Behaviour(ignores_range=True, cut_after=[70_000] * 50)
    with pytest.raises(WeightsError, match="cannot fetch voice.whl from 127.0.0.1") as caught:
        fetch(remote(index), target)
    assert "70000 of 300000 bytes are kept" in str(caught.value.hint)
    assert len(index.asked) == 1 + LIMITS.max_attempts


def test_a_silent_host_is_given_up_and_what_came_is_kept(index: Index, target: Path) -> None:
    index.behaviour[NAME] = Behaviour(hang_after=[100_000, 0, 0, 0])
    with pytest.raises(WeightsError, match="no answer in time"):
        fetch(remote(index), target, replace(LIMITS, read_timeout_s=1.0))
    assert part_path(target).read_bytes() == CONTENT[:100_000]
    assert not target.exists()
    fetch(remote(index), target)
    assert target.read_bytes() == CONTENT


def test_damaged_bytes_never_get_the_name(index: Index, target: Path) -> None:
    index.behaviour[NAME] = Behaviour(body=b"x" * SIZE_BYTES)
    with pytest.raises(WeightsError, match=r"voice\.whl from 127\.0\.0\.1 is damaged: sha256 .* expected"):
        fetch(remote(index), target)
    assert not target.exists()
    assert not part_path(target).exists(), "damaged bytes are no use to the next call"


def test_a_login_page_is_not_taken_for_the_file(index: Index, target: Path) -> None:
    index.behaviour[NAME] = Behaviour(body=b"<html>please log in</html>")
    with pytest.raises(WeightsError, match="offers 26 bytes as voice.whl, expected 300000") as caught:
        fetch(remote(index), target)
    assert "login page" in str(caught.value.hint)


def test_an_overloaded_host_is_asked_again(index: Index, target: Path) -> None:
    index.behaviour[NAME] = Behaviour(status=[503, 429])
    fetch(remote(index), target)
    assert target.read_bytes() == CONTENT
    assert len(index.asked) == 3


@pytest.mark.parametrize(("status", "word"), [(404, "404"), (401, "netrc")])
def test_a_refusal_is_final(index: Index, target: Path, status: int, word: str) -> None:
    index.behaviour[NAME] = Behaviour(status=[status])
    with pytest.raises(WeightsError, match=f"127.0.0.1 answered {status}") as caught:
        fetch(remote(index), target)
    assert word in f"{caught.value} {caught.value.hint}"
    assert len(index.asked) == 1


def test_an_unreachable_host_is_named(index: Index, target: Path) -> None:
    source = remote(index, url="http://weights.invalid/voice.whl")
    with pytest.raises(WeightsError, match="cannot fetch voice.whl from weights.invalid"):
        fetch(source, target)


def test_a_file_url_is_copied(index: Index, target: Path) -> None:
    source = remote(index, url=(index.folder / NAME).as_uri())
    assert fetch(source, target) == SIZE_BYTES
    assert target.read_bytes() == CONTENT
    assert index.asked == []


def test_a_file_url_without_a_file_is_an_error(index: Index, target: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="it is not there"):
        fetch(remote(index, url=(tmp_path / "gone.whl").as_uri()), target)


def test_a_full_disk_keeps_nothing_under_the_name(index: Index, target: Path) -> None:
    os.symlink("/dev/full", part_path(target))
    with pytest.raises(OSError, match="No space left on device"):
        fetch(remote(index), target)
    assert not target.exists()
