"""Text to speakable pieces: where it is cut, what is said, and that neither depends on how the text arrived."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.programs.sidekick.speakable import Boundary, CutRules, Piece, SpeakableCutter
from runtime.programs.sidekick.spoken_text import spoken_text

ONE_PIECE_RULES = CutRules(clause_min_chars=(1000,), max_chars=(1000,))


def cut(text: str, rules: CutRules | None = None, deltas: list[int] | None = None) -> list[Piece]:
    """All pieces of `text`, fed in deltas of the given lengths (the rest in one)."""
    cutter, pieces, start = SpeakableCutter(rules), [], 0
    for length in deltas or []:
        pieces += cutter.feed(text[start : start + length])
        start += length
    return pieces + cutter.feed(text[start:]) + cutter.finish()


def spoken(text: str, rules: CutRules | None = None) -> list[str]:
    return [piece.spoken for piece in cut(text, rules)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there. How are you? Fine!", ["Hello there.", "How are you?", "Fine!"]),
        ("Dr. Smith met Mrs. Jones. They talked.", ["Dr. Smith met Mrs. Jones.", "They talked."]),
        ("Use a tool, e.g. Hammer or saw. Done.", ["Use a tool, e.g. Hammer or saw.", "Done."]),
        ("Pi is 3.14 and not 3. Right.", ["Pi is 3.14 and not 3.", "Right."]),
        ("It cost 1,000 dollars. Yes.", ["It cost 1,000 dollars.", "Yes."]),
        ("At 10:30 a.m. we left. At 9 p.m. We came.", ["At 10:30 a.m. we left.", "At 9 p.m.", "We came."]),
        ("J. K. Rowling wrote it. I know.", ["J. K. Rowling wrote it.", "I know."]),
        ("Nobody but I. You know.", ["Nobody but I.", "You know."]),
        ("See No. 5 there. I said no. Really.", ["See No. 5 there.", "I said no.", "Really."]),
        ("Apples, pears, etc. are fruit. Eat some, etc. Then rest.",
         ["Apples, pears, etc. are fruit.", "Eat some, etc.", "Then rest."]),
        ("In the U.S. Army there.", ["In the U.S. Army there."]),
        ('He said "Stop." Then (quietly.) He left.', ['He said "Stop."', "Then (quietly.)", "He left."]),
        ("Ends with **bold.** Next one.", ["Ends with bold.", "Next one."]),
        ("1. Apples\n2. Pears", ["1. Apples", "2. Pears"]),
        ("你好。我很好！", ["你好。", "我很好！"]),
    ],
)  # fmt: skip
def test_sentences(text: str, expected: list[str]) -> None:
    assert spoken(text, ONE_PIECE_RULES) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# Heading\nText", ["Heading", "Text"]),
        ("> quoted *words* here", ["quoted words here"]),
        ("- [x] one\n* two\n• three", ["one", "two", "three"]),
        ("**bold** and `code` and ~~gone~~ and __init__", ["bold and code and gone and init"]),
        ("un*believ*able snake_case", ["unbelievable snake_case"]),
        ("see [the page](https://a.org/x_(y)?q=1 \"title\").", ["see the page."]),
        ("![a cat](cat.png) sat", ["a cat sat"]),
        ("```python\nprint(1)\n```\nend", ["print(1)", "end"]),
        ("| a | b |\n|---|---|\n| 1 | 2 |", ["| a | b |", "| 1 | 2 |"]),
        ("at https://www.example.com/a-b?x=1#top. Now.", ["at example dot com slash a dash b.", "Now."]),
        ("<https://a.org> <b>bold</b> &amp; 1 < 2", ["a dot org bold & 1 < 2"]),
        ("C# is 2 * 3, ~5 km", ["C sharp is 2 times 3, about 5 km"]),
        ("wow!!! what?!?! hm....", ["wow! what? hm..."]),
        ("nice 😀👍🏽 day ❤️ 1️⃣", ["nice day 1"]),
        ("cafe\u0301 co\u00adoperate nul\x00l", ["café cooperate nul l"]),
        ("card 4111111111111111, of 1234567", ["card 4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1, of 1234567"]),
        ("see [1] and array[2]", ["see 1 and array 2"]),
    ],
)  # fmt: skip
def test_what_is_said(text: str, expected: list[str]) -> None:
    assert spoken(text, ONE_PIECE_RULES) == expected


@pytest.mark.parametrize(
    "text", ["", "   ", "\n\n\t", "...", "😀", "😀😀\n❤️", "---", "***", "!?", '"', "```", "\u200b"]
)
def test_nothing_to_say(text: str) -> None:
    assert cut(text) == []


def test_torn_link_leaves_no_address() -> None:
    assert spoken_text("[see this,", line_start=True) == "see this,"
    assert spoken_text("or that](https://a.org/x) now", line_start=False) == "or that now"


def test_boundaries_name_what_the_piece_ends_with() -> None:
    text = "One sentence. A first clause of it, then\nline end\n\nparagraph"
    rules = CutRules(clause_min_chars=(10,), max_chars=(100,))
    assert [p.boundary for p in cut(text, rules)] == [
        Boundary.SENTENCE,
        Boundary.CLAUSE,
        Boundary.LINE,
        Boundary.LINE,
        Boundary.END,
    ]


def test_ellipsis_and_lower_case_are_no_sentence_ends() -> None:
    rules = CutRules(clause_min_chars=(5,), max_chars=(100,))
    boundaries = [p.boundary for p in cut("Well... I see. and so on; right — Fine.", rules)]
    assert boundaries == [Boundary.CLAUSE, Boundary.CLAUSE, Boundary.CLAUSE, Boundary.CLAUSE, Boundary.END]


def test_the_first_piece_is_small_and_later_ones_long() -> None:
    text = "If you like apples, pears and plums, then buy apples, pears and plums, because apples, pears, " * 4
    lengths = [len(p.text) for p in cut(text)]
    assert lengths[0] < 25 < 40 <= lengths[1] < 80
    assert all(length >= 80 for length in lengths[2:-1])


def test_a_comma_between_digits_is_no_clause_end() -> None:
    rules = CutRules(clause_min_chars=(3,), max_chars=(100,))
    assert spoken("On March 3, 2024 it rained, they say", rules) == ["On March 3, 2024 it rained,", "they say"]


def test_text_without_marks_is_cut_before_a_joining_word_and_loses_nothing() -> None:
    text = "the quick brown fox jumps over the lazy dog and then it runs over the hills " * 8
    pieces = cut(text)
    assert pieces[0].text == "the quick brown fox jumps over the lazy dog"
    assert [p.boundary for p in pieces[:-1]] == [Boundary.LENGTH] * (len(pieces) - 1)
    assert max(len(p.text) for p in pieces) <= 240
    assert " ".join(p.text for p in pieces) == text.strip()


def test_a_word_without_end_is_cut_hard() -> None:
    pieces = cut("x" * 1000)
    assert [len(p.text) for p in pieces[:3]] == [80, 140, 240]
    assert "".join(p.text for p in pieces) == "x" * 1000


def test_first_piece_of_unpunctuated_stream_is_out_before_100_characters() -> None:
    """At 200 characters a second that is half a second after the first of them."""
    cutter, text, num_chars = SpeakableCutter(), "word " * 40, 0
    while not cutter.feed(text[num_chars : num_chars + 10]):
        num_chars += 10
    assert num_chars < 100


def test_holds_one_piece_of_a_long_text() -> None:
    cutter = SpeakableCutter()
    for _ in range(2000):
        cutter.feed("no end of it and no mark ")
        assert len(cutter._buffer) < 300
    cutter.feed(" " * 100_000 + "\n" * 100_000)
    assert len(cutter._gap) == 1


TEXTS = st.text(st.sampled_from(list(" \n.,;:!?…—-\"')*_`[]()aAbBI19。，é😀\t\r\u2029")), max_size=300) | st.lists(
    st.sampled_from(
        [
            "Dr. Smith,",
            "e.g.",
            "3.14",
            "1,000",
            "10:30",
            "a.m.",
            "...",
            "Wait!",
            "http://a.org/b.c,",
            "**bold**",
            "- item",
            "\n",
            "\n\n",
            "# Head",
            "1.",
            "and",
            "so;",
            "word",
            "Word.",
            "(yes.)",
            "U.S.",
            "😀",
            "—",
            "`x`",
        ]
    ),
    max_size=60,
).map(" ".join)
RULES = st.sampled_from([CutRules(), ONE_PIECE_RULES, CutRules(clause_min_chars=(1, 5), max_chars=(4, 9, 30))])


@settings(deadline=None)
@given(text=TEXTS, deltas=st.lists(st.integers(0, 12), max_size=80), rules=RULES)
@example(text='say—" next', deltas=[4, 1, 1], rules=CutRules(clause_min_chars=(1,), max_chars=(50,)))
@example(text="a\r\nb", deltas=[2, 1], rules=CutRules())
def test_same_pieces_however_the_text_was_split(text: str, deltas: list[int], rules: CutRules) -> None:
    assert cut(text, rules, deltas) == cut(text, rules)


@settings(deadline=None)
@given(text=TEXTS, rules=RULES)
def test_no_letter_is_lost_and_no_piece_is_too_long(text: str, rules: CutRules) -> None:
    cutter = SpeakableCutter(rules)
    pieces = cutter.feed(text) + cutter.finish()
    assert all(len(p.text) <= rules.max_chars[-1] + 2 for p in pieces)
    spoken_letters = [c for p in pieces for c in p.text if c.isalnum()]
    letters = [c for c in text if c.isalnum()]
    assert len(spoken_letters) <= len(letters)
    if not any(mark in text for mark in ("`", "[", "(", "<", "~", "http", "*", "_")):
        assert spoken_letters == letters
