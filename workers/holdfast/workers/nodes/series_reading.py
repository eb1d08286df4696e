"""Reading of the time series that the nodes of an attempt keep, see `series`.

The files of other users are hostile: each is bounded, and so are all of them together. What is
damaged is left out, and the reader says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from holdfast.contracts.disk.bounds import RANKS_MAX, TIME_MAX
from holdfast.contracts.disk.paths import AttemptPaths, folder_of
from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import HoldfastError
from holdfast.workers.nodes.series import (
    FORMAT,
    GPU_FIELDS,
    RANK_FIELDS,
    ROW_HEAD,
    ROWS_MAX,
    SeriesHeader,
)

Kind = Literal["ranks", "gpus"]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

COUNT_MAX: Final = 1024
HEADER_BYTES_MAX: Final = 1 << 20
FILES_MAX: Final = 16_384
# Far above the 40 MB of 512 nodes with 8 ranks, and nothing that fills a server's memory.
BYTES_MAX: Final = 512 << 20
PROBLEMS_MAX: Final = 8
WIDTH_S_MAX: Final = 1e8
_NAME: Final = re.compile(r"(ranks|gpus)-([0-9]{4,7})\.([0-9]{1,6})\.bin")


@dataclass(frozen=True)
class RecordedSeries:
    """The rows of one file, in order of time. `values` is by row, rank or GPU, and field."""

    header: SeriesHeader
    start: Floats
    end: Floats
    launch: Ints
    first_rank: Ints
    values: npt.NDArray[np.float32]


def list_series(attempt: AttemptPaths, kind: Kind) -> list[tuple[int, Path]]:
    """Return (node, path) of the files of one kind, in order of node."""
    try:
        names = os.listdir(attempt.series)
    except OSError:
        return []
    matches = filter(None, map(_NAME.fullmatch, names))
    found = sorted((int(one[2]), int(one[3]), one[0]) for one in matches if one[1] == kind)
    return [(node, attempt.series / name) for node, _, name in found[:FILES_MAX]]


def read_series(paths: Sequence[Path], kind: Kind) -> tuple[list[RecordedSeries], list[str]]:
    """Return the series in these files, and the problems with the others."""
    found, problems, left = list[RecordedSeries](), list[str](), BYTES_MAX
    for path in paths:
        try:
            content = read_bounded(path, _file_bytes_max(left), below=folder_of(path))
            left -= len(content)
            found.append(parse_series(content, kind))
        except (OSError, HoldfastError, ValueError) as error:
            if len(problems) < PROBLEMS_MAX:
                problems.append(f"{path.name}: {_reason(error)}")
    return found, problems


def parse_series(content: bytes, kind: Kind) -> RecordedSeries:
    """Return the content of one file. Raises `ValueError` if its header is damaged.

    A last row that is not whole, and rows that cannot be, are left out.
    """
    head, newline, body = content.partition(b"\n")
    if not newline or len(head) > HEADER_BYTES_MAX:
        raise ValueError("has no header; expected a line of JSON")
    header = SeriesHeader.model_validate_json(head)
    if (header.format, header.kind) != (FORMAT, kind) or not 1 <= header.count <= COUNT_MAX:
        raise ValueError(
            f"has {header.count} {header.kind} in format {header.format}; expected 1 to "
            f"{COUNT_MAX} {kind} in format {FORMAT}"
        )
    fields = len(RANK_FIELDS if kind == "ranks" else GPU_FIELDS)
    layout: list[Any] = [("start", "<f8"), ("width", "<f4"), ("launch", "<u4"), ("rank", "<u4")]
    row = np.dtype([*layout, ("values", "<f2", (header.count, fields))])
    rows = np.frombuffer(body, row, count=min(len(body) // row.itemsize, ROWS_MAX))
    start, width = rows["start"], rows["width"].astype(np.float64)
    # NaN fails every comparison.
    is_sane = (start > 0) & (start < TIME_MAX) & (width > 0) & (width < WIDTH_S_MAX)
    rows, start, width = rows[is_sane], start[is_sane], width[is_sane]
    order = np.argsort(start, kind="stable")
    values = rows["values"][order].astype(np.float32)
    # No value is negative or infinite.
    values[~((values >= 0) & np.isfinite(values))] = np.nan
    return RecordedSeries(
        header=header,
        start=start[order],
        end=np.maximum.accumulate((start + width)[order]),
        launch=rows["launch"][order].astype(np.int64),
        first_rank=np.minimum(rows["rank"][order].astype(np.int64), RANKS_MAX),
        values=values,
    )


def by_place(series: RecordedSeries) -> Iterator[tuple[int, RecordedSeries]]:
    """Yield (first rank, its rows) for each place that a node had in the launches of a file."""
    for first in np.unique(series.first_rank):
        here = series.first_rank == first
        yield (
            int(first),
            RecordedSeries(
                series.header,
                series.start[here],
                series.end[here],
                series.launch[here],
                series.first_rank[here],
                series.values[here],
            ),
        )


def mean_by_bucket(series: RecordedSeries, edges: Floats) -> npt.NDArray[np.float32]:
    """Return the mean values by bucket, rank or GPU, and field; NaN without data.

    `edges` are the bounds of the buckets. A row counts in each bucket that it touches, so a wide
    row fills several.
    """
    low, high = _rows_of_buckets(series, edges)
    width = (series.end - series.start).clip(min=1e-3)[:, None, None]
    there = ~np.isnan(series.values)
    weights = _sums(np.where(there, width, 0.0), low, high)
    sums = _sums(np.where(there, series.values * width, 0.0), low, high)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(weights > 0, sums / weights, np.nan).astype(np.float32)


def largest_by_bucket(series: RecordedSeries, edges: Floats) -> npt.NDArray[np.float32]:
    """Return the largest values by bucket, rank or GPU, and field; NaN without data."""
    low, high = _rows_of_buckets(series, edges)
    found = np.full((len(low), *series.values.shape[1:]), np.nan, dtype=np.float32)
    for bucket in np.flatnonzero(high > low):
        found[bucket] = np.fmax.reduce(series.values[low[bucket] : high[bucket]], axis=0)
    return found


def _rows_of_buckets(series: RecordedSeries, edges: Floats) -> tuple[Ints, Ints]:
    """Return the first row that each bucket touches, and the one after the last."""
    low = np.searchsorted(series.end, edges[:-1], side="right")
    high = np.searchsorted(series.start, edges[1:], side="left")
    return low, np.maximum(low, high)


def _sums(values: Any, low: Ints, high: Ints) -> Any:
    total = np.zeros((values.shape[0] + 1, *values.shape[1:]))
    np.cumsum(values, axis=0, out=total[1:])
    return total[high] - total[low]


def _file_bytes_max(left: int) -> int:
    fields = max(len(RANK_FIELDS), len(GPU_FIELDS))
    row_bytes = ROW_HEAD.size + 2 * COUNT_MAX * fields
    return max(0, min(left, HEADER_BYTES_MAX + ROWS_MAX * row_bytes))


def _reason(error: Exception) -> str:
    """Return the problem in one line. pydantic's own text has several."""
    if isinstance(error, ValidationError):
        return "the header is damaged"
    text = str(error)
    return text.splitlines()[0] if text else type(error).__name__
