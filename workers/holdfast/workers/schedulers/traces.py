"""Traces of free GPUs over time, such as those of a cloud's spot instances."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.bounds import NODES_MAX, SECONDS_MAX
from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import NotFoundError, SpecError

GAP_S_MIN: Final = 1.0
SHOWN_CHARACTERS: Final = 40


class Trace:
    """The number of free GPUs every `gap_s` seconds. After its end it begins again."""

    def __init__(self, gpus: tuple[int, ...], gap_s: float) -> None:
        self.gpus, self.gap_s = gpus, gap_s
        self.length_s = len(gpus) * gap_s

    def free(self, at: float) -> int:
        return self.gpus[int(at // self.gap_s) % len(self.gpus)]

    def first(self, since: float, gpus: int, *, has: bool) -> float:
        """Return the first time from `since` at which `gpus` are free, or are not; else infinity.

        The trace is followed for one length, because then it repeats.
        """
        tick = int(since // self.gap_s)
        for later in range(len(self.gpus) + 1):
            if (self.gpus[(tick + later) % len(self.gpus)] >= gpus) == has:
                return max(since, (tick + later) * self.gap_s)
        return math.inf


def read_trace(path: Path, gpus_per_instance: int) -> Trace:
    """Read a trace in the format of the public `spot-traces`; see `docs/simulate.md`.

    Raises `SpecError` for anything else, and `NotFoundError` without such a file.
    """
    try:
        document = json.loads(read_bounded(path))
        gap_s, counts = float(document["metadata"]["gap_seconds"]), document["data"]
        wrong = [
            n for n, one in enumerate(counts) if type(one) is not int or not 0 <= one <= NODES_MAX
        ]
        if wrong or not counts:
            shown = f"{counts[wrong[0]]!r}"[:SHOWN_CHARACTERS] if wrong else ""
            what = f"data[{wrong[0]}] is {shown}" if wrong else "data is empty"
            raise ValueError(f"{what}; a gap in the trace must be filled")
        if not GAP_S_MIN <= gap_s <= SECONDS_MAX:
            raise ValueError(f"metadata.gap_seconds is {gap_s}")
    except FileNotFoundError:
        raise NotFoundError(f"--trace {path}: no such file") from None
    except OSError as error:
        raise SpecError(f"--trace {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise SpecError(
            f"--trace {path}: {error}; expected JSON with metadata.gap_seconds from {GAP_S_MIN:g} "
            f"to {SECONDS_MAX:g} and data, the number of available instances at each time"
        ) from error
    return Trace(tuple(count * gpus_per_instance for count in counts), gap_s)
