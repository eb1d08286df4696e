"""Pieces of Markdown, for pages that are written by a program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

_CODE: Final = re.compile(r"(`+[^`]*`+)")
_SPECIAL: Final = re.compile(r"([<>*\[\]\\]|(?<!\w)_|_(?!\w))")


def prose(text: str) -> str:
    """Text for people, with code in backticks; nothing else in it is markup."""
    pieces = _CODE.split(text)
    pieces[::2] = [_SPECIAL.sub(r"\\\1", piece) for piece in pieces[::2]]
    return "".join(pieces)


def sentence(text: str) -> str:
    """`prose` that begins with a capital letter and ends with a full stop."""
    text = " ".join(text.split())
    if not text:
        return ""
    first = text if text.startswith("`") else text[0].upper() + text[1:]
    return prose(first if first.endswith((".", "!", "?", ":")) else f"{first}.")


def paragraphs(text: str) -> str:
    """A docstring's paragraphs, each on one line."""
    found = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(prose(" ".join(one.split())) for one in found if one.strip())


def code(value: object) -> str:
    """`value` as code in a line."""
    text = str(value)
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; nothing when there are no rows."""
    lines = [_line(row) for row in rows]
    if not lines:
        return ""
    return "\n".join([_line(head), _line(["---"] * len(head)), *lines]) + "\n"


def section(level: int, title: str, *parts: str, anchor: str = "") -> str:
    """A heading, reached as `#anchor`, and the paragraphs or tables below it."""
    target = f"({anchor})=\n" if anchor else ""
    shown = [part.strip("\n") for part in parts if part.strip()]
    return "\n\n".join([f"{target}{'#' * level} {title}", *shown]) + "\n"


def _line(cells: Sequence[str]) -> str:
    spelled = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(spelled)} |"
