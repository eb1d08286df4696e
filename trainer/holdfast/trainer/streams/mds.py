"""MDS shards, the format of MosaicML Streaming, read without its package.

A shard begins with the number of its samples and the byte where each begins, so a position is the
number of a sample, and a resume seeks. A folder's `index.json` has the shards and their columns.

Compressed shards are unpacked into memory while they are open. None of their formats can seek, so a
resume unpacks each open shard once, whatever its position is.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from holdfast.contracts.errors import SpecError
from holdfast.trainer.streams.source import CHECK_S, Source, open_file, open_shard, size_of

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
# The files of a shard in its row of the index.
_RAW, _PACKED = "raw_data", "zip_data"
_SNAPPY: Final = "snappy"
# The names of formats in an index, and those of pyarrow. Python itself reads the first two.
_FORMATS: Final = {"bz2": "", "gz": "", "br": "brotli", _SNAPPY: _SNAPPY, "zstd": "zstd"}
_UNREADABLE: Final = (OSError, EOFError, zlib.error, ValueError)
_WAY_OUT: Final = "write the shards without compression, or put decompressed ones beside them"


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
    """The shards of a folder that `MDSWriter` of MosaicML Streaming wrote.

    A compressed shard is unpacked into memory while it is open, unless its decompressed file is
    beside it. A sample is a dict of the columns. Pictures and pickled columns are given as their
    bytes: decode them in the `transform` of the stream. The order is not that of
    `StreamingDataset`.

    It is a dataset with an index, too. In a DataLoader with `Session.sampler`, the order is the
    same at every number of ranks. Each sample is then read by itself, so keep the shards local and
    decompressed.
    """

    def __init__(self, folder: str | Path) -> None:
        """`folder` has an `index.json`. It is local, or a URL that fsspec can read in part."""
        self._folder = str(folder).rstrip("/")
        self._rows: dict[str, Mapping[str, Any]] = {}
        # The names of the shards, and the number of samples up to the end of each.
        self._names: list[str] = []
        self._ends: list[int] = []
        self._is_plain = False

    def __len__(self) -> int:
        """Return the number of samples of all shards."""
        if not self._ends:
            rows = self._index()
            self._names, self._ends = list(rows), list(accumulate(_count(rows[n]) for n in rows))
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a sample.

        Raises `IndexError` behind the last one, and `SpecError` if a shard is compressed.
        """
        self._require_plain()
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number}: expected a number below {len(self)}")
        place = bisect_right(self._ends, number)
        first = self._ends[place - 1] if place else 0
        sample: dict[str, Any] = next(self.open(self._names[place], number - first))[0]
        return sample

    def shards(self) -> Sequence[str]:
        """Return the names of the files with their sizes and numbers of samples.

        Raises `OSError` if a file is missing, and `SpecError` if one has another size than the
        index says, or is compressed in a way that nothing here unpacks.
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
        with self._open_file(row) as file:
            head = np.frombuffer(file.read(4 * (count + 2)), _NUMBER).astype(np.int64)
            is_whole = len(head) == count + 2 and head[0] == count
            if not is_whole or head[-1] != row[_RAW]["bytes"] or (np.diff(head[1:]) < 0).any():
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

    def _path(self, row: Mapping[str, Any], kind: str = _RAW) -> str:
        return f"{self._folder}/{row[kind]['basename']}"

    def _is_packed(self, row: Mapping[str, Any]) -> bool:
        """Return True if a shard exists only compressed."""
        if not row.get(_PACKED):
            return False
        try:
            size_of(self._path(row))
        except FileNotFoundError:
            return True
        return False

    def _require_plain(self) -> None:
        if self._is_plain:
            return
        for row in self._index().values():
            if self._is_packed(row):
                raise SpecError(
                    f"the shard {self._path(row, _PACKED)} is compressed, so each sample in the "
                    "order of a sampler would unpack a whole shard; give MdsShards to "
                    "session.stream, or put decompressed shards beside the compressed ones"
                )
        self._is_plain = True

    def _open_file(self, row: Mapping[str, Any]) -> IO[bytes]:
        size = int(row[_RAW]["bytes"])
        if not self._is_packed(row):
            return open_shard(self._path(row), size)
        return open_packed(self._path(row, _PACKED), row[_PACKED], row["compression"], size)

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
        kind = _PACKED if self._is_packed(row) else _RAW
        path, expected = self._path(row, kind), row[kind]["bytes"]
        if kind == _PACKED:
            check_format(path, row["compression"])
        if (found := size_of(path)) != expected:
            raise SpecError(
                f"the shard {path} has {found} bytes, and index.json says {expected}; copy or "
                "write it again"
            )


def _name_of(path: str, row: Mapping[str, Any]) -> str:
    """Return the name of a shard from its row of the index at `path`. Raises `SpecError`."""
    file, size = str(row[_RAW]["basename"]), int(row[_RAW]["bytes"])
    files = [file, *([str(row[_PACKED]["basename"])] if row.get(_PACKED) else [])]
    if (row["format"], row["version"]) != ("mds", 2):
        raise SpecError(
            f"{path} names a shard of format {row['format']} {row['version']}; expected mds 2"
        )
    for each in files:
        if each.startswith("/") or ".." in each.split("/"):
            raise SpecError(f"{path} names {each!r}; expected a file of its folder")
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


def check_format(path: str, compression: str) -> None:
    """Raise `SpecError` if nothing here unpacks a format, such as `zstd` or `zstd:7`."""
    kind = _kind_of(compression)
    if kind not in _FORMATS:
        raise SpecError(
            f"the shard {path} is compressed with {compression}; expected one of "
            f"{', '.join(sorted(_FORMATS))}; {_WAY_OUT}"
        )
    if _FORMATS[kind] and find_spec("pyarrow") is None:
        raise SpecError(
            f"the shard {path} is compressed with {compression}, which pyarrow unpacks; install "
            f"pyarrow, or {_WAY_OUT}"
        )


def open_packed(path: str, row: Mapping[str, Any], compression: str, size: int) -> IO[bytes]:
    """Return the content of a compressed file, `size` bytes in memory.

    `row` has the file's `bytes` and maybe its `hashes`. Raises `SpecError` if the file is damaged,
    or has another size packed or unpacked.
    """
    check_format(path, compression)
    with open_shard(path, int(row["bytes"])) as file:
        packed = file.read()
    try:
        _check_hashes(packed, row.get("hashes") or {})
        found = _unpack(packed, _kind_of(compression), size)
    except _UNREADABLE as error:
        raise SpecError(
            f"the shard {path} is damaged and cannot be unpacked: {error}; copy or write it again"
        ) from error
    return BytesIO(found)


def _check_hashes(packed: bytes, hashes: Mapping[str, str]) -> None:
    """Raise `ValueError` for another content. Snappy has no checksum of its own."""
    for kind, expected in hashes.items():
        if kind in hashlib.algorithms_guaranteed and "shake" not in kind:
            found = hashlib.new(kind, packed, usedforsecurity=False).hexdigest()
            if found != expected:
                raise ValueError(f"its {kind} is {found}, and index.json says {expected}")


def _unpack(packed: bytes, kind: str, size: int) -> bytes:
    """Return `size` bytes. Never makes many more, whatever `packed` is."""
    if kind == _SNAPPY:
        return _unpack_snappy(packed, size)
    # One byte more, so that the end is read and checked.
    with _stream_of(packed, kind) as stream:
        found: bytes = stream.read(size + 1)
    if len(found) != size:
        raise ValueError(f"it has {len(found)} bytes or more; expected {size}")
    return found


def _unpack_snappy(packed: bytes, size: int) -> bytes:
    # It begins with its length, seven bits a byte. pyarrow does not compare that with `size`.
    length = 0
    for place, byte in enumerate(packed[:5]):
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    if length != size:
        raise ValueError(f"it has {length} bytes; expected {size}")
    pyarrow = import_module("pyarrow")
    found: bytes = pyarrow.decompress(packed, size, _SNAPPY, asbytes=True)
    return found


def _stream_of(packed: bytes, kind: str) -> Any:
    if kind == "gz":
        return gzip.GzipFile(fileobj=BytesIO(packed))
    if kind == "bz2":
        return bz2.BZ2File(BytesIO(packed))
    pyarrow = import_module("pyarrow")
    return pyarrow.input_stream(BytesIO(packed), compression=_FORMATS[kind])


def _kind_of(compression: str) -> str:
    return str(compression).partition(":")[0]
