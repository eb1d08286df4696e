"""How often a snapshot is kept in memory: as often as the copy costs little compared with a step.

With `auto` the ranks choose the interval when they meet for a save. All use the same numbers: the
slowest copy of any rank and rank 0's step time. Until the next save they keep every n-th step and
exchange no messages about it.
"""

from __future__ import annotations

import math
from typing import Final

from pydantic import ValidationError

from holdfast.contracts.errors import SpecError
from holdfast.contracts.spec.checkpoint import Checkpointing

# The largest share of training time for copies into memory.
OVERHEAD_MAX: Final = 0.03
# A longer interval is not worth a copy: the checkpoints on disk then protect the run.
EVERY_MAX: Final = 10_000
# The assumed cost of a copy before one was measured. It is deliberately high.
FIRST_COPY_BYTES_PER_S: Final = 1e9
FIRST_COPY_S: Final = 0.005


class SnapshotRhythm:
    """Decides which steps are kept. `every` is 0 if none are."""

    def __init__(self, given: int | str) -> None:
        """`given` is as in a spec: steps (1 or more), "auto" or "off". Raises `SpecError`."""
        chosen: int | str = int(given) if str(given).isascii() and str(given).isdecimal() else given
        try:
            checked = Checkpointing.model_validate({"snapshots": chosen})
        except ValidationError as error:
            raise SpecError(
                f"snapshots {given!r}: expected a number of steps (1 or more), 'auto' or 'off'"
            ) from error
        self.is_auto = checked.snapshots == "auto"
        self.every = checked.snapshots if isinstance(checked.snapshots, int) else 0

    def is_due(self, step: int) -> bool:
        """Return True if the state after `step` is to be kept."""
        return self.every > 0 and step % self.every == 0

    def update(self, copy_us: int, step_us: int) -> bool:
        """Update the interval from numbers that all ranks share. Return True if it changed."""
        before = self.every
        if self.is_auto:
            self.every = choose_every(copy_us, step_us)
        return self.every != before


def choose_every(copy_us: int, step_us: int) -> int:
    """Return the fewest steps between copies of `copy_us` that stay within `OVERHEAD_MAX`.

    Returns 0 if that is more than `EVERY_MAX`, or if the step time is unknown.
    """
    if step_us <= 0:
        return 0
    every = max(1, math.ceil(copy_us / (OVERHEAD_MAX * step_us)))
    return every if every <= EVERY_MAX else 0


def first_copy_s(staged_bytes: int) -> float:
    """Return the assumed seconds of a copy before one was measured."""
    return FIRST_COPY_S + staged_bytes / FIRST_COPY_BYTES_PER_S
