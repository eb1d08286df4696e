"""The limit of the attempts of a run, `supervision.attempts_max`.

It counts for everything that Holdfast starts on its own: relaunches, growth, and moves between the
places of a run. An operator's relaunch is not limited.
"""

from __future__ import annotations

from holdfast.contracts.records.history import RunHistory
from holdfast.workers.decisions.exclusions import is_refused_exclusion


def may_try_again(history: RunHistory) -> bool:
    """Return True if Holdfast may start another attempt of the run without an order."""
    # An attempt that Slurm refused for Holdfast's own exclusions says nothing about the run.
    counted = sum(not is_refused_exclusion(one) for one in history.attempts)
    return counted < history.spec.supervision.attempts_max
