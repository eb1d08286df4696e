"""Whether every step of a drilled run is the uninterrupted run's, also where data was passed over.

After a rollback or a skip a run trains on other data. It is then compared with a run to which the
same windows of data were given from its start; that one is trained once the drilled run has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.journal import Event, EventKind
from holdfast.flows.drills.steps import Place, Reference, Step, difference, gaps, place_of

Window = tuple[int, int]
_CHANGES: Final = frozenset({EventKind.ROLLED_BACK, EventKind.NUMERICS})


@dataclass(frozen=True, kw_only=True)
class Change:
    """Data that is passed over: `window` is the first step that this is seen in, and how many
    steps' data it is. So do launches newer than `place`; `is_there` says that one itself."""

    place: Place
    is_there: bool
    window: Window

    def is_for(self, step: Step) -> bool:
        """True when the step was done by who knew of it."""
        return step.place > self.place or (self.is_there and step.place == self.place)


def changes_of(events: Iterable[Event]) -> list[Change]:
    """Rollbacks' and skips' windows, in the order in which they were journaled."""
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
    """One run's steps against `reference`, the uninterrupted run's.

    `uncompared` counts those that lie beyond it, and those of data that was given up later.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._waiting: list[Step] = []
        self.uncompared = 0

    def look(self, new: Sequence[Step], events: Iterable[Event]) -> list[str]:
        """What is wrong with `new` steps, in file order; `events` were read after them."""
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
        """What is wrong with the steps after changes of data.

        `train` makes a reference of so many steps with such windows.
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
        words = difference(step, reference)
        return [words] if words else []


def _is_changed(step: Step, changes: Iterable[Change]) -> bool:
    return any(step.step >= one.window[0] for one in changes)
