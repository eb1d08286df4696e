"""Loading through stock DCP: for custom planners, and for entries that DCP transformed.

Everything that stock DCP reads is checked first: the files against the manifest, and the entries by
a reader that accepts only plain values and tensors, so that no entry runs code or exhausts memory.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.futures import Future

from holdfast.contracts.disk.damage import describe_problems, find_problems
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError
from holdfast.trainer.format.metadata import Opened
from holdfast.trainer.format.plain_load import repack
from holdfast.trainer.ranks.collective import TIMEOUT, Group
from holdfast.trainer.ranks.rank_tree import RankTree

# The limit for a number, a list of numbers, and the overhead of a zip.
VALUE_BYTES_MAX: Final = 64 << 20


class HoldfastReader(FileSystemReader):
    """Stock DCP's reader with metadata that was already read and checked.

    `extensions` undo transformations of the entries. Without it, these are the ones of stock DCP.
    """

    def __init__(
        self, directory: Path, metadata: Metadata, extensions: ExtensionRegistry | None = None
    ) -> None:
        super().__init__(directory)
        self._metadata = metadata
        self.keys_read: frozenset[str] = frozenset()
        self.transforms = _CheckedEntries(metadata, extensions)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan`. Entries that are not plain values are refused."""
        self.keys_read = frozenset(item.storage_index.fqn for item in plan.items)
        return super().read_data(plan, planner)


class _CheckedEntries(_StorageReaderTransforms):
    """Decompresses every entry and checks it before stock DCP opens it."""

    def __init__(self, metadata: Metadata, extensions: ExtensionRegistry | None) -> None:
        super().__init__(extensions)
        self._entries = metadata.state_dict_metadata

    def transform_load_stream(
        self, read_item: ReadItem, transform_descriptors: Sequence[str], raw_stream: IO[bytes]
    ) -> IO[bytes]:
        """Return the entry without code. Raises `DamagedCheckpointError` if it contains code."""
        stream = super().transform_load_stream(read_item, transform_descriptors, raw_stream)
        most = self._bytes_max(read_item.storage_index.fqn)
        content = bytes(stream.read(most + 1))
        if len(content) > most:
            raise DamagedCheckpointError(
                f"{read_item.storage_index.fqn}: its entry has more than {most} bytes; load "
                "another checkpoint",
                damaged=[f"{read_item.storage_index.fqn}: more than {most} bytes"],
            )
        return io.BytesIO(repack(content))

    def _bytes_max(self, key: str) -> int:
        """Return the size limit of an entry: its largest chunk plus the zip's overhead."""
        entry = self._entries[key]
        if not isinstance(entry, TensorStorageMetadata):
            return VALUE_BYTES_MAX
        largest = max((prod(chunk.sizes) for chunk in entry.chunks), default=0)
        return VALUE_BYTES_MAX + largest * entry.properties.dtype.itemsize


def needs_stock(metadata: Metadata) -> bool:
    """Return True if an entry was compressed or transformed, which only stock DCP can undo."""
    return any(info.transform_descriptors for info in (metadata.storage_data or {}).values())


def load_as_stock(
    opened: Opened,
    state: dict[str, Any],
    group: Group,
    planner: LoadPlanner | None,
) -> frozenset[str]:
    """Load `state` in place with `torch.distributed.checkpoint.load`. Return the saved keys read.

    The files must have been checked before. Raises `CheckpointError` on all ranks if stock DCP
    fails.
    """
    reader = HoldfastReader(opened.directory, opened.metadata)
    try:
        with process_group_of(group) as found, warnings.catch_warnings():
            # Stock DCP warns about a load without a process group, which is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_with_dcp(
                state,
                storage_reader=reader,
                planner=planner or DefaultLoadPlanner(allow_partial_load=True),
                process_group=found,
                no_dist=found is None,
            )
    except CheckpointException as error:
        reasons = "; ".join(f"rank {r}: {e[0]}" for r, e in sorted(error.failures.items()))
        raise CheckpointError(
            f"{opened.directory}: not loaded: {reasons}; `holdfast verify` shows whether files "
            "are damaged"
        ) from error
    return reader.keys_read


@contextlib.contextmanager
def process_group_of(group: Group) -> Iterator[dist.ProcessGroup | None]:
    """Return a process group of the same ranks. One that is made for a tree is destroyed again.

    Only stock DCP needs one. In it, each rank is connected to all others.
    """
    if not isinstance(group, RankTree):
        yield group
        return
    made = dist.new_group(backend="gloo", timeout=TIMEOUT) if group.size > 1 else None
    try:
        yield made
    finally:
        if made is not None:
            dist.destroy_process_group(made)


def check_share(opened: Opened, tree: RankTree) -> list[str]:
    """Return the damage in this rank's share of the files. Each rank checks other files."""
    if opened.manifest is None:
        return []
    found = find_problems(opened.directory, opened.manifest, share=(tree.index, tree.size))
    return describe_problems(opened.manifest, [found])
