"""What stock DCP records of one save in `.metadata`: its directory and its id.

`.metadata` is built once for many saves. So this is appended to it: the opcodes replace its `STOP`.
"""

from __future__ import annotations

from typing import Final

from holdfast.trainer.format.opcodes import (
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    MARK,
    NEWOBJ,
    NONE,
    SETITEMS,
    STOP,
    text,
)

# Paths have at most 4096 bytes.
STORAGE_META_BYTES_MAX: Final = 8192
_NAME: Final = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n"
# Before the directory, between it and the id, and after the id.
BEFORE: Final = b"".join(
    [
        *(EMPTY_DICT, MARK, text("storage_meta")),
        *(_NAME, EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK, text("checkpoint_id")),
    ]
)
BETWEEN: Final = text("save_id")
AFTER: Final = b"".join(
    [
        *(text("load_id"), NONE, text("modules"), EMPTY_LIST, SETITEMS, BUILD),
        *(SETITEMS, BUILD, STOP),
    ]
)


def encode_storage_meta(directory: str, save_id: str) -> bytes:
    """Return the opcodes that set `storage_meta` of the metadata before them."""
    return b"".join([BEFORE, text(directory), BETWEEN, text(save_id), AFTER])
