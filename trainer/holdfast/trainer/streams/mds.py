"""MDS shards, the format of MosaicML Streaming, read without its package.

A shard begins with the number of its samples and the byte where each begins, so a position is the
number of a sample, and a resume seeks. A folder's `index.json` has the shards and their columns.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from holdfast.contracts.errors import SpecError
from holdfast.trainer.streams.files import CHECK_S, open_file, open_shard, size_of
from holdfast.trainer.streams.source import Source

_NUMBER: Final = np.dtype("<u4")
_SCALARS: Final = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
# The numbers that stand for types in an array without a fixed one.
_TYPES: Final = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
_ARRAY: Final = "ndarray"


def _scalar(kind: str, data: bytes) -> Any:
    return np.frombuffer(data, kind)[0]


# Other columns stay bytes. Holdfast loads no pickle of a file, and no picture without Pillow.
_DECODED: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "str": bytes.decode,
    "int": lambda data: int(np.frombuffer(data, "<i8")[0]),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: Decimal(data.decode()),
    "json": json.loads,
    **{name: partial(_scalar, name) for name in _SCALARS},
}


class MdsShards(Source):
    """The shards of a folder that `MDSWriter` of MosaicML Streaming wrote, without compression.

    A sample is a dict of the columns. Pictures and pickled columns are given as their bytes: decode
    them in the `transform` of the stream. The order is not that of `StreamingDataset`.

    It is a dataset with an index, too. In a DataLoader with `Session.sampler`, the order is the
    same at every number of ranks. Each sample is then read by itself, so keep the shards local.
    """

    def __init__(self, folder: str | Path) -> None:
        """`folder` has an `index.json`. It is local, or a URL that fsspec can read in part."""
        self._folder = str(folder).rstrip("/")
        self._rows: dict[str, Mapping[str, Any]] = {}
        # The names of the shards, and the number of samples up to the end of each.
        self._names: list[str] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        if not self._ends:
            rows = self._index()
            self._names, self._ends = list(rows), list(accumulate(_count(rows[n]) for n in rows))
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a sample. Raises `IndexError` behind the last one."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number}: expected a number below {len(self)}")
        place = bisect_right(self._ends, number)
        first = self._ends[place - 1] if place else 0
        sample: dict[str, Any] = next(self.open(self._names[place], number - first))[0]
        return sample

    def shards(self) -> Sequence[str]:
        """Return the names of the files with their sizes and numbers of samples.

        Raises `OSError` if a file is missing, and `SpecError` if one has another size than the
        index says, or is compressed.
        """
        rows, until = self._index(), time.monotonic() + CHECK_S
        for row in rows.values():
            if time.monotonic() < until:
                self._check(row)
        return list(rows)

    def open(self, shard: str, position: Any) -> Iterator[tuple[Any, Any]]:
        """Iterate over the samples from number `position` on."""
        row = self._index()[shard]
        path, count = self._path(row), _count(row)
        with open_shard(path, int(row["raw_data"]["bytes"])) as file:
            head = np.frombuffer(file.read(4 * (count + 2)), _NUMBER).astype(np.int64)
            is_whole = len(head) == count + 2 and head[0] == count
            if (
                not is_whole
                or head[-1] != row["raw_data"]["bytes"]
                or (np.diff(head[1:]) < 0).any()
            ):
                raise SpecError(
                    f"the shard {path} is damaged: its table of samples does not fit its size, or "
                    f"the {count} samples of index.json; write it again"
                )
            for number in range(int(position or 0), count):
                begin, end = head[number + 1 : number + 3].tolist()
                file.seek(begin)
                try:
                    sample = _decoded(file.read(end - begin), row)
                except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                    raise SpecError(
                        f"the shard {path} is damaged in sample {number}: {error}; write it again"
                    ) from error
                yield sample, number + 1

    def _path(self, row: Mapping[str, Any]) -> str:
        return f"{self._folder}/{row['raw_data']['basename']}"

    def _index(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the rows of the index by the names of the shards. Raises `SpecError`."""
        if not self._rows:
            path = f"{self._folder}/index.json"
            with open_file(path) as file:
                content = file.read()
            try:
                rows = list(json.loads(content)["shards"])
                found = {_name_of(path, row): row for row in rows}
            except SpecError:
                raise
            except (ValueError, KeyError, TypeError) as error:
                raise SpecError(f"{path} is not an index of MDS shards: {error!r}") from error
            if len(found) < len(rows):
                raise SpecError(f"{path} names a shard twice; expected each file once")
            self._rows = found
        return self._rows

    def _check(self, row: Mapping[str, Any]) -> None:
        path = self._path(row)
        try:
            found = size_of(path)
        except FileNotFoundError:
            if row.get("zip_data"):
                raise SpecError(
                    f"the shard {path} exists only compressed with {row['compression']}, so no "
                    "sample can be read from a position; expected it decompressed beside that, or "
                    "MDSWriter without compression"
                ) from None
            raise
        if found != row["raw_data"]["bytes"]:
            raise SpecError(
                f"the shard {path} has {found} bytes, and index.json says "
                f"{row['raw_data']['bytes']}; copy or write it again"
            )


def _name_of(path: str, row: Mapping[str, Any]) -> str:
    """Return the name of a shard from its row of the index at `path`. Raises `SpecError`."""
    file, size = str(row["raw_data"]["basename"]), int(row["raw_data"]["bytes"])
    if (row["format"], row["version"]) != ("mds", 2):
        raise SpecError(
            f"{path} names a shard of format {row['format']} {row['version']}; expected mds 2"
        )
    if file.startswith("/") or ".." in file.split("/"):
        raise SpecError(f"{path} names {file!r}; expected a file of its folder")
    return f"{file} ({size} bytes, {_count(row)} samples)"


def _count(row: Mapping[str, Any]) -> int:
    return int(row["samples"])


def _decoded(data: bytes, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample. Its head has the sizes of the columns that have no fixed one."""
    fixed = row["column_sizes"]
    free = sum(not size for size in fixed)
    sizes = iter(np.frombuffer(data[: 4 * free], _NUMBER).tolist())
    sample, at = {}, 4 * free
    for name, encoding, size in zip(
        row["column_names"], row["column_encodings"], fixed, strict=True
    ):
        size = size or next(sizes)
        part = data[at : at + size]
        if len(part) < size:
            raise ValueError(f"column {name} ends behind the sample")
        kind, _, form = encoding.partition(":")
        if kind == _ARRAY:
            sample[name] = _array(part, form)
        else:
            sample[name] = _DECODED.get(kind, bytes)(part)
        at += size
    return sample


def _array(data: bytes, form: str) -> np.ndarray[Any, Any]:
    """Return an array. `form` has the type and the shape that the column fixes."""
    kind, _, text = form.partition(":")
    at = 0
    if not kind:
        kind, at = _TYPES[data[0]], 1
    if text:
        shape = [int(size) for size in text.split(",")]
    else:
        # Six bits are the number of dimensions, two the width of their sizes.
        axes, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = np.frombuffer(data, f"<u{width}", axes, at + 1).tolist()
        at += 1 + axes * width
    # A copy, because torch expects arrays that it may write to.
    return np.frombuffer(data, kind, offset=at).reshape(shape).copy()
