"""Text from files that another user may have written, made harmless for a terminal."""

from __future__ import annotations

import re
from typing import Final

# Control characters but tab and newline, and what turns the direction of writing round.
_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_ESCAPES: Final = {
    number: chr(number).encode("unicode_escape").decode("ascii")
    for number in range(0xE000)
    if _CONTROL.match(chr(number))
}
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")


def plain(text: object) -> str:
    """`str(text)` with each control character as its escape, such as `\\x1b`; tab and newline stay.

    Lone surrogates, which stand for bytes that are no UTF-8, become escapes too.
    """
    words = str(text)
    return words.translate(_ESCAPES) if _CONTROL.search(words) else words


def plain_line(text: object) -> str:
    """`plain` in one line: newlines become spaces."""
    return plain(text).replace("\n", " ")


def plain_output(text: str) -> str:
    """What a program wrote: without its colours, and otherwise `plain`. Carriage returns stay."""
    return "\r".join(plain(part) for part in _COLOUR.sub("", text).split("\r"))
