"""From written text to text that can be said: markdown, links, addresses and pictures out, words kept.

Pure, and works on one piece of one line at a time. Numbers, dates, units and abbreviations are left alone: the
pronunciation library reads those. Called by `speakable`.
"""

from __future__ import annotations

import html
import re
import unicodedata

_FENCE = re.compile(r"(?:```|~~~)[\w+.#-]*$")
_LINE_MARK = re.compile(r"(?:>\s*)*(?:#{1,6}\s+|[-*+•–]\s+(?:\[[ xX]\]\s+)?)?")
_LINK = re.compile(r"!?\[([^\[\]]*)\]\((?:[^()\s]|\([^()\s]*\))*(?:\s+(?:\"[^\"]*\"|'[^']*'))?\)")
_LINK_REST = re.compile(r"\]\((?:[^()\s]|\([^()\s]*\))*\)?")
_AUTOLINK = re.compile(r"<((?:https?://|www\.|mailto:)[^<>\s]+)>")
_TAG = re.compile(
    r"</?(?:a|b|blockquote|br|code|details|div|em|h[1-6]|hr|i|img|li|ol|p|pre|s|small|span|strong|sub|summary|sup"
    r"|table|tbody|td|th|thead|tr|u|ul)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?:https?://|ftp://|mailto:|www\.)[^\s<>\"'”’]+")
_ADDRESS_PARTS = {".": " dot ", "/": " slash ", "@": " at ", "-": " dash ", ":": " colon "}
_TIMES = re.compile(r"(?<=[\d)]) ?\* ?(?=[\d(])")
_LONG_NUMBER = re.compile(r"\d{13,}")
"""Card and account numbers: read digit by digit."""
_SHARP = re.compile(r"\b([CFJ])#")
_ABOUT = re.compile(r"~(?=\d)")
_EMPHASIS = re.compile(r"[*`]|~~|(?<!\w)_+|_+(?!\w)")
_BRACKETS = re.compile(r"[\[\]{}\\]")
_SAME_MARK = re.compile(r"([!?,;:])[!?,;:]*|(\.)\.+|(…)[….]*")
_SPACES = re.compile(r"\s+")
_SPACE_BEFORE_MARK = re.compile(r" +(?=[,.;:!?…])")
_READABLE_SYMBOLS = frozenset("°©^")


def spoken_text(text: str, *, line_start: bool) -> str:
    """What to say for `text`, or "" when there is nothing to say in it.

    `text` is a whole line or a part of one; marks that mean something only at the start of a line are taken off
    when `line_start`. What a cut has torn apart (half a link, an opening mark without its end) is taken off too.
    Queries and fragments of web addresses are not read out.
    """
    text = text.strip()
    if line_start:
        if _FENCE.match(text):
            return ""
        text = _LINE_MARK.sub("", text, count=1)
    text = _AUTOLINK.sub(r"\1", _LINK.sub(r"\1", text))
    text = _TAG.sub(" ", _LINK_REST.sub(" ", text))
    text = _ADDRESS.sub(_address, html.unescape(text))
    text = _ABOUT.sub("about ", _SHARP.sub(r"\1 sharp", _TIMES.sub(" times ", text)))
    text = _LONG_NUMBER.sub(lambda m: " ".join(m.group()), text)
    text = _BRACKETS.sub(" ", _EMPHASIS.sub("", text))
    text = "".join(_sayable(c) for c in unicodedata.normalize("NFC", text))
    text = _SAME_MARK.sub(_one_mark, text)
    text = _SPACE_BEFORE_MARK.sub("", _SPACES.sub(" ", text)).strip()
    return text if any(c.isalnum() for c in text) else ""


def _address(match: re.Match[str]) -> str:
    """example.com/docs as words; the marks that end a sentence stay outside of it."""
    address = match.group()
    end = address.rstrip(".,;:!?)]*_")
    tail = address[len(end) :]
    end = re.sub(r"^(?:https?://|ftp://|mailto:)?(?:www\.)?", "", end)
    end = re.split(r"[?#]", end, maxsplit=1)[0].rstrip("/")
    return "".join(_ADDRESS_PARTS.get(c, c) for c in end) + tail


def _sayable(char: str) -> str:
    """The character, a space for a picture or an unknown sign, nothing for one that only changes its neighbour."""
    category = unicodedata.category(char)
    if category in ("Cf", "Mn", "Me"):
        return ""
    if category in ("So", "Sk", "Cc", "Cn", "Co", "Cs") and char not in _READABLE_SYMBOLS:
        return " "
    return char


def _one_mark(match: re.Match[str]) -> str:
    """ "!!!" -> "!"; "...." -> "..." (a pause of its own)."""
    single, dot, ellipsis = match.groups()
    return single or ("..." if dot else ellipsis)
