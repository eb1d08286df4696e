"""The number of steps that a run's spec declares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

STEPS_TOTAL_NAMES: Final = ("steps", "max_steps", "total_steps", "train_steps")


def steps_total(config: Mapping[str, Any]) -> int | None:
    """Return the last step of a program by its spec's `[config]`; None if that does not say.

    The first of `STEPS_TOTAL_NAMES` that is a positive integer counts.
    """
    for name in STEPS_TOTAL_NAMES:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
