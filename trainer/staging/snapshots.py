"""How often a step is kept in memory: as often as the copy costs little beside the step.

With `auto` the ranks choose it where they meet anyway, all from the same numbers: the dearest copy
of any rank and rank 0's step time. Between two meetings every n-th step is kept, and nobody asks.
"""

from __future__ import annotations

import math
from typing import Final

from pydantic import ValidationError

from holdfast.contracts.errors import SpecError
from holdfast.contracts.spec import Checkpointing

# The share of training time that copies into memory may take.
OVERHEAD_MAX: Final = 0.03
# Rarer than this is not worth a copy: the checkpoints on disk are then the protection.
EVERY_MAX: Final = 10_000
# What a first copy is taken to cost until one was measured: slow on purpose.
FIRST_COPY_BYTES_PER_S: Final = 1e9
FIRST_COPY_S: Final = 0.005


class SnapshotRhythm:
    """Which steps are kept; `every` is 0 while none are."""

    def __init__(self, given: int | str) -> None:
        """`given` as in a spec: steps (1), "auto" or "off". Raises `SpecError` otherwise."""
        chosen: int | str = int(given) if str(given).strip().isdigit() else given
        try:
            checked = Checkpointing.model_validate({"snapshots": chosen})
        except ValidationError as error:
            raise SpecError(
                f"snapshots {given!r}: expected steps (1 or more), 'auto' or 'off'"
            ) from error
        self.is_auto = checked.snapshots == "auto"
        self.every = checked.snapshots if isinstance(checked.snapshots, int) else 0

    def is_due(self, step: int) -> bool:
        """True when the state after `step` is to be kept."""
        return self.every > 0 and step % self.every == 0

    def update(self, copy_us: int, step_us: int) -> bool:
        """Every rank after a meeting, with the same numbers; True when the rhythm is another."""
        before = self.every
        if self.is_auto:
            self.every = choose_every(copy_us, step_us)
        return self.every != before


def choose_every(copy_us: int, step_us: int) -> int:
    """The fewest steps between two copies of `copy_us` that keep within `OVERHEAD_MAX`.

    0 when that is more than `EVERY_MAX`, or nothing is known of the step's time.
    """
    if step_us <= 0:
        return 0
    every = max(1, math.ceil(copy_us / (OVERHEAD_MAX * step_us)))
    return every if every <= EVERY_MAX else 0


def first_copy_s(staged_bytes: int) -> float:
    """What a copy is taken to cost before one was measured, in seconds."""
    return FIRST_COPY_S + staged_bytes / FIRST_COPY_BYTES_PER_S
