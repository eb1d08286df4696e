"""The records of a `.metadata`, as opcodes: what is written for one box and for one entry.

Both sides need them: `planning.metadata_pickle` fills in the numbers of a plan, `column_reader`
compares a file with them and takes the numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.trainer.format.opcodes import (
    APPEND,
    BUILD,
    EMPTY_LIST,
    EMPTY_TUPLE,
    FALSE,
    MARK,
    NEWOBJ,
    NONE,
    REDUCE,
    SETITEM,
    SETITEMS,
    TUPLE,
    TUPLE1,
    Memo,
    RecordTemplate,
    text,
)

_DCP: Final = "torch.distributed.checkpoint.metadata"
_FILES: Final = "torch.distributed.checkpoint.filesystem"
CLASSES: Final = {
    "Metadata": _DCP,
    "TensorStorageMetadata": _DCP,
    "TensorProperties": _DCP,
    "ChunkStorageMetadata": _DCP,
    "BytesStorageMetadata": _DCP,
    "MetadataIndex": _DCP,
    "_MEM_FORMAT_ENCODING": _DCP,
    "_StorageInfo": _FILES,
    "Size": "torch",
    "_get_layout": "torch.serialization",
}
ATTRIBUTES: Final = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")
# Stands for a number (no tensor) where a number of dimensions is expected.
NUMBER: Final = -1


def add_chunk(record: RecordTemplate, memo: Memo, largest: Sequence[int]) -> None:
    """Add one box in the list `chunks`. `largest` is the maximum per dimension."""
    record.add(*memo.new("ChunkStorageMetadata"), MARK, memo.get("offsets"))
    _add_size(record, memo, largest)
    record.add(memo.get("sizes"))
    _add_size(record, memo, largest)
    record.add(SETITEMS, BUILD, APPEND)


def add_place(
    record: RecordTemplate,
    memo: Memo,
    largest: Sequence[int] | None,
    nth: int,
    file_bytes: int,
    entry_bytes: int,
) -> None:
    """Add one box in `storage_data`. `largest` is None for a number; the others are maxima."""
    record.add(*memo.new("MetadataIndex"), MARK, memo.get("fqn"))
    record.fetch()
    record.add(memo.get("index"))
    if largest is None:
        record.add(NONE)
    else:
        record.integer(nth)
        record.add(memo.get("offset"))
        _add_size(record, memo, largest)
    record.add(SETITEMS, BUILD)
    record.add(*memo.new("_StorageInfo"), MARK, memo.get("relative_path"))
    record.fetch()
    record.add(memo.get("offset"))
    record.integer(file_bytes)
    record.add(memo.get("length"))
    record.integer(entry_bytes)
    record.add(SETITEMS, BUILD, SETITEM)


def _add_size(record: RecordTemplate, memo: Memo, largest: Sequence[int]) -> None:
    """Add a `torch.Size` of each record's numbers. `largest` is the maximum per dimension."""
    record.add(memo.get("Size"), MARK)
    for extent in largest:
        record.integer(extent)
    record.add(TUPLE, TUPLE1, REDUCE)


def number_entry(memo: Memo) -> bytes:
    """Return what follows the key of a number in `state_dict_metadata`."""
    return b"".join([*memo.new("BytesStorageMetadata", state=False), SETITEM])


def tensor_entry(memo: Memo) -> tuple[bytes, bytes, bytes]:
    """Return what stands around the dtype and the shape of a tensor in `state_dict_metadata`."""
    before = [
        *(*memo.new("TensorStorageMetadata"), MARK, text("properties")),
        *(memo.get("TensorProperties"), EMPTY_TUPLE, NEWOBJ, MARK, b"ctorch\n"),
    ]
    between = [
        *(b"\n", memo.get("_get_layout"), text("torch.strided"), TUPLE1, REDUCE, FALSE),
        *(memo.get("_MEM_FORMAT_ENCODING"), b"K\x00", TUPLE1, REDUCE, FALSE, TUPLE, BUILD),
        *(text("size"), memo.get("Size"), MARK),
    ]
    after = [TUPLE, TUPLE1, REDUCE, text("chunks"), EMPTY_LIST]
    return b"".join(before), b"".join(between), b"".join(after)
