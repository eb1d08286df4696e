"""What a rank's flight record says about its collectives, as the reader passes it on.

PyTorch's flight recorder keeps the newest collectives of a rank. `holdfast.trainer.flight_records`
reads the records of a node and writes `FILE` beside them. The agent of node 0 merges these files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

FILE: Final = "collectives.json"
"""The file with the summaries of a dump's records."""
RECORD_BYTES_MAX: Final = 32 << 20
"""A larger record is refused unread. One of 2,000 collectives has about 1 MB."""
RANKS_MAX: Final = 1 << 17
DEFAULT_GROUP: Final = "default_pg"
"""What PyTorch calls the group of all ranks."""
_SPAN: Final = re.compile(r"(\d{1,6})(?:-(\d{1,6})(?::(\d{1,6}))?)?")


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One call of a collective. `place` is the line of the program that called it, or empty.

    `sequence` counts the calls of the group, and `order` those of the rank in all groups. `state`
    is "scheduled", "started" or "completed".
    """

    sequence: int
    order: int
    name: str
    state: str
    sizes: str = ""
    dtypes: str = ""
    place: str = ""

    def to_json(self) -> list[Any]:
        numbers = [self.sequence, self.order]
        return [*numbers, self.name, self.state, self.sizes, self.dtypes, self.place]

    @classmethod
    def from_json(cls, data: Any) -> CollectiveCall:
        sequence, order, *texts = data
        name, state, sizes, dtypes, place = map(str, texts)
        return cls(
            sequence=int(sequence),
            order=int(order),
            name=name,
            state=state,
            sizes=sizes,
            dtypes=dtypes,
            place=place,
        )


@dataclass(frozen=True, kw_only=True)
class GroupFlight:
    """What one rank did in one process group.

    `members` are the group's global ranks, as `span_text` writes them, or empty if the record does
    not name them, as with gloo. `newest` is the last collective that the rank called, and `first`
    the first one that has not finished, if any.
    """

    name: str
    about: str
    members: str
    newest: CollectiveCall
    first: CollectiveCall | None = None

    @property
    def title(self) -> str:
        """The group in words."""
        is_named = self.about not in {"", "undefined"}
        return f"{self.about} ({self.name})" if is_named else f"group {self.name}"

    def to_json(self) -> list[Any]:
        first = self.first.to_json() if self.first else None
        return [self.name, self.about, self.members, self.newest.to_json(), first]

    @classmethod
    def from_json(cls, data: Any) -> GroupFlight:
        name, about, members, newest, first = data
        return cls(
            name=str(name),
            about=str(about),
            members=str(members),
            newest=CollectiveCall.from_json(newest),
            first=CollectiveCall.from_json(first) if first else None,
        )


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A send or a receive that has not finished. `peer` is a global rank.

    Those of one batch have one group and one `call.sequence`.
    """

    group: str
    sends: bool
    peer: int
    call: CollectiveCall

    def to_json(self) -> list[Any]:
        return [self.group, self.sends, self.peer, self.call.to_json()]

    @classmethod
    def from_json(cls, data: Any) -> Transfer:
        group, sends, peer, call = data
        return cls(
            group=str(group),
            sends=bool(sends),
            peer=int(peer),
            call=CollectiveCall.from_json(call),
        )


@dataclass(frozen=True, kw_only=True)
class RankFlight:
    """One rank's record. `problem` says why it could not be read.

    `is_timed` is True if the record knows when a GPU started a collective. `latest` is the newest
    call of all groups.
    """

    rank: int
    groups: tuple[GroupFlight, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    latest: CollectiveCall | None = None
    is_timed: bool = False
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "groups": [group.to_json() for group in self.groups],
            "transfers": [one.to_json() for one in self.transfers],
            "latest": self.latest.to_json() if self.latest else None,
            "is_timed": self.is_timed,
            "problem": self.problem,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankFlight:
        """Return the summary in `data`. Raises `ValueError` and the like for other content."""
        latest = data.get("latest")
        return cls(
            rank=int(data["rank"]),
            groups=tuple(map(GroupFlight.from_json, data.get("groups") or ())),
            transfers=tuple(map(Transfer.from_json, data.get("transfers") or ())),
            latest=CollectiveCall.from_json(latest) if latest else None,
            is_timed=bool(data.get("is_timed")),
            problem=str(data.get("problem") or ""),
        )


def span_text(numbers: Sequence[int]) -> str:
    """Return ascending numbers in short form: "0-7", "3,9" or, with equal gaps, "0-1016:8"."""
    parts, at = [], 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 0
        end = at + 1
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        if end - at < 3:
            end = at + 1
            parts.append(str(numbers[at]))
        else:
            gap = "" if step == 1 else f":{step}"
            parts.append(f"{numbers[at]}-{numbers[end - 1]}{gap}")
        at = end
    return ",".join(parts)


def span_size(text: str) -> int:
    """Return how many numbers `read_spans` would return, without making them."""
    return sum(len(numbers) for numbers in _spans(text))


def read_spans(text: str) -> tuple[int, ...]:
    """Return the numbers that `span_text` wrote. Raises `ValueError` for other texts."""
    found: list[int] = []
    for numbers in _spans(text):
        if len(found) + len(numbers) > RANKS_MAX:
            raise ValueError(f"a group of more than {RANKS_MAX} ranks")
        found.extend(numbers)
    return tuple(found)


def _spans(text: str) -> Iterator[range]:
    for part in filter(None, text.split(",")):
        match = _SPAN.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a range of ranks")
        begin, end, step = (int(number) if number else None for number in match.groups())
        assert begin is not None
        yield range(begin, (begin if end is None else end) + 1, step or 1)
