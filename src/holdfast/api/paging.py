"""Pages of lists that are short enough to be made whole."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from pydantic import BaseModel

from holdfast.contracts.errors import SpecError

PAGE_DEFAULT: Final = 50
PAGE_MAX: Final = 500

T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    """Some rows, and the cursor of those after them; null when there are no more."""

    items: list[T]
    next: str | None


def page_of(
    rows: Sequence[T], name_of: Callable[[T], str], after: str | None, limit: int
) -> Page[T]:
    """The `limit` rows after the one that the cursor names. Raises `SpecError` for a bad cursor."""
    start = 0
    if after is not None:
        name = _read(after)
        start = next((n + 1 for n, row in enumerate(rows) if name_of(row) == name), -1)
        if start < 0:
            raise SpecError(f"{after[:80]!r}: not a cursor of this list; begin without one")
    found = list(rows[start : start + limit])
    more = start + limit < len(rows)
    return Page(items=found, next=_write(name_of(found[-1])) if more and found else None)


def _write(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")


def _read(cursor: str) -> str:
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        return ""
