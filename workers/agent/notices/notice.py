"""A notice as the agent understands it, whichever cloud gave it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final, Literal, Protocol

# A time further off than this is no interruption's.
LEAD_MAX_S: Final = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """`stop`: the node goes away at `deadline` (Unix seconds). `save`: it soon may.

    `event_id` names what the cloud wants to have acknowledged, empty for nothing.
    """

    cloud: str
    wants: Literal["stop", "save"]
    deadline: float | None
    detail: str
    event_id: str = ""


Poll = Callable[[float], list[Notice]]


class Cloud(Protocol):
    """One cloud's metadata service, seen from a node. What it does raises `NoticeError`."""

    name: str
    every_s: float

    def probe(self) -> None:
        """Return when this machine is one of the cloud's."""
        ...

    def polls(self) -> tuple[Poll, ...]:
        """Each looks once for notices, at the Unix time given; each has a thread of its own."""
        ...

    def acknowledge(self, event_id: str) -> None:
        """Tell the cloud that it need not wait any longer."""
        ...

    def close(self) -> None:
        """Hang up on everything that is under way."""
        ...


def deadline_of(text: object, *, now: float, lead_s: float) -> float:
    """Unix seconds of a time in ISO 8601 or of RFC 1123; `now` + `lead_s` where it cannot be meant.

    A time that is past or very far says that one of the clocks is wrong, not when the node goes.
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
