"""The heat map of an attempt's ranks over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.api.series import models
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.plain_text import plain_line
from holdfast.workers.nodes import series_reading
from holdfast.workers.nodes.calibration import SLOW_FACTOR, SLOW_SHARE

RANKS_MAX: Final = 4096
BUCKETS_MAX: Final = 1000
WORST: Final = 10
LAUNCHES_MAX: Final = 100
# A rank that was slow in fewer buckets is not a straggler.
SLOW_BUCKETS_MIN: Final = 3
# Printable characters that JSON does not escape. The first one is "no value".
ALPHABET: Final = " " + "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) not in '"\\')
LEVELS: Final = len(ALPHABET) - 1
# Finer steps would only show noise, and would triple the size of the answer.
RATIO_MIN: Final = 1.1
# Values below this part of the largest one are equal for the eye.
DYNAMIC: Final = 1e5

Grid = npt.NDArray[np.float32]


@dataclass
class _Ranks:
    """The values of the wanted ranks: by rank, bucket and field of a file."""

    first: int
    values: Grid
    hosts: dict[int, models.HeatHost] = field(default_factory=dict)
    launches: dict[int, float] = field(default_factory=dict)
    total: int = 0

    def take(self, series: series_reading.RecordedSeries, edges: npt.NDArray[np.float64]) -> None:
        """Add the rows of a node, which may have had several places."""
        header, here = series.header, list(series_reading.by_place(series))
        for launch in np.unique(series.launch)[:LAUNCHES_MAX]:
            start = float(series.start[series.launch == launch][0])
            self.launches[int(launch)] = min(start, self.launches.get(int(launch), math.inf))
        for first, rows in sorted(here, key=lambda one: float(one[1].end[-1])):
            self.total = max(self.total, first + header.count)
            low, high = max(first, self.first), min(first + header.count, self.end)
            if low >= high:
                continue
            host = plain_line(header.host)
            self.hosts[first] = models.HeatHost(
                node=header.node, host=host, first_rank=first, ranks=header.count
            )
            found = series_reading.mean_by_bucket(rows, edges)[:, low - first : high - first]
            place = self.values[low - self.first : high - self.first]
            place[:] = np.where(np.isnan(place), found.transpose(1, 0, 2), place)

    @property
    def end(self) -> int:
        return self.first + len(self.values)

    def host_of(self, rank: int) -> models.HeatHost:
        below = [one for one in self.hosts.values() if one.first_rank <= rank]
        return max(below, key=lambda one: one.first_rank)


def read_heat_map(
    run: str,
    attempt: AttemptPaths,
    value: models.HeatValue,
    within: models.TimeRange,
    ranks: range,
) -> models.HeatMap:
    """Return the heat map of these ranks, at most `RANKS_MAX`."""
    paths = [path for _, path in series_reading.list_series(attempt, "ranks")]
    series, problems = series_reading.read_series(paths, "ranks")
    series = [one for one in series if len(one.start)]
    edges = within.edges(series)
    ends = [int(one.first_rank.max()) + one.header.count for one in series]
    count = max(0, min(len(ranks), max(ends, default=0) - ranks.start))
    grid = np.full((count, len(edges) - 1, 3), np.nan, dtype=np.float32)
    found = _Ranks(ranks.start, grid)
    for one in series:
        found.take(one, edges)
    shown = _of_value(grid, value)
    lowest, ratio, rows = encode(shown)
    return models.HeatMap(
        run=run,
        attempt=attempt.number,
        value=value,
        start_s=float(edges[0]),
        bucket_s=float(edges[1] - edges[0]) if len(edges) > 1 else 0.0,
        buckets=len(edges) - 1,
        first_rank=ranks.start,
        ranks_total=found.total,
        alphabet=ALPHABET,
        lowest_s=lowest,
        ratio=ratio,
        rows=rows,
        hosts=sorted(found.hosts.values(), key=lambda one: one.first_rank),
        launches=[
            models.HeatLaunch(launch=n, start_s=at) for n, at in sorted(found.launches.items())
        ],
        worst=_worst(found),
        problems=problems,
    )


def _of_value(grid: Grid, value: models.HeatValue) -> Grid:
    """Return one value by rank and bucket."""
    step, data, others = grid[..., 0], grid[..., 1], grid[..., 2]
    own: Grid = np.maximum(step - others, np.float32(0))
    if value is models.HeatValue.OWN:
        return own
    return {
        models.HeatValue.STEP: step,
        models.HeatValue.DATA: data,
        models.HeatValue.OTHERS: others,
    }[value]


def encode(values: Grid) -> tuple[float, float, list[str]]:
    """Return the lowest value, the ratio of two levels, and a text for each row, see `HeatMap`."""
    there = values[values > 0]
    if not there.size:
        level = np.where(np.isnan(values), 0, 1)
        return 0.0, RATIO_MIN, _texts(level)
    highest = float(there.max())
    lowest = max(float(there.min()), highest / DYNAMIC)
    ratio = max(RATIO_MIN, (highest / lowest) ** (1 / max(1, LEVELS - 2)))
    # The usual value is the middle of a level. Otherwise, noise would change between two.
    usual = max(float(np.median(there)), lowest)
    lowest = usual / ratio ** round(math.log(usual / lowest, ratio))
    with np.errstate(invalid="ignore", divide="ignore"):
        level = 1 + np.round(np.log(np.maximum(values, lowest) / lowest) / math.log(ratio))
    return lowest, ratio, _texts(np.where(np.isnan(level), 0, level).clip(0, LEVELS))


def _texts(levels: Any) -> list[str]:
    codes = np.frombuffer(ALPHABET.encode(), dtype=np.uint8)[levels.astype(np.int64)]
    return [row.tobytes().decode() for row in codes]


def _worst(found: _Ranks) -> list[models.RankMeans]:
    """Return the ranks that were slow most of the time, then those with the most own time.

    A rank is slow in a bucket if its own time is well above the median of all, as for the notice
    of a straggler.
    """
    step, own = found.values[..., 0], _of_value(found.values, models.HeatValue.OWN)
    has_row = ~np.isnan(step)
    counts = has_row.sum(axis=1)
    if not counts.any():
        return []
    median = _medians(own)
    is_slow = (own > SLOW_FACTOR * median) & (own - median >= SLOW_SHARE * step)
    slow = is_slow.sum(axis=1)
    shares = slow / np.maximum(counts, 1)
    means = np.nansum(found.values, axis=1) / np.maximum(counts, 1)[:, None]
    owns = np.nansum(own, axis=1) / np.maximum(counts, 1)
    peers_s = float(np.median(owns[counts > 0]))
    order = np.lexsort((-owns, -shares))
    chosen = [int(at) for at in order if counts[at]][:WORST]
    return [
        _means(found, at, means[at], own_s=owns[at], peers_s=peers_s, slow=(slow[at], shares[at]))
        for at in chosen
    ]


def _medians(own: Grid) -> Grid:
    """Return the median over the ranks by bucket; NaN in a bucket without data."""
    is_there = ~np.isnan(own).all(axis=0)
    found = np.full(own.shape[1], np.nan, dtype=np.float32)
    found[is_there] = np.nanmedian(own[:, is_there], axis=0)
    return found


def _means(
    found: _Ranks,
    at: int,
    means: Sequence[float],
    *,
    own_s: float,
    peers_s: float,
    slow: tuple[int, float],
) -> models.RankMeans:
    """Return the answer about one rank; `slow` is the number and the share of slow buckets."""
    rank = found.first + at
    host = found.host_of(rank)
    step_s, data_s, others_s = (float(each) for each in means)
    return models.RankMeans(
        rank=rank,
        node=host.node,
        host=host.host,
        step_s=step_s,
        data_s=data_s,
        others_s=others_s,
        own_s=float(own_s),
        peers_s=peers_s,
        slow_share=float(slow[1]),
        is_straggler=bool(slow[0] >= SLOW_BUCKETS_MIN),
    )
