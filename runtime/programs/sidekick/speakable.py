"""Cuts text that is still being written into pieces that can be spoken one after the other.

Where it cuts depends on the text alone, never on how the text was chopped up on its way or on when it came: a place
is a boundary or not as soon as the next word has begun, and is decided then. Knows nothing of voices. The talker
feeds it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from runtime.programs.sidekick.spoken_text import spoken_text


class Boundary(StrEnum):
    """What a piece ends with; the pause after it depends on that."""

    SENTENCE = "sentence"
    CLAUSE = "clause"
    LINE = "line"
    LENGTH = "length"
    """The text went on for too long without a mark to cut at."""
    END = "end"


@dataclass(frozen=True, slots=True)
class Piece:
    """`text` as it was written, `spoken` as it is to be said."""

    text: str
    spoken: str
    boundary: Boundary


@dataclass(frozen=True, slots=True)
class CutRules:
    """Lengths in characters, for the first piece, the second, ...; the last value holds for all that follow.

    The first pieces are short, so that speech begins early and each piece lasts until the next one is written;
    later ones are long, because a sentence said as a whole has the better melody.
    """

    clause_min_chars: tuple[int, ...] = (16, 40, 80)
    """A comma and its like end a piece that is at least this long."""
    max_chars: tuple[int, ...] = (80, 140, 240)
    """A piece without any mark is cut at a space before this."""

    def limits(self, index: int) -> tuple[int, int]:
        """(clause_min_chars, max_chars) of piece `index`."""
        return _nth(self.clause_min_chars, index), _nth(self.max_chars, index)


def _nth(values: tuple[int, ...], index: int) -> int:
    return values[min(index, len(values) - 1)]


_CANDIDATE = re.compile(
    r"(?P<mark>[.!?…]+|[,;:—]|(?<= )[-–]+(?= ))[\"'”’)\]}*_`~]*(?P<gap>\s+)"
    r"|(?P<wide>[。！？，；：、]+)(?P<after>\s*)"
    r"|(?P<dash>—)(?=[^\s\"'”’)\]}*_`~])"
    r"|(?P<line>\n)"
)
_SOFT_BREAK = re.compile(r"(?<! and)(?<! but)(?<! or) (?=(?:and|but|or|because|which|who|that|while|when|where|if)\b)")
"""A space before a joining word; of two such words in a row, the first."""
_LIST_NUMBER = re.compile(r"(?:>\s*)*\(?(?:\d{1,3}|[A-Za-z])$")
_LAST_WORD = re.compile(r"[^\s(\[\"“‘'*_]*$")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER_ENDS = _words(
    "mr mrs ms dr prof st mt ft gen gov sen rep capt lt col sgt rev hon pres messrs mme mlle"
    " e.g i.e cf vs viz ca pp ph.d u.s u.k u.n"
)
_SELDOM_ENDS = _words("etc inc ltd co corp jr sr est dept approx a.m p.m min max al")
"""Ends a sentence only when a capital follows."""
_NUMBERED = _words("no nos p vol ch fig figs eq sec art")
"""Abbreviations only before a number."""
_MARGIN_CHARS = 2
"""With so much text beyond a place, whether it is a boundary is decided: the gap and the next word's start."""
_BLOCK_CHARS = 4096
"""A long text is cut block by block, so that the time it takes grows with its length and not with the square."""

_GAPS = re.compile(r"\s+")
_NEWLINES = {0x2028: "\n", 0x2029: "\n", 0x85: "\n"}


def _as_one(gap: str) -> str:
    """A newline if there is one in the gap, else a space; nothing stays nothing."""
    return "\n" if "\n" in gap else gap[:1] and " "


class SpeakableCutter:
    """`feed` text as it comes and `finish` at its end; both return the pieces that are complete.

    Pieces with nothing to say (a rule, a picture) are left out. Holds no more than one piece of text.
    """

    def __init__(self, rules: CutRules | None = None) -> None:
        self._rules = rules or CutRules()
        self._buffer = ""
        self._gap = ""
        self._line_start = True
        self._num_pieces = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for start in range(0, len(text), _BLOCK_CHARS):
            self._take(text[start : start + _BLOCK_CHARS])
            pieces += self._cut_all()
        return pieces

    def finish(self) -> list[Piece]:
        """The unfinished tail. Nothing may be fed afterwards."""
        pieces = self._cut_all()
        pieces += self._emit(self._buffer, Boundary.END)
        self._buffer = ""
        return pieces

    def _take(self, text: str) -> None:
        """Append with every gap as one space or newline, and only once a word follows it.

        So the buffer never ends in a gap: each gap in it is complete and has its next word.
        """
        text = self._gap + text.translate(_NEWLINES)
        written = text.rstrip()
        self._gap = _as_one(text[len(written) :])
        if written:
            self._buffer += _GAPS.sub(lambda m: _as_one(m.group()), written)
            self._strip_start()

    def _strip_start(self) -> None:
        stripped = self._buffer.lstrip()
        self._line_start = self._line_start or "\n" in self._buffer[: len(self._buffer) - len(stripped)]
        self._buffer = stripped

    def _cut_all(self) -> list[Piece]:
        pieces: list[Piece] = []
        while (cut := self._next_cut()) is not None:
            end, boundary = cut
            text, self._buffer = self._buffer[:end], self._buffer[end:]
            pieces += self._emit(text, boundary)
            self._line_start = False
            self._strip_start()
        return pieces

    def _emit(self, text: str, boundary: Boundary) -> list[Piece]:
        spoken = spoken_text(text, line_start=self._line_start)
        if not spoken:
            return []
        self._num_pieces += 1
        return [Piece(text, spoken, boundary)]

    def _next_cut(self) -> tuple[int, Boundary] | None:
        """End and kind of the first complete piece in the buffer, if there is one."""
        clause_min_chars, max_chars = self._rules.limits(self._num_pieces)
        for match in _CANDIDATE.finditer(self._buffer, 0, max_chars + _MARGIN_CHARS):
            end = match.start("line") if match["line"] else match.end() - len(match["gap"] or match["after"] or "")
            if end > max_chars or match.end() == len(self._buffer):
                break
            boundary = self._judge(match)
            if boundary is not None and (boundary is not Boundary.CLAUSE or end >= clause_min_chars):
                return end, boundary
        if len(self._buffer) < max_chars + _MARGIN_CHARS:
            return None
        return self._cut_by_length(max_chars), Boundary.LENGTH

    def _judge(self, match: re.Match[str]) -> Boundary | None:
        """What kind of boundary the text has at a candidate, if it is one."""
        gap = match["line"] or match["gap"] or match["after"] or ""
        if "\n" in gap:
            return Boundary.LINE
        mark = match["mark"] or match["wide"] or match["dash"]
        before, following = self._buffer[: match.start()], self._buffer[match.end()]
        if mark[0] in "。！？":
            return Boundary.SENTENCE
        if mark == "." and self._is_abbreviation(before, following):
            return None
        if mark == "." or mark[0] in "!?":
            return Boundary.CLAUSE if following.islower() else Boundary.SENTENCE
        if mark in ",:" and before[-1:].isdigit() and following.isdigit():
            return None
        return Boundary.CLAUSE

    def _is_abbreviation(self, before: str, following: str) -> bool:
        """Whether the full stop between the two belongs to a word, a list's number or an initial."""
        if self._line_start and _LIST_NUMBER.match(before):
            return True
        word = _LAST_WORD.search(before)
        last = word.group() if word else ""
        if len(last) == 1 and last.isupper() and last != "I":
            return True
        last = last.lower()
        if last in _NUMBERED:
            return following.isdigit()
        return last in _NEVER_ENDS or (last in _SELDOM_ENDS and following.islower())

    def _cut_by_length(self, max_chars: int) -> int:
        """The best place up to `max_chars`: before a joining word in the second half, else a space, else anywhere."""
        soft = [m.start() for m in _SOFT_BREAK.finditer(self._buffer, max_chars // 2, max_chars + 1)]
        if soft:
            return soft[-1]
        space = self._buffer.rfind(" ", 1, max_chars + 1)
        return space if space > 0 else max_chars
