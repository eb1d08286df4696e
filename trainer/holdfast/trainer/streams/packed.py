"""Compressed shards, which are unpacked into memory while they are open.

None of these formats can seek, so a resume unpacks each open shard once, whatever its position is.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import zlib
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from typing import IO, Any, Final

from holdfast.contracts.errors import SpecError
from holdfast.trainer.streams.files import open_shard

_SNAPPY: Final = "snappy"
# The names of formats in an index, and those of pyarrow. Python itself reads the first two.
_FORMATS: Final = {"bz2": "", "gz": "", "br": "brotli", _SNAPPY: _SNAPPY, "zstd": "zstd"}
_UNREADABLE: Final = (OSError, EOFError, zlib.error, ValueError)
_WAY_OUT: Final = "write the shards without compression, or put decompressed ones beside them"


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
