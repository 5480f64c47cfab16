"""How a long clip is heard in windows: where to cut it, what a window's tokens say, what to believe of it. Pure.

A window is cut where nobody speaks. Where somebody always does, the window's own timestamps tell up to where it
was understood, and the next one begins there: so words at the borders are neither lost nor doubled.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime.programs.media.audio import SAMPLE_RATE_HZ, FloatArray
from runtime.programs.sidekick.sound import block_rms

MAX_WINDOW_S = 30.0
_SEARCH_S = 10.0
"""The cut is looked for in so much of the window's end."""
_BLOCK_S = 0.02
_SMOOTH_BLOCKS = 10
_QUIET = 0.1
"""A moment this far below the window's loud parts is a pause (-20 dB)."""
_MIN_ADVANCE_S = 1.0
"""A window that was understood for less than this is not begun again: the clip would take for ever."""
_MIN_REST_S = 0.4
"""Nor is it begun again for less than a short word."""
_MIN_ADVANCE_CUT_OFF_S = 10.0
"""Nor, where the model had to be stopped, for less than this: each time costs as much as a window may cost."""
TOKEN_S = 0.02
"""Timestamps count in steps of this."""

_NO_SPEECH_PROB = 0.5
_AVERAGE_LOG_PROB = -1.0
_REPETITIVE = 2.4
_MIN_ROUNDS = 3
_MIN_LOOP_TOKENS = 24
"""Fewer, as in "no, no, no", are no loop."""
_FASTEST_TOKENS_PER_S = 12.0
"""Nobody says the same over and over faster than this; a model does."""


@dataclass(frozen=True, slots=True)
class Window:
    """Samples [start, stop) of a clip. `whole`: it ends in a pause or with the clip, so all it says is complete."""

    start: int
    stop: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Heard:
    """What the model made of a window: text and timestamp tokens, and how sure it was. `num_steps` is what it cost.

    In a loop each round makes the model surer of the next one: average_log_prob is then that of the first round.
    """

    tokens: Sequence[int]
    no_speech_prob: float
    average_log_prob: float
    cut_off: bool = False
    """The model went on until it was stopped."""
    num_steps: int = 0


@dataclass(frozen=True, slots=True)
class TimedTokens:
    """Text tokens between two timestamps, in seconds from the start of the window."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]


def next_window(samples: FloatArray, start: int, stop: int) -> Window:
    """The window at `start` of a clip whose sound ends at `stop`."""
    longest = int(MAX_WINDOW_S * SAMPLE_RATE_HZ)
    if stop - start <= longest:
        return Window(start, stop, whole=True)
    levels = block_rms(samples[start : start + longest])
    smooth = np.convolve(levels, np.ones(_SMOOTH_BLOCKS) / _SMOOTH_BLOCKS, mode="same")
    first = len(smooth) - int(_SEARCH_S / _BLOCK_S)
    candidates = smooth[first : len(smooth) - _SMOOTH_BLOCKS]
    pauses = np.flatnonzero(candidates <= _QUIET * np.quantile(levels, 0.9))
    if len(pauses) == 0:
        return Window(start, start + longest, whole=False)
    cut = first + int(pauses[-1])
    return Window(start, start + int(cut * _BLOCK_S * SAMPLE_RATE_HZ), whole=True)


def split_tokens(
    tokens: Sequence[int], first_timestamp: int, window_s: float
) -> tuple[list[TimedTokens], TimedTokens | None]:
    """The timed parts of a window's tokens, and the one that it leaves open, if there is one.

    Tokens come as <start> text <end><start> text <end>. An open part lacks its <end>, and maybe its text too: then
    the model heard something begin that it did not write down.
    """
    parts: list[TimedTokens] = []
    start_s, text, num_marks = 0.0, list[int](), 0
    for token in tokens:
        if token < first_timestamp:
            text.append(token)
            num_marks = 0
            continue
        time_s = min((token - first_timestamp) * TOKEN_S, window_s)
        if text:
            parts.append(TimedTokens(start_s, max(start_s, time_s), tuple(text)))
            text = []
        start_s = time_s
        num_marks += 1
    is_open = bool(text) or num_marks > 1
    return parts, TimedTokens(start_s, window_s, tuple(text)) if is_open else None


def complete_parts(heard: Heard, first_timestamp: int, window: Window) -> tuple[list[TimedTokens], int]:
    """The parts of a window to keep, and the sample of the clip where the next window begins.

    An open part is heard again from its start, unless its text is all there or too little would be gained. Of a part
    that the model filled by saying the same over and over, the first round is kept: that much was said.
    """
    window_s = (window.stop - window.start) / SAMPLE_RATE_HZ
    timed, rest = split_tokens(heard.tokens, first_timestamp, window_s)
    parts = [without_loop(part) for part in timed]
    if rest is None:
        return parts, window.stop
    is_complete = window.whole and bool(rest.tokens) and not heard.cut_off
    min_advance_s = _MIN_ADVANCE_CUT_OFF_S if heard.cut_off else _MIN_ADVANCE_S
    if not is_complete and rest.start_s >= min_advance_s and window_s - rest.start_s >= _MIN_REST_S:
        return parts, window.start + int(rest.start_s * SAMPLE_RATE_HZ)
    return [*parts, without_loop(rest, heard.cut_off)] if rest.tokens else parts, window.stop


def without_loop(part: TimedTokens, cut_off: bool = False) -> TimedTokens:
    """The part as it is, or up to its first round if it runs in circles faster than anyone speaks, or to no end.

    Whoever really repeats himself does so at the pace of speech, and the timestamps show it.
    """
    too_fast = len(part.tokens) > _FASTEST_TOKENS_PER_S * (part.end_s - part.start_s)
    if not (cut_off or too_fast):
        return part
    return replace(part, tokens=tuple(part.tokens[: first_round(part.tokens)]))


def first_round(tokens: Sequence[int]) -> int:
    """How many of the text tokens come before the model begins to repeat them; all of them if it does not.

    A loop is a run of at least three equal rounds; the longest one counts.
    """
    longest, length = len(tokens), _MIN_LOOP_TOKENS - 1
    for period in range(1, len(tokens) // _MIN_ROUNDS + 1):
        run = 0
        for index in range(period, len(tokens)):
            run = run + 1 if tokens[index] == tokens[index - period] else 0
            if run >= (_MIN_ROUNDS - 1) * period and run + period > length:
                longest, length = index + 1 - run, run + period
    return longest


def is_repetitive(text: str) -> bool:
    """Whether a text says the same over and over, as a model does that has lost the thread."""
    data = text.encode()
    return len(data) > _REPETITIVE * len(zlib.compress(data))


def sounds_like_speech(heard: Heard) -> bool:
    """Whether the window is speech for sure, whatever the model made of it."""
    return heard.no_speech_prob < _NO_SPEECH_PROB


def is_speech(heard: Heard, text: str) -> bool:
    """Whether to believe a window's text. Noise and music make the model speak too, but unsurely or in circles.

    `text` goes up to the end of its first round: a sentence that someone says again and again was said.
    """
    return sounds_like_speech(heard) or (heard.average_log_prob >= _AVERAGE_LOG_PROB and not is_repetitive(text))
