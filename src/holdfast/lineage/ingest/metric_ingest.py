"""Ingest of metrics. Only the lines that were added since the last ingest are read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, and_, delete, select

from holdfast.contracts.disk.paths import RunPaths
from holdfast.lineage.database.tables import METRIC_FILES, METRICS, Row, lock_run, upsert
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.ingest.disk import list_metrics
from holdfast.lineage.ingest.metric_rows import LOSS, SPARK_POINTS, Bucket, MetricSeries, thin


def follow_metrics(
    database: Database, paths: RunPaths, uid: str, attempts: Collection[int] | None = None
) -> None:
    """Ingest the new metrics of a run that is in the index. Cheap if there are none.

    With `attempts`, only their files are looked at.
    """
    if _has_changed(database, paths, uid, attempts):
        with database.writing() as connection:
            lock_run(connection, uid)
            write_metrics(connection, paths, uid, attempts)


def _has_changed(
    database: Database, paths: RunPaths, uid: str, attempts: Collection[int] | None
) -> bool:
    """Return True if a metrics file was added, removed or changed its size since the last read."""
    sizes = {key: path.stat().st_size for key, path in list_metrics(paths, attempts).items()}
    if attempts is not None and not sizes:
        # The next look at all files finds those that were removed.
        return False
    with database.reading() as connection:
        known = _known(connection, uid, attempts)
    return {key: row["offset"] for key, row in known.items()} != sizes


def write_metrics(
    connection: Connection, paths: RunPaths, uid: str, attempts: Collection[int] | None = None
) -> None:
    """Update the metric buckets of a run, or of some attempts, from its metrics files."""
    known, found = _known(connection, uid, attempts), list_metrics(paths, attempts)
    for key in known.keys() - found.keys():
        connection.execute(delete(METRIC_FILES).where(_is_file(METRIC_FILES, uid, key)))
    for key, path in sorted(found.items()):
        size = path.stat().st_size
        row = known.get(key)
        if row and row["offset"] == size:
            continue
        # A file that became smaller was replaced, so read it from the start.
        has_grown = row is not None and row["offset"] < size
        series = _load(connection, uid, key, row) if row and has_grown else MetricSeries()
        stride = series.stride
        series.read(path)
        _save(connection, uid, key, series, again=not has_grown or series.stride != stride)


def _known(
    connection: Connection, uid: str, attempts: Collection[int] | None
) -> dict[tuple[int, int], Row]:
    query = select(METRIC_FILES).where(METRIC_FILES.c.run_uid == uid)
    if attempts is not None:
        query = query.where(METRIC_FILES.c.attempt.in_(attempts))
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
