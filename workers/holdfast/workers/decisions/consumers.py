"""Which consumers of checkpoints are due, and which one is started next. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.records.consumers import ConsumerState, Use
from holdfast.contracts.spec.consumers import Consumer

# Started at the same time, for each consumer: the others wait for their turn.
AT_ONCE_MAX: Final = 4
# A command that fails immediately is not started again immediately.
RETRY_S: Final = 10.0
RETRY_S_MAX: Final = 600.0


@dataclass(frozen=True, kw_only=True)
class CheckpointEvents:
    """What events have happened to checkpoints. All are directory names.

    `committed` has the checkpoints of the run's branch with their steps, oldest first. `best` is
    the best one by the keep rules, and `ended` the newest one of a run that has ended; each is
    empty if there is none. `preempted` are the newest ones of preempted attempts.
    """

    committed: Sequence[tuple[str, int]]
    pinned: Collection[str] = ()
    best: str = ""
    preempted: Collection[str] = ()
    ended: str = ""


@dataclass(frozen=True)
class Due:
    """A consumer that must be started for a checkpoint."""

    consumer: str
    checkpoint: str
    step: int


def find_due(
    consumers: Iterable[Consumer],
    seen: CheckpointEvents,
    known: Mapping[tuple[str, str], Use],
) -> list[Due]:
    """Return what is due and has no line yet, oldest step first for each consumer."""
    steps = dict(seen.committed)
    found = []
    for one in consumers:
        names = _names_for(one, seen, known)
        found += [
            Due(one.name, name, steps[name])
            for name in names
            if name in steps and (one.name, name) not in known
        ]
    return found


def _names_for(
    one: Consumer, seen: CheckpointEvents, known: Mapping[tuple[str, str], Use]
) -> Iterable[str]:
    """Return the checkpoints that a consumer is for."""
    match one.event:
        case "commit":
            return _commits(one, seen, known)
        case "pin":
            return [name for name, _ in seen.committed if name in seen.pinned]
        case "best":
            return [seen.best]
        case "preemption":
            return seen.preempted
        case "end":
            return [seen.ended]


def _commits(
    one: Consumer, seen: CheckpointEvents, known: Mapping[tuple[str, str], Use]
) -> Iterable[str]:
    """Return each commit, or with `every_steps` the first at or after each multiple."""
    every = one.every_steps
    if every is None:
        return [name for name, _ in seen.committed]
    # The first of a period may have been deleted since. The next one does not take its place.
    periods = {use.step // every for use in known.values() if use.consumer == one.name}
    found = []
    for name, step in seen.committed:
        if step >= every and step // every not in periods:
            periods.add(step // every)
            found.append(name)
    return found


def find_startable(uses: Iterable[Use], now: float) -> list[Use]:
    """Return what to start now, of the open `uses` in their order; `now` is Unix seconds."""
    working: dict[str, int] = {}
    waiting = []
    for use in uses:
        if use.state is ConsumerState.STARTED:
            working[use.consumer] = working.get(use.consumer, 0) + 1
        elif use.state is ConsumerState.DUE or _is_rested(use, now):
            waiting.append(use)
    found = []
    for use in waiting:
        if working.get(use.consumer, 0) < AT_ONCE_MAX:
            working[use.consumer] = working.get(use.consumer, 0) + 1
            found.append(use)
    return found


def _is_rested(use: Use, now: float) -> bool:
    """Return True if the last failure is long enough ago. A clock that was set back is ignored."""
    rest_s = min(RETRY_S * 2.0 ** min(use.tries - 1, 16), RETRY_S_MAX)
    return not 0 <= now - use.at < rest_s


def state_after(consumer: Consumer | None, tries: int, *, is_done: bool) -> ConsumerState:
    """Return the state after a start has ended. `consumer` is None if the spec lacks it."""
    if is_done:
        return ConsumerState.DONE
    may_retry = consumer is not None and tries <= consumer.retries
    return ConsumerState.FAILED if may_retry else ConsumerState.GIVEN_UP
