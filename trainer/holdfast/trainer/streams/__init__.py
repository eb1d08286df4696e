"""Streams: samples of numbered shards that resume exactly, at any number of ranks.

A module belongs here if it concerns data without an index: sources of shards, their division over
ranks and loader workers, and the loader of `Session.stream`. What decides the samples of a dataset
with an index belongs in `data`.

`division` is pure: which lane of which rank reads which shards, and how the last samples of an
epoch are shared. `lanes` reads one lane, in the loader's worker. `loader` runs in the rank: it
starts workers, counts what it delivered, and agrees with the other ranks when a division ends.
`source` has the interface of a source, and opens files of shards, whose formats `tar` and `mds`
read. `convert` adapts what the packages `datasets`, `webdataset` and `torchdata` have, and gives a
source to a framework's loader. `mosaic` continues a `StreamingDataset` in its own order.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.trainer.streams.convert import NodeShards, StreamDataset
    from holdfast.trainer.streams.loader import StreamLoader
    from holdfast.trainer.streams.mds import MdsShards
    from holdfast.trainer.streams.mosaic import StreamingLoader
    from holdfast.trainer.streams.source import Counted, Source, TextLines
    from holdfast.trainer.streams.tar import TarShards

_MODULES = {
    "Counted": "source",
    "MdsShards": "mds",
    "NodeShards": "convert",
    "Source": "source",
    "StreamDataset": "convert",
    "StreamLoader": "loader",
    "StreamingLoader": "mosaic",
    "TarShards": "tar",
    "TextLines": "source",
}
__all__ = [
    "Counted",
    "MdsShards",
    "NodeShards",
    "Source",
    "StreamDataset",
    "StreamLoader",
    "StreamingLoader",
    "TarShards",
    "TextLines",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"holdfast.trainer.streams.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
