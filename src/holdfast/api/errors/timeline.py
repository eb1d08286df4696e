"""Merge the errors of an attempt into one order, with equal errors as one. Pure functions.

The order is that of causes as far as records show it: launches by number, in each launch the first
cause, then the other errors by time, and last the end of the launch. The lines of one journal stay
in their order, whatever its clock says. Between two clocks, times only suggest an order.
"""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from holdfast.api.errors.models import ErrorSource
from holdfast.api.errors.records import ErrorRecord, LaunchEnd
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.node.flight import span_text
from holdfast.contracts.plain_text import counted, plain_line
from holdfast.contracts.records.alerts import signal_name
from holdfast.contracts.states import Cause
from holdfast.workers.decisions import causes, evidence

CLOCKS_NAMED_MAX: Final = 8
# Addresses, process ids and sizes differ between ranks that fail in the same way.
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")
# After the last launch: the end of the attempt.
_LAST: Final = float("inf")
# What a launch with this cause or ending fails by, if a line tells of it.
_OF_CAUSE: Final[Mapping[str, tuple[str, ...]]] = {
    Cause.NODE_FAILURE: (EventKind.NODE_LOST, EventKind.NODE_UNHEALTHY, EventKind.NODE_SILENT),
    Cause.NUMERICS: (EventKind.NUMERICS,),
    Cause.HANG: (EventKind.HANG_CONFIRMED, EventKind.HANG_SUSPECTED),
    Cause.STORAGE_FULL: (EventKind.SAVE_FAILED,),
    "hung": (EventKind.HANG_CONFIRMED, EventKind.HANG_SUSPECTED),
}
# Without any other record of the cause, the first of these is the first cause.
_FALLBACKS: Final = (ErrorSource.AGENT, ErrorSource.TORCHRUN, ErrorSource.FLUSHER)


@dataclass(frozen=True, kw_only=True)
class EqualErrors:
    """Records of the same error. The first of them, `leader`, came first.

    `after` names the first cause of a secondary error, which only reports it.
    """

    records: tuple[ErrorRecord, ...]
    is_first: bool = False
    is_secondary: bool = False
    after: str = ""

    @property
    def leader(self) -> ErrorRecord:
        return self.records[0]

    @property
    def ranks(self) -> list[int]:
        """The ranks with this error, or that it blames, ascending."""
        failed = {one.failure.rank for one in self.records if one.failure}
        return sorted(failed.union(*(one.blamed for one in self.records)))

    @property
    def hosts(self) -> list[str]:
        return sorted({one.host for one in self.records if one.host})

    @property
    def until(self) -> float:
        return max(one.at for one in self.records)

    @property
    def text(self) -> str:
        """The error as a sentence."""
        leader, ranks = self.leader, self.ranks
        if leader.failure is None:
            times = len(self.records)
            return f"{leader.text} ({times} times)" if times > 1 else leader.text
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {span_text(ranks)}"
        hosts = self.hosts
        where = f" on {hosts[0]}" if len(hosts) == 1 else ""
        where = f" on {counted(len(hosts), 'host')}" if len(hosts) > 1 else where
        first = f"; rank {leader.failure.rank} first" if self.is_first and len(ranks) > 1 else ""
        said = f"{who}{where}: {leader.text}{first}"
        return f"{said}, after {self.after}" if self.after else said


def merge_errors(
    records: Iterable[ErrorRecord], ends: Mapping[int, LaunchEnd]
) -> list[EqualErrors]:
    """Return the errors of one attempt in order, each with its equals; see the module."""
    by_launch: dict[float, list[ErrorRecord]] = {}
    for one in records:
        is_last = one.kind == EventKind.ATTEMPT_ENDED
        by_launch.setdefault(_LAST if is_last else one.launch, []).append(one)
    found: list[EqualErrors] = []
    for number in sorted(by_launch):
        found += _of_launch(by_launch[number], ends.get(int(number)) if number != _LAST else None)
    if found and not any(one.is_first for one in found):
        # No launch has failed: the job did not start, or its nodes were unfit.
        found[0] = replace(found[0], is_first=True)
    return found


def _of_launch(records: Sequence[ErrorRecord], end: LaunchEnd | None) -> list[EqualErrors]:
    groups = _grouped(_in_order(records))
    first = _first(groups, end)
    if first is None:
        return sorted(groups, key=lambda one: one.leader.is_end)
    after = _short(first)
    rest = []
    for one in groups:
        if one is not first:
            is_secondary = one.leader.failure is not None and _is_secondary(one.leader)
            rest.append(
                replace(one, is_secondary=is_secondary, after=after if is_secondary else "")
            )
    rest.sort(key=lambda one: one.leader.is_end)
    return [replace(_led(first, end), is_first=True), *rest]


def _in_order(records: Sequence[ErrorRecord]) -> list[ErrorRecord]:
    """Return the records by time, but those of one journal in the order of its lines."""
    latest: dict[str, float] = {}
    times: dict[int, float] = {}
    for number, one in sorted(enumerate(records), key=lambda pair: (pair[1].place, pair[0])):
        times[number] = one.at or _LAST
        if one.journal:
            # A clock that was set back does not move a line before the one above it.
            times[number] = max(times[number], latest.get(one.journal, 0.0))
            latest[one.journal] = times[number]
    order = sorted(range(len(records)), key=lambda number: (times[number], records[number].place))
    return [records[number] for number in order]


def _grouped(records: Sequence[ErrorRecord]) -> list[EqualErrors]:
    """Return equal records as one, at the place of the first of them."""
    found: dict[tuple[str, ...], list[ErrorRecord]] = {}
    prints: dict[str, str] = {}
    for one in records:
        found.setdefault(_key(one, prints), []).append(one)
    return [EqualErrors(records=tuple(group)) for group in found.values()]


def _key(one: ErrorRecord, prints: dict[str, str]) -> tuple[str, ...]:
    """Return what is the same in equal records. `prints` keeps fingerprints, which are costly."""
    if one.failure is None:
        return one.source, one.kind, _NUMBER.sub("#", one.text)
    if one.failure.signal or not one.traceback:
        return one.source, one.kind, str(one.failure.exit_code), _NUMBER.sub("#", one.text)
    alike = _NUMBER.sub("#", one.traceback)
    if alike not in prints:
        prints[alike] = evidence.fingerprint(one.traceback) or _NUMBER.sub("#", one.text)
    return one.source, one.kind, prints[alike]


def _first(groups: Sequence[EqualErrors], end: LaunchEnd | None) -> EqualErrors | None:
    """Return the first cause of a launch that failed, by the records about it, or None."""
    if end is None or not groups:
        return None
    for kind in (*_OF_CAUSE.get(end.cause, ()), *_OF_CAUSE.get(end.ending, ())):
        if found := [one for one in groups if one.leader.kind == kind]:
            return found[0]
    of_ranks = [one for one in groups if one.leader.failure is not None]
    if named := [one for one in of_ranks if end.rank in one.ranks]:
        return named[0]
    leaders = [one.leader.failure for one in of_ranks if one.leader.failure is not None]
    if (failed := causes.first_failure(leaders)) is not None:
        return next(one for one in of_ranks if one.leader.failure is failed)
    for source in _FALLBACKS:
        if found := [one for one in groups if one.leader.source is source]:
            return found[0]
    # A save that failed, or a node that was silent, may have ended nothing.
    return next((one for one in groups if one.leader.is_end), None)


def _led(group: EqualErrors, end: LaunchEnd | None) -> EqualErrors:
    """Return the first cause with the rank that the agent found to be the first as its leader."""
    rank = end.rank if end else None
    is_named = [one.failure is not None and one.failure.rank == rank for one in group.records]
    ordered = sorted(zip(is_named, group.records, strict=True), key=lambda pair: not pair[0])
    return replace(group, records=tuple(record for _, record in ordered))


def _is_secondary(record: ErrorRecord) -> bool:
    found = evidence.find_cause(record.traceback or record.text)
    return found is not None and found.rule.secondary_error


def _short(first: EqualErrors) -> str:
    """Return the first cause in a few words."""
    failure, kind = first.leader.failure, first.leader.kind
    if failure is None:
        words = {
            EventKind.NODE_LOST: f"the loss of {first.leader.host}",
            EventKind.HANG_CONFIRMED: "the hang",
            EventKind.NUMERICS: "the bad loss",
        }
        return next((text for one, text in words.items() if one == kind), "the first error")
    how = "was killed" if failure.signal else "failed"
    return f"rank {failure.rank} {how}"


def failure_text(exit_code: int, traceback: str, stderr: str) -> tuple[str, str]:
    """Return (kind, text) of a rank's failure, without the rank."""
    if exit_code < 0:
        # Nobody explains a kill from outside, so the last output is unrelated.
        is_own = -exit_code not in {signals.SIGKILL, signals.SIGTERM}
        said = plain_line(evidence.last_message(traceback or (stderr if is_own else "")))
        return "killed", f"killed by {signal_name(-exit_code)}" + (f"; {said}" if said else "")
    if said := plain_line(evidence.last_message(traceback)):
        return "exception", said
    said = plain_line(evidence.last_message(stderr))
    return "exit", f"exit status {exit_code}" + (f": {said}" if said else ", without an error")


def order_note(errors: Iterable[EqualErrors], problems: Sequence[str]) -> str:
    """Return how far the order of the errors is certain. `problems` are those of clocks."""
    clocks = sorted({one.clock for error in errors for one in error.records if one.clock})
    if len(clocks) < 2:
        return f"All times are by the clock of {clocks[0]}." if clocks else ""
    more = len(clocks) - CLOCKS_NAMED_MAX
    named = ", ".join(clocks[:CLOCKS_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
    said = (
        f"Times are by the clocks of {named}, which may differ. Certain is the order of launches, "
        "that each first cause precedes the errors that report it, and that all precede the end "
        "of the launch."
    )
    return " ".join([said, *problems])
