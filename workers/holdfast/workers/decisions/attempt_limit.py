"""The limit of the attempts of a run, `supervision.attempts_max`.

It counts for everything that Holdfast starts by itself: relaunches, growth, and moves between the
places of a run. What an operator orders is not limited.
"""

from __future__ import annotations

from holdfast.contracts.records.history import RunHistory
from holdfast.workers.decisions.exclusions import is_refused_exclusion


def may_try_again(history: RunHistory) -> bool:
    """Return True if Holdfast may start another attempt of the run by itself."""
    counted = sum(not is_refused_exclusion(one) for one in history.attempts)
    return counted < history.spec.supervision.attempts_max
