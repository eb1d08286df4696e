"""The number of steps that a run's spec declares."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

STEPS_TOTAL_NAMES: Final = ("steps", "max_steps", "total_steps", "train_steps")


def steps_total(config: Mapping[str, Any]) -> int | None:
    """Return the last step of a program by its spec's `[config]`; None if that does not say.

    The first of `STEPS_TOTAL_NAMES` that is a whole number above 0 counts, such as 1000 or 1e3.
    """
    for name in STEPS_TOTAL_NAMES:
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value > 0 and math.isfinite(value) and value == int(value):
            return int(value)
    return None


def problem_with_steps(config: Mapping[str, Any]) -> str | None:
    """Return the problem with a number of steps that would not count, as text, or None."""
    for name in STEPS_TOTAL_NAMES:
        value = config.get(name)
        is_number = isinstance(value, float) and value != value // 1
        if isinstance(value, bool) or is_number or (isinstance(value, str) and _is_number(value)):
            return (
                f"{name}: given {json.dumps(value)}; expected a whole number above 0, such as "
                "1000, because it is the program's last step"
            )
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
