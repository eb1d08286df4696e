"""Loading through stock DCP: for custom planners, and for entries that DCP transformed.

Everything that stock DCP reads is checked first: the files against the manifest, and the entries by
a reader that accepts only plain values and tensors, so that no entry runs code or exhausts memory.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import IO, Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageReaderTransforms
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.futures import Future

from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError
from holdfast.contracts.manifest import find_damage
from holdfast.trainer.loading.plain_load import repack
from holdfast.trainer.planning.metadata import Opened

# The limit for a number, a list of numbers, and the overhead of a zip.
VALUE_BYTES_MAX: Final = 64 << 20


class HoldfastReader(FileSystemReader):
    """Stock DCP's reader with metadata that was already read and checked."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata
        self.keys_read: frozenset[str] = frozenset()
        self.transforms = _CheckedEntries(metadata)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata given at construction."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan`. Entries that are not plain values are refused."""
        self.keys_read = frozenset(item.storage_index.fqn for item in plan.items)
        return super().read_data(plan, planner)


class _CheckedEntries(_StorageReaderTransforms):
    """Decompresses every entry and checks it before stock DCP opens it."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
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
    group: dist.ProcessGroup | None,
    planner: LoadPlanner | None,
) -> frozenset[str]:
    """Load `state` in place with `torch.distributed.checkpoint.load`. Return the saved keys read.

    The files must have been checked before. Raises `CheckpointError` on all ranks if stock DCP
    fails.
    """
    reader = HoldfastReader(opened.directory, opened.metadata)
    try:
        with warnings.catch_warnings():
            # Stock DCP warns about a load without a process group, which is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_with_dcp(
                state,
                storage_reader=reader,
                planner=planner or DefaultLoadPlanner(allow_partial_load=True),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        reasons = "; ".join(f"rank {r}: {e[0]}" for r, e in sorted(error.failures.items()))
        raise CheckpointError(
            f"{opened.directory}: not loaded: {reasons}; `holdfast verify` shows whether files "
            "are damaged"
        ) from error
    return reader.keys_read


def check_share(opened: Opened, group: dist.ProcessGroup | None) -> list[str]:
    """Return the damage in this rank's share of the files. Each rank checks other files."""
    if opened.manifest is None:
        return []
    rank = dist.get_rank(group) if group is not None else 0
    size = dist.get_world_size(group) if group is not None else 1
    share = opened.manifest.model_copy(update={"files": opened.manifest.files[rank::size]})
    return find_damage(opened.directory, share)
