"""The hosts that the next attempt must not use, and when they may be used again. Pure functions.

A host is excluded because it failed. An exclusion never leaves the run without enough nodes: the
least certain one is dropped first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from holdfast.contracts.records.history import AttemptView, RunHistory
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.evidence import failed_host, fingerprint, names_hardware
from holdfast.workers.schedulers.base import BECAUSE_EXCLUDED
from holdfast.workers.schedulers.slurm_capacity import Room

EXCLUDE_S: Final = 6 * 3600.0
EXCLUDED_MAX: Final = 16
# One hang or broken connection may be another host's fault. The second on one host is its own.
SUSPICIONS_MAX: Final = 2
NAMED_MAX: Final = 8
# Slurm may report a lost node later than after its own limit.
NOTICE_MARGIN_S: Final = 60.0
# These causes come from outside the program and say nothing about a host.
FROM_OUTSIDE: Final = frozenset({Cause.PREEMPTION, Cause.TIME_LIMIT, Cause.OPERATOR})
_SUSPICIOUS: Final = frozenset({Cause.HANG, Cause.INFRASTRUCTURE, Cause.UNKNOWN})

AskRoom = Callable[[int], Room | int | None]
"""Returns the room at a place, or just the free GPUs there; None if unknown or unlimited."""
Capacity = int | None | AskRoom
"""The free GPUs at the first choice, or a question about each place."""


class Certainty(IntEnum):
    """How certain it is that a host is faulty, least certain first."""

    SUSPECT = 0
    HUNG = 1
    HARDWARE = 2
    UNHEALTHY = 3
    LOST = 4


_WORDS: Final = {
    Certainty.SUSPECT: "failed twice",
    Certainty.HUNG: "hung twice",
    Certainty.HARDWARE: "faulty hardware",
    Certainty.UNHEALTHY: "unhealthy",
    Certainty.LOST: "lost",
}


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """A host that failed, and when (Unix seconds of this side's clock)."""

    host: str
    certainty: Certainty
    at: float

    def __str__(self) -> str:
        return f"{self.host} ({_WORDS[self.certainty]})"


class SizeChoice(NamedTuple):
    """The GPUs of the next attempt and why, the hosts that it excludes, and the text on them.

    `waits_for` is what must happen before it is submitted, or ''.
    """

    gpus: int
    why: str
    exclude: tuple[str, ...]
    text: str
    waits_for: str = ""


class Rooms:
    """What is known about the room at each place of a run. Asks about each place once."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._known: dict[int, Room | int | None] = {}

    @property
    def is_known(self) -> bool:
        """True if some place's room was given, or asked and answered."""
        if callable(self._capacity):
            return any(room is not None for room in self._known.values())
        return self._capacity is not None

    def free(self, place: int, exclude: Collection[str] = ()) -> int | None:
        """Return the GPUs free at a place without the hosts `exclude`; None if unknown."""
        room = self._at(place)
        return room.free_gpus(exclude) if isinstance(room, Room) else room

    def largest_job(
        self, place: int, exclude: Collection[str] = (), *, is_up: bool = False
    ) -> int | None:
        """Return the size of the largest job that a place can ever hold; None if unknown.

        With `is_up`, only nodes that start jobs now count.
        """
        room = self._at(place)
        return room.largest_job(exclude, is_up=is_up) if isinstance(room, Room) else None

    def has_host(self, place: int, host: str) -> bool:
        """Return False if it is certain that no job at the place could use `host`."""
        room = self._at(place)
        return not isinstance(room, Room) or host in room.has

    def hides_loss(self, place: int, lost: Exclusion, now: float) -> bool:
        """Return True if Slurm may still start a job on a lost host, which it has not noticed."""
        room = self._at(place)
        if not isinstance(room, Room) or lost.certainty is not Certainty.LOST:
            return False
        return lost.host in room.up and now - lost.at < room.notice_s + NOTICE_MARGIN_S

    def _at(self, place: int) -> Room | int | None:
        if not callable(self._capacity):
            return self._capacity if place == 0 else None
        if place not in self._known:
            self._known[place] = self._capacity(place)
        return self._known[place]


def exclusions(attempts: Sequence[AttemptView], now: float) -> tuple[Exclusion, ...]:
    """Return the hosts that failed within `EXCLUDE_S` seconds, the most certain and newest first.

    At most `EXCLUDED_MAX` hosts are returned. A host is excluded if it was lost, if a health check
    failed on it, if the evidence names a hardware fault of it, or if its ranks failed first in
    `SUSPICIONS_MAX` attempts: by different errors, or by a hang or a cause outside the program.
    """
    found: dict[str, Exclusion] = {}
    suspicions: Counter[str] = Counter()
    errors: defaultdict[str, set[str]] = defaultdict(set)
    ends = _ends(attempts, now)
    for attempt, at in zip(reversed(attempts), reversed(ends), strict=True):
        if now - at > EXCLUDE_S:
            continue
        for certainty, hosts in _named(attempt):
            _keep(found, hosts, certainty, at)
        suspect = failed_host(attempt)
        if suspect is None or attempt.cause in FROM_OUTSIDE:
            continue
        # Different errors on one host point to the host. The same error again points to the
        # program.
        errors[suspect] |= {fingerprint(attempt.traceback or "")} - {""}
        suspicions[suspect] += attempt.cause in _SUSPICIOUS
        if attempt.cause in _SUSPICIOUS and names_hardware(attempt.evidence):
            _keep(found, (suspect,), Certainty.HARDWARE, at)
        elif max(suspicions[suspect], len(errors[suspect])) >= SUSPICIONS_MAX:
            is_hang = attempt.cause is Cause.HANG
            _keep(found, (suspect,), Certainty.HUNG if is_hang else Certainty.SUSPECT, at)
    by_certainty = sorted(found.values(), key=lambda one: (-one.certainty, -one.at))
    return tuple(by_certainty)[:EXCLUDED_MAX]


def excluded_hosts(attempts: Sequence[AttemptView], now: float) -> tuple[str, ...]:
    """Return the names of the hosts in `exclusions`."""
    return tuple(one.host for one in exclusions(attempts, now))


def _keep(
    found: dict[str, Exclusion], hosts: Collection[str], certainty: Certainty, at: float
) -> None:
    for host in hosts:
        known = found.get(host)
        if known is None or known.certainty < certainty:
            found[host] = Exclusion(
                host=host, certainty=certainty, at=max(at, known.at if known else at)
            )


def _named(attempt: AttemptView) -> list[tuple[Certainty, Sequence[str]]]:
    """Return the hosts that the attempt's ending names as unhealthy or lost."""
    unhealthy = attempt.facts.get("unhealthy_hosts") or ()
    found: list[tuple[Certainty, Sequence[str]]] = [(Certainty.UNHEALTHY, unhealthy)]
    if attempt.cause is Cause.NODE_FAILURE:
        lost = attempt.facts.get("lost_hosts")
        named = lost if lost is not None else attempt.hosts
        # If the lost host is unknown, do not exclude all hosts of a large job.
        found.append((Certainty.LOST, named if lost or len(named) == 1 else ()))
    return found


def _ends(attempts: Sequence[AttemptView], now: float) -> list[float]:
    """Return when each attempt ended, at most `now`.

    A node or the scheduler wrote the end by its clock. This side wrote when it requested an
    attempt, when it noticed its end, and when it requested the next one.
    """
    later = [one.request.created_at if one.request else 0.0 for one in attempts[1:]]
    ends = []
    for attempt, following in zip(attempts, [*later, 0.0], strict=False):
        earliest = attempt.request.created_at if attempt.request else 0.0
        noticed = attempt.facts.get("noticed_at")
        ended = attempt.ended_at if attempt.ended_at is not None else now
        ends.append(min(max(ended, earliest), noticed or now, following or now, now))
    return ends


def choose_nodes(
    history: RunHistory,
    rooms: Rooms,
    place: int,
    choose: Callable[[tuple[str, ...]], tuple[int, str]],
    *,
    now: float,
) -> SizeChoice:
    """Return the size of the next attempt at `place` and the hosts that it excludes.

    `choose` returns the size, and why, without some hosts. An exclusion is dropped if the other
    nodes cannot hold that size: of a suspect host while too few other nodes are up, and of a host
    that is certainly faulty only if too few other nodes exist, because the job can wait for nodes
    that are down. A lost host is used again when Slurm has noticed the loss, so that the job waits
    for its return. If Slurm refused the last request because of its exclusions, half of them are
    dropped.
    """
    kept = [one for one in exclusions(history.attempts, now) if rooms.has_host(place, one.host)]
    refused = _refused_exclusions(history)
    allowed = set(refused[: len(refused) // 2])
    dropped = [one for one in kept if refused and one.host not in allowed]
    kept = [one for one in kept if one not in dropped]
    notes = (
        [f"{_listing(dropped)} allowed again, because Slurm refused the job without"]
        if dropped
        else []
    )
    relaxed: list[Exclusion] = []
    while True:
        exclude = tuple(one.host for one in kept)
        gpus, why = choose(exclude)
        if not kept:
            break
        # A host that is certainly faulty stays excluded while others exist, even if those are down:
        # the job can wait for them.
        is_certain = kept[-1].certainty >= Certainty.HARDWARE
        most = rooms.largest_job(place, exclude, is_up=not is_certain)
        if most is None or gpus <= most:
            break
        # The last one is the least certain and the oldest, because `exclusions` sorts them.
        relaxed.insert(0, kept.pop())
    if relaxed:
        notes.append(f"{_listing(relaxed)} allowed again, because the other nodes cannot hold it")
    if kept:
        notes.append(f"without {_listing(kept)}")
    up = rooms.largest_job(place, exclude, is_up=True) if kept or relaxed else None
    if up is not None and gpus > up:
        notes.append("waits for nodes that are down")
    hidden = [one for one in relaxed if rooms.hides_loss(place, one, now)]
    waits_for = f"waits until Slurm reports {_listing(hidden)} as down" if hidden else ""
    return SizeChoice(gpus, why, exclude, "".join(f"; {note}" for note in notes), waits_for)


def exclude_for(
    history: RunHistory, rooms: Rooms, *, place: int, gpus: int, now: float
) -> tuple[str, ...]:
    """Return the hosts that an attempt of `gpus` GPUs at `place` excludes."""
    return choose_nodes(history, rooms, place, lambda _: (gpus, ""), now=now).exclude


def is_refused_exclusion(attempt: AttemptView) -> bool:
    """Return True if Slurm refused the attempt's job, perhaps because of the hosts it excludes.

    Such an attempt says nothing about the run or its spec.
    """
    if attempt.job_id is not None or attempt.request is None or not attempt.request.exclude:
        return False
    is_ended = attempt.state is AttemptState.FAILED
    return is_ended and any(BECAUSE_EXCLUDED in line for line in attempt.evidence)


def _refused_exclusions(history: RunHistory) -> tuple[str, ...]:
    """Return the hosts that the last request excluded if Slurm refused it for that."""
    last = history.last_asked
    if last is None or last.request is None or not is_refused_exclusion(last):
        return ()
    return last.request.exclude


def _listing(found: Sequence[Exclusion]) -> str:
    more = len(found) - NAMED_MAX
    return ", ".join(map(str, found[:NAMED_MAX])) + (f" and {more} more" if more > 0 else "")
