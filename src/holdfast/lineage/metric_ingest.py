"""Logged metrics into the index, as their files grow: only what was not read before is read."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, and_, delete, select

from holdfast.contracts.paths import RunPaths
from holdfast.lineage.database import Database
from holdfast.lineage.disk import list_metrics
from holdfast.lineage.metric_rows import LOSS, SPARK_POINTS, Bucket, MetricSeries, thin
from holdfast.lineage.tables import METRIC_FILES, METRICS, Row, lock_run, upsert


def follow_metrics(database: Database, paths: RunPaths, uid: str) -> None:
    """Take in what a run that is in the index has logged since; costs little if it is nothing."""
    if _has_news(database, paths, uid):
        with database.writing() as connection:
            lock_run(connection, uid)
            write_metrics(connection, paths, uid)


def _has_news(database: Database, paths: RunPaths, uid: str) -> bool:
    """True when a file of metrics grew, came or went since it was read."""
    with database.reading() as connection:
        offsets = {key: row["offset"] for key, row in _known(connection, uid).items()}
    sizes = {key: path.stat().st_size for key, path in list_metrics(paths).items()}
    return offsets != sizes


def write_metrics(connection: Connection, paths: RunPaths, uid: str) -> None:
    """Bring the buckets of a run in line with its files of metrics."""
    known, found = _known(connection, uid), list_metrics(paths)
    for key in known.keys() - found.keys():
        connection.execute(delete(METRIC_FILES).where(_is_file(METRIC_FILES, uid, key)))
    for key, path in sorted(found.items()):
        size = path.stat().st_size
        row = known.get(key)
        if row and row["offset"] == size:
            continue
        # A file that shrank is another one: it is read from its start.
        goes_on = row is not None and row["offset"] < size
        series = _load(connection, uid, key, row) if row and goes_on else MetricSeries()
        stride = series.stride
        series.read(path)
        _save(connection, uid, key, series, again=not goes_on or series.stride != stride)


def _known(connection: Connection, uid: str) -> dict[tuple[int, int], Row]:
    query = select(METRIC_FILES).where(METRIC_FILES.c.run_uid == uid)
    return {
        (row["attempt"], row["launch"]): dict(row) for row in connection.execute(query).mappings()
    }


def _is_file(table: Any, uid: str, key: tuple[int, int]) -> Any:
    columns = table.c
    return and_(columns.run_uid == uid, columns.attempt == key[0], columns.launch == key[1])


def _load(connection: Connection, uid: str, key: tuple[int, int], row: Row) -> MetricSeries:
    found = connection.execute(select(METRICS).where(_is_file(METRICS, uid, key))).mappings()
    buckets = {
        one["bucket"]: Bucket(
            one["step"],
            one["time"],
            {name: (int(v[0]), v[1], v[2], v[3]) for name, v in one["data"].items()},
        )
        for one in found
    }
    return MetricSeries(row["offset"], row["stride"], buckets)


def _save(
    connection: Connection, uid: str, key: tuple[int, int], series: MetricSeries, *, again: bool
) -> None:
    identity = {"run_uid": uid, "attempt": key[0], "launch": key[1]}
    upsert(
        connection,
        METRIC_FILES,
        [
            {
                **identity,
                "offset": series.offset,
                "stride": series.stride,
                "spark": thin(series.lasts(LOSS), SPARK_POINTS),
            }
        ],
    )
    if again:
        connection.execute(delete(METRICS).where(_is_file(METRICS, uid, key)))
    written = sorted(series.buckets if again else series.touched)
    rows = (
        {
            **identity,
            "bucket": start,
            "step": series.buckets[start].step,
            "time": series.buckets[start].time,
            "data": {name: list(spread) for name, spread in series.buckets[start].data.items()},
        }
        for start in written
    )
    upsert(connection, METRICS, list(rows))
