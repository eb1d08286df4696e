"""Text for people: numbers with nouns, times, and other users' text, harmless in a terminal."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

# Control characters except tab and newline, and characters that change the writing direction.
_CONTROL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]+"
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]*m")


def plain(text: object) -> str:
    """Return `str(text)` with control characters as escapes, such as `\\x1b`.

    Tabs and newlines stay. Lone surrogates, which stand for bytes that are not UTF-8, become
    escapes too.
    """
    return _CONTROL.sub(_escape, str(text))


def _escape(controls: re.Match[str]) -> str:
    # A whole run at once: a sparse file has millions of them.
    return controls[0].encode("unicode_escape").decode("ascii")


def counted(number: int, noun: str) -> str:
    """Return `1 GPU` or `2 GPUs`: a number and a regular noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def exact(number: float) -> str:
    """Return a number with all its digits, whole ones without a point: `1763333333`, `0.5`."""
    return str(int(number)) if number == number // 1 else str(number)


def unix_time(moment: str | None) -> float | None:
    """Return the Unix seconds of an ISO 8601 text; None for None and for no time."""
    try:
        return datetime.fromisoformat(moment).timestamp() if moment else None
    except ValueError:
        return None


def plain_line(text: object) -> str:
    """Return `plain(text)` on one line: newlines become spaces."""
    return plain(text).replace("\n", " ")


def plain_output(text: str) -> str:
    """Return a program's output without colours, otherwise as `plain`. Carriage returns stay."""
    return "\r".join(plain(part) for part in _COLOUR.sub("", text).split("\r"))
