"""Loading through stock DCP: for planners of the caller's own, and for entries it transformed.

What stock DCP reads is looked at before: the files by the manifest, and entries by a reader that
lets plain values and tensors pass, so that none of them runs code or fills the memory.
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

# A zip's own parts, a number, or a list of such.
VALUE_BYTES_MAX: Final = 64 << 20


class HoldfastReader(FileSystemReader):
    """Stock DCP's reader over metadata that was read and checked before."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata
        self.keys_read: frozenset[str] = frozenset()
        self.transforms = _CheckedEntries(metadata)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata given at construction."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` says; entries are refused unless they are plain values."""
        self.keys_read = frozenset(item.storage_index.fqn for item in plan.items)
        return super().read_data(plan, planner)


class _CheckedEntries(_StorageReaderTransforms):
    """Every entry, after whatever undoes its compression, looked at before stock DCP opens it."""

    def __init__(self, metadata: Metadata) -> None:
        super().__init__()
        self._entries = metadata.state_dict_metadata

    def transform_load_stream(
        self, read_item: ReadItem, transform_descriptors: Sequence[str], raw_stream: IO[bytes]
    ) -> IO[bytes]:
        """The entry as one that runs no code; `DamagedCheckpointError` for one that would."""
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
        """What an entry may have at most: its largest chunk, and what a zip has beside that."""
        entry = self._entries[key]
        if not isinstance(entry, TensorStorageMetadata):
            return VALUE_BYTES_MAX
        largest = max((prod(chunk.sizes) for chunk in entry.chunks), default=0)
        return VALUE_BYTES_MAX + largest * entry.properties.dtype.itemsize


def needs_stock(metadata: Metadata) -> bool:
    """True when an entry was compressed or otherwise transformed, which only stock DCP undoes."""
    return any(info.transform_descriptors for info in (metadata.storage_data or {}).values())


def load_as_stock(
    opened: Opened,
    state: dict[str, Any],
    group: dist.ProcessGroup | None,
    planner: LoadPlanner | None,
) -> frozenset[str]:
    """Load `state` in place as `torch.distributed.checkpoint.load` does; the saved keys read.

    The files must have been checked before. Raises `CheckpointError` on all ranks when stock
    DCP fails.
    """
    reader = HoldfastReader(opened.directory, opened.metadata)
    try:
        with warnings.catch_warnings():
            # Stock DCP warns of a load without process group, which is what one process wants.
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
            f"{opened.directory}: not loaded: {reasons}; `holdfast verify` says whether files "
            "are damaged"
        ) from error
    return reader.keys_read


def check_share(opened: Opened, group: dist.ProcessGroup | None) -> list[str]:
    """Damage in this rank's share of the files; every rank looks at others of them."""
    if opened.manifest is None:
        return []
    rank = dist.get_rank(group) if group is not None else 0
    size = dist.get_world_size(group) if group is not None else 1
    share = opened.manifest.model_copy(update={"files": opened.manifest.files[rank::size]})
    return find_damage(opened.directory, share)
