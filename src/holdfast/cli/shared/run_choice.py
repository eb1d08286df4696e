"""Which runs `holdfast runs` lists, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import Any

from holdfast.contracts.states import RunState


class RunSort(StrEnum):
    """The order of the listed runs."""

    CREATED = "created"
    ENDED = "ended"
    NAME = "name"
    STATE = "state"
    STEP = "step"


@dataclass(frozen=True)
class RunChoice:
    """The wanted runs by state, user, patterns of names and time; `since` is Unix seconds."""

    states: tuple[RunState, ...] = ()
    user: str | None = None
    names: tuple[str, ...] = ()
    since: float | None = None
    sort: RunSort = RunSort.CREATED

    @property
    def is_all(self) -> bool:
        """True if every run is wanted, newest first."""
        return self == RunChoice()

    def of(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the wanted rows in their order. `rows` are newest first."""
        found = [row for row in rows if self._wants(row)]
        if self.sort is RunSort.NAME:
            return sorted(found, key=itemgetter("run"))
        if self.sort is RunSort.STATE:
            return sorted(found, key=itemgetter("state"))
        if self.sort is RunSort.STEP:
            return sorted(found, key=lambda row: -1 if row["step"] is None else -row["step"] - 2)
        if self.sort is RunSort.ENDED:
            return sorted(found, key=lambda row: -(seconds_of(row["ended_at"]) or 0.0))
        return found

    def _wants(self, row: Mapping[str, Any]) -> bool:
        own = (row["run"], row["name"])
        return (
            (not self.states or RunState(row["state"]) in self.states)
            and self.user in {None, row["created_by"]}
            and (not self.names or any(fnmatchcase(n, p) for n in own for p in self.names))
            and (self.since is None or (seconds_of(row["created_at"]) or 0.0) >= self.since)
        )


def seconds_of(moment: str | None) -> float | None:
    """Return an ISO 8601 time as Unix seconds, or None."""
    return datetime.fromisoformat(moment).timestamp() if moment else None
