"""Pagination of lists by keyset cursors.

A page begins after the sort key of the previous page's last row, not at an offset. So rows that
are added meanwhile cause neither repeated nor skipped rows, and all pages cost the same.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import Connection, Select, literal, tuple_

from holdfast.contracts.errors import QueryError
from holdfast.lineage.queries.find import Row, rows_of

PAGE_DEFAULT: Final = 50
PAGE_MAX: Final = 500
CURSOR_CHARACTERS_MAX: Final = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class RowPage(Generic[T]):
    """One page of rows; `next` is the cursor of the next page, None on the last one."""

    items: list[T]
    next: str | None

    def map(self, change: Callable[[T], Any]) -> RowPage[Any]:
        return RowPage([change(item) for item in self.items], self.next)


@dataclass(frozen=True)
class RowOrder:
    """A sort order: its name, which cursors contain, and columns that together are unique."""

    name: str
    columns: tuple[Any, ...]
    descending: bool = False


def fetch_page(
    connection: Connection,
    query: Select[Any],
    order: RowOrder,
    after: str | None,
    limit: int | None,
) -> RowPage[Row]:
    """Return the next `limit` rows of `query` by `order`, after the cursor `after`.

    If `limit` is None, return all of them. The query must select the columns of the order. Raises
    `QueryError` for a limit that is not 1 to `PAGE_MAX`, and for a cursor of another order.
    """
    if limit is not None and not 1 <= limit <= PAGE_MAX:
        raise QueryError(
            f"limit is {limit}; expected 1 to {PAGE_MAX}; request several pages instead"
        )
    if after is not None:
        # By the sort key of the last row and not by an offset, so that rows added meanwhile neither
        # repeat nor hide any.
        key, seen = tuple_(*order.columns), tuple_(*map(literal, read_cursor(order, after)))
        query = query.where(key < seen if order.descending else key > seen)
    wanted = (c.desc() if order.descending else c.asc() for c in order.columns)
    # One row more shows whether there is another page.
    found = rows_of(connection, query.order_by(*wanted).limit(limit and limit + 1))
    items = found[:limit]
    return RowPage(items, write_cursor(order, items[-1]) if len(found) > len(items) else None)


def write_cursor(order: RowOrder, row: Row) -> str:
    """Return the cursor of the page that begins after `row`, as an opaque text."""
    content = json.dumps([order.name, *(row[column.name] for column in order.columns)])
    return base64.urlsafe_b64encode(content.encode()).decode().rstrip("=")


def read_cursor(order: RowOrder, cursor: str) -> list[str | int | float]:
    """Return the sort key in a cursor. Raises `QueryError` if it is not one of this order."""
    try:
        if len(cursor) > CURSOR_CHARACTERS_MAX:
            raise ValueError("too long")
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        content = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        name: str | None = content[0]
        values: list[Any] = content[1:]
        kinds = [column.type.python_type for column in order.columns]
        fits = len(values) == len(kinds) and all(map(_is_of, values, kinds))
    except (ValueError, TypeError, LookupError, RecursionError, binascii.Error):
        # A cursor comes from the client, so anything may be in it.
        name, values, fits = None, [], False
    if name != order.name or not fits:
        raise QueryError(
            f"after={cursor[:80]!r} is not a cursor of this list sorted by {order.name}; pass the "
            "unchanged `next` of the previous page, or no cursor for the first page"
        )
    return values


def _is_of(value: object, kind: type) -> bool:
    if isinstance(value, str):
        return kind is str and "\0" not in value
    # `bool` is an `int`, and SQL would compare it as one.
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return kind is float or (kind is int and isinstance(value, int) and abs(value) < 2**63)
