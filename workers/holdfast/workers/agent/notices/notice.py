"""A notice, independent of the cloud that gave it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal

# A time further off than this cannot belong to an interruption.
LEAD_MAX_S: Final = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """`stop`: the node goes away at `deadline` (Unix seconds). `save`: it may go away soon.

    `event_id` names the event that the cloud wants acknowledged, or is empty.
    """

    cloud: str
    wants: Literal["stop", "save"]
    deadline: float | None
    detail: str
    event_id: str = ""


Poll = Callable[[float], list[Notice]]


def deadline_of(text: object, *, now: float, lead_s: float) -> float:
    """Return an ISO 8601 or RFC 1123 time as Unix seconds, or `now` + `lead_s` if implausible.

    A time in the past or far ahead means that a clock is wrong, not when the node goes away.
    """
    moment = _parse(text) if isinstance(text, str) else None
    if moment is None or not now < moment < now + LEAD_MAX_S:
        return now + lead_s
    return moment


def _parse(text: str) -> float | None:
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            found = read(text)
        except (ValueError, TypeError, IndexError, OverflowError):
            continue
        seconds = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        return seconds if math.isfinite(seconds) else None
    return None
