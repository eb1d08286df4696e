"""Pickles DCP's `Metadata` so that every torch reads it."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from holdfast.trainer.format.metadata_makers import PROPERTIES
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

# What stock DCP records of one save in `.metadata`: its directory and its id.
#
# `.metadata` is built once for many saves. So this is appended to it: the opcodes replace its
# `STOP`.

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


def dump_metadata(metadata: Metadata) -> bytes:
    """Return the pickle of `metadata`, with the tensor properties that torch 2.14 and older have.

    Their `__setstate__` fails if there are more. Later ones accept the shorter form.
    """
    stream = io.BytesIO()
    _Pickler(stream).dump(metadata)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        """Shorten the state of tensor properties. Everything else is pickled as usual."""
        if type(item) is TensorProperties:
            state: Any = item.__getstate__()  # type: ignore[no-untyped-call]
            new = copyreg.__newobj__  # type: ignore[attr-defined]
            return new, (TensorProperties,), state[:PROPERTIES]
        return NotImplemented
