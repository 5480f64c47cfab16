"""Sizes and counts as people write them ("192 MiB", "135M") and back. Used by recipes, hardware and printing."""

from __future__ import annotations

import re

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_BYTES = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER_AND_UNIT = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def parse_bytes(value: object) -> object:
    """`192 MiB`, `1.5 GB` or a whole number of bytes -> int. ValueError for other text; other types pass through."""
    if not isinstance(value, str):
        return value
    return _parse(value, {**_BYTES, "": 1}, "a size such as 192 MiB or 1.5 GB")


def parse_count(value: object) -> object:
    """`135M`, `0.6B` or a whole number -> int. ValueError for other text; other types pass through."""
    if not isinstance(value, str):
        return value
    return _parse(value, _COUNTS, "a count such as 135M or 7B")


def format_bytes(size_bytes: int) -> str:
    """Three significant digits with a binary unit: `192 MiB`, `1.25 GiB`."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.4g} {unit}"
    return f"{size_bytes} B"


def format_count(count: int) -> str:
    """`135M`, `1.5B`."""
    for unit in ("T", "B", "M", "K"):
        if count >= _COUNTS[unit]:
            return f"{count / _COUNTS[unit]:.4g}{unit}"
    return str(count)


def _parse(text: str, units: dict[str, int], expected: str) -> int:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"expected {expected}")
    return round(float(match[1]) * units[match[2]]) if "." in match[1] else int(match[1]) * units[match[2]]
