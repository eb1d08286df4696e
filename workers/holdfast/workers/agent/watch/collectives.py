"""Which rank the others wait for in their collectives, by the ranks' flight records. Pure.

In a process group the collectives finish in order. So each rank has one place in a group: the first
collective that it called and that has not finished, or the one after its last. A rank waits for the
members whose place is earlier. It waits in its front only: the first of its calls in all groups
that has not finished. If all members have called a collective, those at their front wait for those
whose front is another call.

The ranks that others wait for, and that wait for nobody, are the cause. If all members have reached
a call and none finishes it, the cause is a link or a GPU that the records do not name. If every
rank waits for another one, they wait in a circle. Records of gloo name the members of no group, so
a rank that waits in a group of its own may wait for any rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from holdfast.contracts.node import flight
from holdfast.workers.agent.watch.stack_text import ranks_text

NAMED_MAX: Final = 4
NO_RECORD: Final = "no flight record"
STARTED: Final = "started"
SCHEDULED: Final = "scheduled"
_NOWHERE: Final = -1
# Each rank may give or get another number of elements.
_UNEVEN: Final = ("all_to_all", "scatter", "gather", "all_gather_v", "reduce_scatter_v", "_oop")
_ONE_ROOTED: Final = ("split", "new_window", "coalesced")


@dataclass(frozen=True, kw_only=True)
class CollectiveBlame:
    """What the records show. `ranks` are to blame, and `finding` is a sentence about them.

    `is_missing` is True if they are where the others wait for them, and not in another collective.
    """

    ranks: tuple[int, ...]
    finding: str
    is_missing: bool = False


@dataclass(frozen=True)
class _Wait:
    """Ranks that wait in a call of a group for one rank. `about` names the group."""

    call: flight.CollectiveCall
    about: str
    waiting: tuple[int, ...]
    why: str


@dataclass
class _Group:
    """A process group: its members, and what each of them did in it.

    Without `is_known`, the records do not name the members, and only those that called are there.
    """

    about: str
    members: tuple[int, ...]
    is_known: bool = True
    calls: dict[int, flight.GroupFlight] = field(default_factory=dict)


@dataclass(frozen=True)
class _Front:
    """The first call of a rank that has not finished, in the order of its calls."""

    call: flight.CollectiveCall
    about: str
    group: str
    is_transfer: bool

    def is_at(self, call: flight.CollectiveCall) -> bool:
        """Whether the front is this call of a collective."""
        return not self.is_transfer and self.call.order == call.order

    def has(self, transfer: flight.Transfer) -> bool:
        """Whether the front is this transfer, or another one of its batch."""
        place = transfer.group, transfer.call.sequence
        return self.is_transfer and (self.group, self.call.sequence) == place


@dataclass
class _Waits:
    """For each rank: one rank that it waits for, and the calls in which others wait for it.

    Those in `unclear` wait in a group of unknown members. `stuck` has those at a call that all its
    members have reached and none has finished.
    """

    on: dict[int, int] = field(default_factory=dict)
    calls: dict[int, list[_Wait]] = field(default_factory=lambda: defaultdict(list))
    unclear: set[int] = field(default_factory=set)
    stuck: dict[int, _Wait] = field(default_factory=dict)

    def add(self, ranks: Sequence[int], others: Sequence[int], wait: _Wait) -> None:
        """Add that `ranks` wait for `others`."""
        for rank in ranks:
            self.on.setdefault(rank, others[0])
        for other in others:
            self.calls[other].append(wait)


def find_missing(
    records: Sequence[flight.RankFlight], world_size: int | None = None
) -> CollectiveBlame | None:
    """Return which rank the others wait for, or None if the records show no open collective.

    `world_size` tells which ranks gave no record.
    """
    # The ranks of a job have the same setting, and a record may have no call that shows it.
    is_timed = any(one.is_timed for one in records)
    known = {one.rank: replace(one, is_timed=is_timed) for one in records if not one.problem}
    expected = range(world_size) if world_size else sorted(one.rank for one in records)
    silent = [rank for rank in expected if rank not in known]
    groups = _groups(known, expected)
    fronts = {rank: front for rank, one in known.items() if (front := _front(one)) is not None}
    waits = _Waits()
    for group in groups:
        _wait_in_group(group, known, fronts, waits)
        _wait_for_front(group, known, fronts, waits)
    _wait_in_transfers(known, fronts, waits)
    found = _mismatch(groups) or _causes(waits, known) or _circle(waits) or _nobody(groups, waits)
    if found is None:
        return None
    if silent:
        said = f"no flight record of {ranks_text(silent)}"
        found = replace(found, finding=f"{found.finding}; {said}")
    return found


def _groups(known: Mapping[int, flight.RankFlight], every: Sequence[int]) -> list[_Group]:
    """Return the groups. Two groups may have one name, so their members tell them apart."""
    found: dict[tuple[str, str], _Group] = {}
    for rank, record in known.items():
        for one in record.groups:
            key = (one.name, one.members)
            if key not in found:
                is_whole = not one.members and one.about == flight.DEFAULT_GROUP
                members = tuple(every) if is_whole else _members(one.members)
                found[key] = _Group(about=one.title, members=members, is_known=bool(members))
            found[key].calls[rank] = one
    for group in found.values():
        group.members = group.members or tuple(sorted(group.calls))
    return list(found.values())


@lru_cache(maxsize=4096)
def _members(text: str) -> tuple[int, ...]:
    return flight.read_spans(text)


# --- who waits for whom ---------------------------------------------------------------------


def _reach(call: flight.GroupFlight | None) -> int:
    """Return the number of the last collective that the rank has called in order."""
    if call is None:
        return _NOWHERE
    return call.first.sequence if call.first else call.newest.sequence


def _wait_in_group(
    group: _Group,
    known: Mapping[int, flight.RankFlight],
    fronts: Mapping[int, _Front],
    waits: _Waits,
) -> None:
    """Add who waits for whom in one group. The cost is about that of sorting its members."""
    # No rank waits in a later call, because none has reached it.
    open_ = {
        rank: one.first
        for rank, one in group.calls.items()
        if one.first is not None and fronts[rank].is_at(one.first)
    }
    if not open_:
        return
    if not group.is_known:
        waits.unclear |= open_.keys()
    reach = {rank: _reach(group.calls.get(rank)) for rank in group.members}
    slowest = min(group.members, key=lambda rank: reach[rank])
    by_number = sorted(open_, key=lambda rank: open_[rank].sequence)
    numbers = [open_[rank].sequence for rank in by_number]
    for rank in by_number[bisect_right(numbers, reach[slowest]) :]:
        waits.on.setdefault(rank, slowest)
    ahead: dict[int, tuple[int, ...]] = {}
    for rank in group.members:
        # The ranks that have called a later collective, and the first of these calls.
        first = bisect_right(numbers, reach[rank])
        if first == len(numbers):
            continue
        if first not in ahead:
            ahead[first] = tuple(sorted(by_number[first:]))
        wait = _Wait(
            call=open_[by_number[first]],
            about=group.about,
            waiting=ahead[first],
            why=_why(group.calls.get(rank), known.get(rank)),
        )
        waits.calls[rank].append(wait)


def _front(record: flight.RankFlight) -> _Front | None:
    """Return the first call of a rank that has not finished, or None."""
    found = [
        _Front(one.first, one.title, one.name, is_transfer=False)
        for one in record.groups
        if one.first
    ]
    found += [
        _Front(one.call, f"group {one.group}", one.group, is_transfer=True)
        for one in record.transfers
    ]
    return min(found, key=lambda front: front.call.order, default=None)


def _wait_for_front(
    group: _Group,
    known: Mapping[int, flight.RankFlight],
    fronts: Mapping[int, _Front],
    waits: _Waits,
) -> None:
    """Add who waits in a collective that all members have called and none has finished."""
    calls = {rank: one.first for rank, one in group.calls.items() if one.first}
    is_whole = group.is_known and len(calls) == len(group.members)
    if not is_whole or len({call.sequence for call in calls.values()}) > 1:
        return
    here = [rank for rank in sorted(calls) if fronts[rank].is_at(calls[rank])]
    if not here:
        return
    call = calls[here[0]]
    elsewhere = [rank for rank in sorted(calls) if rank not in set(here)]
    for rank in elsewhere:
        waits.add(here, [rank], _Wait(call, group.about, tuple(here), _before(fronts[rank])))
    started = [rank for rank in here if calls[rank].state == STARTED]
    late = [rank for rank in here if calls[rank].state == SCHEDULED and known[rank].is_timed]
    if started and late:
        why = f"called{_at(call)}, not started by its GPU"
        waits.add(started, late, _Wait(call, group.about, tuple(started), why))
    elif not elsewhere:
        waits.stuck |= dict.fromkeys(here, _Wait(call, group.about, tuple(here), ""))


def _before(front: _Front) -> str:
    """Return why a rank whose front is another call does not take part in a call."""
    return f"called, but {_text(front.call)} of {front.about} comes first and is unfinished"


def _why(did: flight.GroupFlight | None, record: flight.RankFlight | None) -> str:
    """Return why a rank is not where the others are."""
    if record is None:
        return NO_RECORD
    if did is not None and did.first is not None:
        return f"{_text(did.first)} is unfinished there and finished elsewhere"
    if record.latest is None:
        return "its record has no call"
    return f"never called, the last call is {_text(record.latest)}{_at(record.latest)}"


def _wait_in_transfers(
    known: Mapping[int, flight.RankFlight], fronts: Mapping[int, _Front], waits: _Waits
) -> None:
    """Add who waits for the send or the receive of a peer that has not reached it."""
    for rank, record in known.items():
        for one in record.transfers:
            if not fronts[rank].has(one):
                continue
            about = f"group {one.group}"
            peer = known.get(one.peer)
            answers = () if peer is None else peer.transfers
            # A batch may have several transfers with one peer.
            answer = next((a for a in answers if a.peer == rank and a.sends is not one.sends), None)
            if answer is None:
                wanted = "receive" if one.sends else "send"
                why = NO_RECORD if peer is None else f"no {wanted} for rank {rank} is open"
                waits.add([rank], [one.peer], _Wait(one.call, about, (rank,), why))
            else:
                _wait_at_transfer(one, answer, (known[rank], known[one.peer]), fronts, waits)


def _wait_at_transfer(
    one: flight.Transfer,
    answer: flight.Transfer,
    pair: tuple[flight.RankFlight, flight.RankFlight],
    fronts: Mapping[int, _Front],
    waits: _Waits,
) -> None:
    """Add who waits in a transfer at the front of the first of two ranks that both called it."""
    rank, peer = (record.rank for record in pair)
    about = f"group {one.group}"
    if not fronts[peer].has(answer):
        waits.add([rank], [peer], _Wait(one.call, about, (rank,), _before(fronts[peer])))
    elif _is_late(answer, one, pair[1]):
        why = f"called{_at(answer.call)}, not started by its GPU"
        waits.add([rank], [peer], _Wait(one.call, about, (rank,), why))
    elif not _is_late(one, answer, pair[0]):
        both = tuple(sorted((rank, peer)))
        waits.stuck.setdefault(rank, _Wait(one.call, about, both, ""))


def _is_late(one: flight.Transfer, answer: flight.Transfer, record: flight.RankFlight) -> bool:
    """Return True if the GPU of a rank has not started a transfer that its peer's GPU runs."""
    return record.is_timed and (one.call.state, answer.call.state) == (SCHEDULED, STARTED)


# --- findings -------------------------------------------------------------------------------


def _causes(waits: _Waits, known: Mapping[int, flight.RankFlight]) -> CollectiveBlame | None:
    """Return the ranks that others wait for and that wait for nobody."""
    found = sorted(rank for rank in waits.calls if rank not in waits.on)
    # A rank that waits for ranks that nobody names is not the cause if there is another one.
    found = [rank for rank in found if rank not in waits.unclear] or found
    # A rank without a record may wait as well, so one with a record is the better answer.
    found = [rank for rank in found if rank in known] or found
    # Those of a call that nobody finishes have done all that the others wait for.
    found = [rank for rank in found if rank not in waits.stuck]
    if not found:
        return None
    parts = []
    for wait, ranks in _by_wait(found, waits):
        others = _without(wait.waiting, found)
        parts.append(
            f"{ranks_text(ranks)} {_verb(ranks, 'is', 'are')} missing in {_text(wait.call)} of "
            f"{wait.about} ({wait.why}): {ranks_text(others)} {_verb(others, 'waits', 'wait')}"
            f"{_at(wait.call)}"
        )
    more = len(parts) - NAMED_MAX
    said = parts[:NAMED_MAX] + ([f"{more} more like these"] if more > 0 else [])
    return CollectiveBlame(ranks=tuple(found), finding="; ".join(said), is_missing=True)


def _by_wait(found: Iterable[int], waits: _Waits) -> Iterator[tuple[_Wait, list[int]]]:
    """Return for each way to be missing the ranks, with the wait of most others."""
    groups: dict[tuple[str, int, str], tuple[_Wait, list[int]]] = {}
    for rank in found:
        wait = max(waits.calls[rank], key=lambda one: len(one.waiting))
        key = (wait.about, wait.call.sequence, wait.why)
        groups.setdefault(key, (wait, []))[1].append(rank)
    yield from groups.values()


def _without(ranks: Sequence[int], left_out: Iterable[int]) -> tuple[int, ...]:
    out = set(left_out)
    return tuple(rank for rank in ranks if rank not in out) or tuple(ranks)


def _circle(waits: _Waits) -> CollectiveBlame | None:
    """Return ranks of which each waits for the next, as by two groups in opposite orders."""
    if not waits.on:
        return None
    at, seen = min(waits.on), dict[int, None]()
    while at not in seen and at in waits.on:
        seen[at] = None
        at = waits.on[at]
    if at in waits.stuck:
        return None
    order = list(seen)
    ranks = tuple(sorted(order[order.index(at) :] if at in seen else order))
    named = []
    for rank in ranks[:NAMED_MAX]:
        calls = [
            one for other in ranks for one in waits.calls.get(other, ()) if rank in one.waiting
        ]
        if calls:
            wait = calls[0]
            named.append(f"rank {rank} in {_text(wait.call)} of {wait.about}{_at(wait.call)}")
    said = f"{ranks_text(ranks)} wait for each other: {', '.join(named)}"
    return CollectiveBlame(ranks=ranks, finding=said)


def _nobody(groups: Sequence[_Group], waits: _Waits) -> CollectiveBlame | None:
    """Return the call that all its members have reached and none finishes."""
    if waits.stuck:
        stuck = max(waits.stuck.values(), key=lambda one: len(one.waiting))
        return CollectiveBlame(ranks=(), finding=_none_finishes(stuck))
    waiting = [group for group in groups if any(one.first for one in group.calls.values())]
    if not waiting:
        return None
    whole = [group for group in waiting if group.is_known]
    if not whole:
        return CollectiveBlame(ranks=(), finding=_unclear(waiting))
    group = max(whole, key=lambda one: len(one.calls))
    ranks, call = _open_in(group)
    wait = _Wait(call, group.about, tuple(ranks), "")
    return CollectiveBlame(ranks=(), finding=_none_finishes(wait))


def _none_finishes(wait: _Wait) -> str:
    ranks = wait.waiting
    return (
        f"{ranks_text(ranks)} {_verb(ranks, 'has', 'have')} called {_text(wait.call)} of "
        f"{wait.about}{_at(wait.call)}, and none finishes it: a link or a GPU"
    )


def _unclear(groups: Sequence[_Group]) -> str:
    """Return which ranks wait in groups whose members the records do not name."""
    parts = []
    for group in groups[:NAMED_MAX]:
        ranks, call = _open_in(group)
        verb = _verb(ranks, "waits", "wait")
        parts.append(f"{ranks_text(ranks)} {verb} in {_text(call)} of {group.about}{_at(call)}")
    return f"{', '.join(parts)}; the records do not name the members of these groups"


def _open_in(group: _Group) -> tuple[list[int], flight.CollectiveCall]:
    """Return the ranks with an open call in a group, and one of the calls."""
    calls = {rank: one.first for rank, one in group.calls.items() if one.first}
    return sorted(calls), next(iter(calls.values()))


def _mismatch(groups: Sequence[_Group]) -> CollectiveBlame | None:
    """Return the ranks whose call differs from that of most others, with the same number."""
    for group in groups:
        by_number: dict[int, dict[int, flight.CollectiveCall]] = defaultdict(dict)
        for rank, one in group.calls.items():
            if one.first is not None:
                by_number[one.first.sequence][rank] = one.first
        for rank, one in group.calls.items():
            # With gloo, ranks finish a call in which another one, of another size, waits.
            if one.newest.sequence in by_number:
                by_number[one.newest.sequence].setdefault(rank, one.newest)
        for _, calls in sorted(by_number.items()):
            kinds: dict[str, list[int]] = defaultdict(list)
            for rank, call in calls.items():
                kinds[_kind(call)].append(rank)
            if len(kinds) > 1:
                return _blame_odd(group, calls, sorted(kinds.values(), key=len))
    return None


def _blame_odd(
    group: _Group, calls: Mapping[int, flight.CollectiveCall], kinds: Sequence[Sequence[int]]
) -> CollectiveBlame:
    agrees = len(kinds[-1]) > len(kinds[-2])
    odd = kinds[:-1] if agrees else kinds
    parts = [
        f"{ranks_text(ranks)} {_verb(ranks, 'calls', 'call')} "
        f"{_full(calls[ranks[0]])}{_at(calls[ranks[0]])}"
        for ranks in kinds[-NAMED_MAX:]
    ]
    said = f"the ranks call different collectives in {group.about}: {', '.join(parts)}"
    return CollectiveBlame(ranks=tuple(sorted(rank for r in odd for rank in r)), finding=said)


def _kind(call: flight.CollectiveCall) -> str:
    """Return what must be equal on all ranks of a group."""
    if call.name.startswith(_ONE_ROOTED) or call.name.endswith("coalesced"):
        return call.name
    uneven = call.name.startswith(_UNEVEN) or call.name.endswith(_UNEVEN)
    return f"{call.name} {'' if uneven else call.sizes} {call.dtypes}"


def _text(call: flight.CollectiveCall) -> str:
    return f"{call.name} {call.sequence}"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _full(call: flight.CollectiveCall) -> str:
    return f"{_text(call)} of {call.sizes or 'no size'} {call.dtypes}".rstrip()


def _at(call: flight.CollectiveCall) -> str:
    return f" at {call.place}" if call.place else ""
