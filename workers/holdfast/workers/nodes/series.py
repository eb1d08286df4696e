"""Time series of a node's ranks and GPUs: one bounded file of each kind per node and attempt.

A file has a line of JSON, the header, and then rows of equal size. A row is a bucket of time with
half-precision numbers for each rank or GPU. The node's agent appends a row every few seconds. When
the file is full, it merges neighbouring rows: the older they are, the wider they may become. So the
last minutes have full resolution, a month fits as well, and no reader needs more than one file per
node. `series_reading` reads the files.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.contracts.disk import durable, filesystems, reading
from holdfast.contracts.disk.bounds import ByteCount, Name, Number
from holdfast.contracts.disk.paths import folder_of
from holdfast.contracts.records.documents import Document
from holdfast.workers.nodes.gpus import GpuBeat

FORMAT: Final = 1
ROWS_MAX: Final = 1024
# A merge makes rows as wide as this part of their age, or wider while there are too many rows: in
# files of a day or a month, a sixty-fourth or a thirty-second.
AGE_PARTS: Final = 256
# After a merge, at least a quarter of the file is free again.
ROWS_KEPT: Final = ROWS_MAX * 3 // 4
# The largest half-precision number.
HALF_MAX: Final = 65504.0
ROW_HEAD: Final = struct.Struct("<dfII")
RANK_FIELDS: Final = ("step", "data", "others")
GPU_FIELDS: Final = (
    *("utilisation_percent", "memory_gib", "temperature_c", "power_w", "ecc_errors", "xid"),
)
# Fields that a merge does not average: the larger value, or the sum.
_LARGEST: Final = frozenset({"memory_gib", "temperature_c", "xid"})
_SUMMED: Final = frozenset({"ecc_errors"})


class RankTimes(NamedTuple):
    """The mean seconds per step of a rank in a bucket; NaN if it did not train.

    `data_s` is the wait for its next batch, and `others_s` the wait for other ranks.
    """

    step_s: float
    data_s: float
    others_s: float


NO_TIMES: Final = RankTimes(math.nan, math.nan, math.nan)


class GpuHeader(Document):
    """A GPU in the header of a file, in the order of the values."""

    index: Number
    uuid: Name = ""
    memory_total_bytes: ByteCount | None = None


class SeriesHeader(Document):
    """The first line of a file: whose values its rows have, `count` ranks or GPUs."""

    format: Number
    kind: Name
    node: Number
    host: Name
    count: Number
    gpus: tuple[GpuHeader, ...] = ()


@dataclass(frozen=True)
class SeriesRow:
    """A bucket. `start` is Unix time. `values` has the fields of each rank or GPU, in turn."""

    start: float
    width_s: float
    launch: int
    first_rank: int
    values: tuple[float, ...]

    @property
    def end(self) -> float:
        return self.start + self.width_s

    def pack(self) -> bytes:
        """Return the bytes of this row in a file."""
        head = ROW_HEAD.pack(self.start, self.width_s, self.launch, self.first_rank)
        halves = (min(max(value, -HALF_MAX), HALF_MAX) for value in self.values)
        return head + struct.pack(f"<{len(self.values)}e", *halves)


def merge(first: SeriesRow, second: SeriesRow, fields: Sequence[str]) -> SeriesRow:
    """Return the row of two neighbouring buckets."""
    values = tuple(
        _merge_value(fields[at % len(fields)], a, first.width_s, b, second.width_s)
        for at, (a, b) in enumerate(zip(first.values, second.values, strict=True))
    )
    return replace(first, width_s=second.end - first.start, values=values)


def _merge_value(field: str, a: float, a_s: float, b: float, b_s: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    if field in _LARGEST:
        return max(a, b)
    return a + b if field in _SUMMED else (a * a_s + b * b_s) / (a_s + b_s)


def thin(rows: Sequence[SeriesRow], fields: Sequence[str]) -> list[SeriesRow]:
    """Merge neighbours until `ROWS_KEPT` rows or fewer are left.

    Only rows of the same launch and ranks are merged. If there are more launches than that, the
    oldest rows are dropped.
    """
    found, share = list(rows), 1.0 / AGE_PARTS
    while len(found) > ROWS_KEPT and share <= 2.0:
        before = len(found)
        found = _merge_old(found, fields, share)
        if len(found) == before:
            share *= 2
    return found[-ROWS_KEPT:]


def _merge_old(rows: Sequence[SeriesRow], fields: Sequence[str], share: float) -> list[SeriesRow]:
    """Merge each pair of neighbours that together is no wider than this share of its age."""
    now, found, at = rows[-1].end, list[SeriesRow](), 0
    while at < len(rows):
        row, at = rows[at], at + 1
        other = rows[at] if at < len(rows) else None
        if (
            other is not None
            and (row.launch, row.first_rank) == (other.launch, other.first_rank)
            and other.end - row.start <= (now - other.end) * share
        ):
            row, at = merge(row, other, fields), at + 1
        found.append(row)
    return found


class SeriesWriter:
    """Writes one file. Its rows are kept in memory too, so it never reads the storage."""

    def __init__(self, folder: Path, header: SeriesHeader) -> None:
        """The file is created with its first row."""
        self._folder, self._header = folder, header
        self._fields = RANK_FIELDS if header.kind == "ranks" else GPU_FIELDS
        self._rows: list[SeriesRow] = []
        self._path: Path | None = None
        self._is_whole = True
        self.ends_at = 0.0

    def append(self, row: SeriesRow) -> None:
        """Add a bucket. Raises `OSError` or `HoldfastError` if the storage fails.

        Rows never overlap: one that would begin before the last one's end begins there. So a clock
        that is set back only delays the rows until it has caught up.
        """
        row = replace(row, start=max(row.start, self.ends_at))
        self.ends_at = row.end
        self._rows.append(row)
        if len(self._rows) >= ROWS_MAX:
            self._rows, self._is_whole = thin(self._rows, self._fields), False
        if self._path is None:
            self._path = self._create()
        if not self._is_whole:
            durable.write_bytes(self._path, self._content(), below=folder_of(self._path))
            self._is_whole = True
            return
        # After a part of a row, the whole file is written again.
        self._is_whole = False
        self._write(self._path, os.O_APPEND | filesystems.send_flag(self._folder), row.pack())
        self._is_whole = True

    def _content(self) -> bytes:
        head = self._header.model_dump_json(exclude_none=True).encode() + b"\n"
        return head + b"".join(row.pack() for row in self._rows)

    def _create(self) -> Path:
        """Create a file that no other process writes. Another agent may have had this node."""
        durable.make_directory(self._folder)
        number, self._is_whole = 1, False
        while True:
            path = self._folder / f"{self._header.kind}-{self._header.node:04d}.{number}.bin"
            try:
                self._write(path, os.O_CREAT | os.O_EXCL, b"")
            except FileExistsError:
                number += 1
                continue
            return path

    def _write(self, path: Path, flags: int, content: bytes) -> None:
        handle = reading.open_beneath(path, os.O_WRONLY | flags, below=folder_of(path))
        try:
            if os.write(handle, content) != len(content):
                raise OSError(f"{path}: only a part was written")
        finally:
            os.close(handle)


def rank_values(times: Iterable[RankTimes]) -> tuple[float, ...]:
    """Return the values of a row of ranks."""
    return tuple(value for each in times for value in each)


def gpu_values(before: Sequence[GpuBeat], now: Sequence[GpuBeat]) -> tuple[float, ...]:
    """Return the values of a row of GPUs. `before` has their counters at the last row."""
    counted = {gpu.index: gpu for gpu in before}
    return tuple(value for gpu in now for value in _of_gpu(counted.get(gpu.index, gpu), gpu))


def _of_gpu(before: GpuBeat, now: GpuBeat) -> tuple[float, ...]:
    used, errors = now.memory_used_bytes, now.ecc_uncorrected
    is_new = now.xids_seen > before.xids_seen and now.xids
    return (
        _number(now.utilisation_percent),
        _number(None if used is None else used / 2**30),
        _number(now.temperature_c),
        _number(now.power_w),
        _number(None if errors is None else max(0, errors - (before.ecc_uncorrected or 0))),
        float(now.xids[-1]) if is_new else 0.0,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
