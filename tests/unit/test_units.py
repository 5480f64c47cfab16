"""Sizes and counts: written as people write them, read back as what was meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnictl.units import GIB, KIB, MIB, format_bytes, format_count, parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("192 MiB", 192 * MIB), ("1.5GiB", 3 * GIB // 2), ("1 GB", 10**9), ("7 kB", 7000), ("12 B", 12), ("12", 12)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(("text", "count"), [("135M", 135 * 10**6), ("0.6B", 6 * 10**8), ("7 K", 7000), ("3", 3)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1 MiB", "1 Mib", "1 mb", "1e3", "1 MiB more", "１ MiB ", "nan", "1,5 GiB"]
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as"):
        parse_bytes(text)
    with pytest.raises(ValueError, match="expected a count such as"):
        parse_count(text)


@given(st.integers(0, 10**6), st.sampled_from([1, KIB, MIB, GIB]))
def test_what_is_shown_means_nearly_the_same(count: int, unit: int) -> None:
    size_bytes = count * unit
    shown = parse_bytes(format_bytes(size_bytes))
    assert isinstance(shown, int)
    assert abs(shown - size_bytes) <= size_bytes / 1000


def test_shown_counts() -> None:
    assert [format_count(count) for count in (7, 7000, 135_000_000, 1_500_000_000)] == ["7", "7K", "135M", "1.5B"]
