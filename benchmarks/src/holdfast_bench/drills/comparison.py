"""Compare every step of a drilled run with an uninterrupted run, also after skipped data.

After a rollback or a skip, a run trains on other data. It is then compared with a run that skips
the same windows from its start. That run is trained when the drilled run has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast_bench.drills.steps import Reference, Step, difference, gaps
from holdfast_bench.live_drills.place import LaunchPlace, place_of

Window = tuple[int, int]
_CHANGES: Final = frozenset({EventKind.ROLLED_BACK, EventKind.NUMERICS})


@dataclass(frozen=True, kw_only=True)
class Change:
    """Skipped data. `window` is the first step with other data, and the number of skipped steps.

    Launches newer than `place` skip the data; if `is_there`, `place` itself does so too.
    """

    place: LaunchPlace
    is_there: bool
    window: Window

    def is_for(self, step: Step) -> bool:
        """Return whether the step's launch knew of the change."""
        return step.place > self.place or (self.is_there and step.place == self.place)


def changes_of(events: Iterable[Event]) -> list[Change]:
    """Return the windows of rollbacks and skips, in the order of the journal."""
    return [
        Change(
            place=place_of(event),
            is_there=event.kind is EventKind.NUMERICS,
            window=(int(first), int(steps)),
        )
        for event in events
        if event.kind in _CHANGES
        for first, steps in event.data.get("skip") or ()
    ]


class Comparison:
    """Compares one run's steps with `reference`, the uninterrupted run's.

    `uncompared` counts the steps after its end, and those of data that was skipped later.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._waiting: list[Step] = []
        self.uncompared = 0

    def look(self, new: Sequence[Step], events: Iterable[Event]) -> list[str]:
        """Return the problems of `new` steps in file order. `events` were read after them."""
        changes = changes_of(events)
        found = []
        for step in new:
            if _is_changed(step, [one for one in changes if one.is_for(step)]):
                self._waiting.append(step)
            else:
                found += self._compare(step, self._reference)
        return found + gaps(list(new))

    def finish(
        self, events: Iterable[Event], train: Callable[[int, list[Window]], Reference]
    ) -> list[str]:
        """Return the problems of the steps after changes of data.

        `train` returns a reference with a number of steps and windows.
        """
        if not self._waiting:
            return []
        changes = changes_of(events)
        windows = sorted({one.window for one in changes})
        reference = train(max(step.step for step in self._waiting), windows)
        found = []
        for step in self._waiting:
            if _is_changed(step, [one for one in changes if not one.is_for(step)]):
                self.uncompared += 1
            else:
                found += self._compare(step, reference)
        self._waiting.clear()
        return found

    def _compare(self, step: Step, reference: Reference) -> list[str]:
        self.uncompared += (step.rank, step.step) not in reference
        problem = difference(step, reference)
        return [problem] if problem else []


def _is_changed(step: Step, changes: Iterable[Change]) -> bool:
    return any(step.step >= one.window[0] for one in changes)
