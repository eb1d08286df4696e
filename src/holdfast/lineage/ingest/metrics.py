"""Ingest of metrics. Only the lines that were added since the last ingest are read."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, and_, delete, select

from holdfast.contracts.disk.paths import RunPaths, folder_of
from holdfast.contracts.disk.reading import open_regular
from holdfast.lineage.database.states import INTEGER_MAX
from holdfast.lineage.database.tables import METRIC_FILES, METRICS, Row, lock_run, upsert
from holdfast.lineage.database.transactions import Database
from holdfast.lineage.ingest.disk import list_metrics

# Down-sampling of metrics: a metrics file becomes a few hundred buckets of steps.
#
# A bucket covers `stride` steps. The stride is the smallest power of two with at most
# `BUCKETS_MAX` buckets. A bucket keeps the last, lowest and highest value of each metric, so a
# spike stays visible in a long run. The result does not depend on how many times a growing file
# is read.

BUCKETS_MAX: Final = 512
NAMES_MAX: Final = 64
NAME_CHARACTERS_MAX: Final = 200
LINE_BYTES_MAX: Final = 1024 * 1024
LOSS: Final = "loss"
SPARK_POINTS: Final = 32

# (step, last, lowest, highest); values are None if none was finite.
Spread = tuple[int, float | None, float | None, float | None]


@dataclass
class Bucket:
    """A range of steps: the step and time of its last line, and the spread of each metric."""

    step: int
    time: float
    data: dict[str, Spread] = field(default_factory=dict)

    def add(self, other: Bucket) -> None:
        """Merge another bucket into this one; for equal steps, `other` is the later."""
        if other.step >= self.step:
            self.step, self.time = other.step, other.time
        for name, spread in other.data.items():
            if name in self.data:
                self.data[name] = _join(self.data[name], spread)
            elif len(self.data) < NAMES_MAX:
                self.data[name] = spread


@dataclass
class MetricSeries:
    """The buckets of one metrics file by their first step, and the read position in the file."""

    offset: int = 0
    stride: int = 1
    buckets: dict[int, Bucket] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    buckets_max: int = BUCKETS_MAX

    def read(self, path: Path) -> None:
        """Read the complete new lines of the file. Lines that are not metrics are skipped."""
        # Another user's folder may have anything under this name.
        with open(open_regular(path, below=folder_of(path)), "rb") as stream:
            stream.seek(self.offset)
            while line := stream.readline(LINE_BYTES_MAX):
                # A line of more than the limit is passed in pieces, each of which is not a metric.
                if not line.endswith(b"\n") and len(line) < LINE_BYTES_MAX:
                    # The writer has not finished this line; the next read will get it.
                    break
                self.offset += len(line)
                bucket = parse_line(line)
                if bucket:
                    self.add(bucket)

    def add(self, line: Bucket) -> None:
        # By step and not by line: the buckets are the same however often a growing file is read.
        start = line.step // self.stride * self.stride
        if start in self.buckets:
            self.buckets[start].add(line)
        else:
            self.buckets[start] = line
        self.touched.add(start)
        while len(self.buckets) > self.buckets_max:
            self._widen()

    def lasts(self, metric: str) -> list[float]:
        """Return the last value of a metric in each bucket that has one, oldest first."""
        spreads = (self.buckets[start].data.get(metric) for start in sorted(self.buckets))
        return [spread[1] for spread in spreads if spread and spread[1] is not None]

    def _widen(self) -> None:
        self.stride *= 2
        narrow, self.buckets = self.buckets, {}
        for start in sorted(narrow):
            wide = start // self.stride * self.stride
            if wide in self.buckets:
                self.buckets[wide].add(narrow[start])
            else:
                self.buckets[wide] = narrow[start]
        self.touched = set(self.buckets)


def thin(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` evenly spaced values, including the last one."""
    if len(values) <= count:
        return list(values)
    return [values[(index + 1) * len(values) // count - 1] for index in range(count)]


def parse_line(line: bytes) -> Bucket | None:
    """Return a line (`step`, `time` and numbers by name) as a bucket, or None if it is invalid."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    step, time = document.pop("step", None), _number(document.pop("time", None))
    if type(step) is not int or not 0 <= step <= INTEGER_MAX or time is None:
        return None
    data: dict[str, Spread] = {}
    for name, given in list(document.items())[:NAMES_MAX]:
        value = _number(given)
        # `nan` and `inf` are written as strings. Values of other types are not metrics.
        if value is not None or isinstance(given, str):
            data[_named(name)] = (step, value, value, value)
    return Bucket(step, time, data)


def _named(name: str) -> str:
    plain = name[:NAME_CHARACTERS_MAX].replace("\0", "\ufffd")
    return plain.encode(errors="replace").decode()


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _join(one: Spread, other: Spread) -> Spread:
    """Merge two spreads; for equal steps, `other` is the later."""
    step, last = (other if other[0] >= one[0] else one)[:2]
    lows = [value for value in (one[2], other[2]) if value is not None]
    highs = [value for value in (one[3], other[3]) if value is not None]
    return step, last, min(lows, default=None), max(highs, default=None)


def follow_metrics(
    database: Database, paths: RunPaths, uid: str, attempts: Collection[int] | None = None
) -> None:
    """Ingest the new metrics of a run that is in the index. Cheap if there are none.

    With `attempts`, only their files are checked.
    """
    if _has_changed(database, paths, uid, attempts):
        with database.writing() as connection:
            # Under the lock, so two processes do not add the same lines to a bucket twice.
            lock_run(connection, uid)
            write_metrics(connection, paths, uid, attempts)


def _has_changed(
    database: Database, paths: RunPaths, uid: str, attempts: Collection[int] | None
) -> bool:
    """Return True if a metrics file was added, removed or changed its size since the last read."""
    sizes = {key: path.stat().st_size for key, path in list_metrics(paths, attempts).items()}
    if attempts is not None and not sizes:
        # The next check of all files finds those that were removed.
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
        # The width of all buckets has changed, so the old rows cover other steps.
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
