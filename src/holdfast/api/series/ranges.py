"""The buckets of time of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.workers.nodes.series_reading import Floats, RecordedSeries

# No answer has more detail than the files.
BUCKET_S_MIN = 1.0


@dataclass(frozen=True)
class TimeRange:
    """The range that a request asks for, in Unix seconds; None is the first or the last row."""

    start: float | None
    end: float | None
    buckets: int

    def edges(self, found: Sequence[RecordedSeries]) -> Floats:
        """Return the bounds of the buckets, only the first one without any row in the range.

        A short range has fewer buckets.
        """
        starts = [one.start[0] for one in found if len(one.start)]
        ends = [one.end[-1] for one in found if len(one.end)]
        if not starts:
            return np.array([self.start or 0.0])
        start, end = max(self.start or 0.0, min(starts)), max(ends)
        if self.end is not None:
            end = min(end, self.end)
        if end <= start:
            return np.array([start])
        width = max(BUCKET_S_MIN, (end - start) / self.buckets)
        count = max(1, min(self.buckets, round((end - start) / width)))
        return np.linspace(start, end, count + 1)
