"""Timed segments as subtitle files: SubRip and WebVTT. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Segments = Iterable[Mapping[str, Any]]


def to_srt(segments: Segments) -> str:
    blocks = [
        f"{number}\n{_clock(s['start'], ',')} --> {_clock(s['end'], ',')}\n{s['text'].strip()}\n"
        for number, s in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def to_vtt(segments: Segments) -> str:
    blocks = [f"{_clock(s['start'], '.')} --> {_clock(s['end'], '.')}\n{s['text'].strip()}\n" for s in segments]
    return "\n".join(["WEBVTT\n", *blocks])


def _clock(seconds: float, point: str) -> str:
    """00:01:02,345"""
    total_ms = round(seconds * 1000)
    whole_s, ms = divmod(total_ms, 1000)
    return f"{whole_s // 3600:02}:{whole_s // 60 % 60:02}:{whole_s % 60:02}{point}{ms:03}"
