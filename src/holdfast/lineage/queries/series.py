"""Queries for a run's metrics and its speed, by launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import select

from holdfast.lineage.database.tables import METRICS
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.queries import reports, views
from holdfast.lineage.queries.find import Row, rows_of, run_row

POINTS_DEFAULT: Final = 1000


def metric_series(
    database: Database,
    run: str,
    *,
    names: Sequence[str] = (),
    points: int = POINTS_DEFAULT,
) -> list[reports.Series]:
    """Return the metrics of each launch of a run, in order, with about `points` points in total.

    `names` selects metrics; by default all are returned. A point covers a range of steps and has
    the last, lowest and highest value, so spikes stay visible. Raises `NotFoundError` for an
    unknown run.
    """
    with database.reading() as connection:
        row = run_row(connection, run)
        columns = METRICS.c
        query = (
            select(METRICS)
            .where(columns.run_uid == row["uid"])
            .order_by(columns.attempt, columns.launch, columns.bucket)
        )
        found = rows_of(connection, query)
    by_launch: dict[tuple[int, int], list[Row]] = {}
    for one in found:
        by_launch.setdefault((one["attempt"], one["launch"]), []).append(one)
    every = max(1, -(-len(found) // max(1, points)))
    return [
        reports.Series(
            attempt=key[0],
            launch=key[1],
            points=_points(buckets, every, names),
        )
        for key, buckets in by_launch.items()
    ]


def _points(buckets: Sequence[Row], every: int, names: Sequence[str]) -> list[reports.Point]:
    """Merge each `every` buckets into one point; the rate is between the ends of two points."""
    points: list[reports.Point] = []
    for start in range(0, len(buckets), every):
        group = buckets[start : start + every]
        step, time = group[-1]["step"], group[-1]["time"]
        before = points[-1] if points else None
        took = time - before["time_s"] if before else 0.0
        points.append(
            reports.Point(
                step=step,
                time=views.iso_time(time),
                time_s=time,
                steps_per_s=(step - before["step"]) / took if before and took > 0 else None,
                values=_spreads(group, names),
            )
        )
    return points


def _spreads(group: Sequence[Row], names: Sequence[str]) -> dict[str, reports.Spread]:
    """Return the spread of each metric over all buckets of `group`, by name."""
    values: dict[str, reports.Spread] = {}
    for bucket in group:
        for name, (_, last, low, high) in bucket["data"].items():
            if not names or name in names:
                values[name] = _join(values.get(name), last, low, high)
    return values


def _join(
    so_far: reports.Spread | None, last: float | None, low: float | None, high: float | None
) -> reports.Spread:
    lows = [v for v in (so_far["low"] if so_far else None, low) if v is not None]
    highs = [v for v in (so_far["high"] if so_far else None, high) if v is not None]
    return reports.Spread(last=last, low=min(lows, default=None), high=max(highs, default=None))
