"""Pickles DCP's `Metadata` so that every torch reads it."""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorProperties

from holdfast.trainer.format.metadata_makers import PROPERTIES


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
