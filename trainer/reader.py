"""Loading a checkpoint in place: ours or stock DCP's, at any world size.

What is wanted and what is there are compared first, and all ranks reach the same verdict, so
none is left waiting in a collective for one that raised alone.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError, KeyMismatchError
from holdfast.trainer.layout import flatten
from holdfast.trainer.metadata import read_metadata

KEYS_SHOWN: Final = 8
_OF_ONE_RANK = re.compile(r"(?:^|\.)rank\d{5,}(?:\.|$)")


@dataclass(frozen=True)
class LoadReport:
    """What a load did: keys restored, keys wanted but not saved, keys saved but not wanted."""

    restored: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]


@dataclass(frozen=True)
class KeyComparison:
    """How the keys wanted differ from the keys saved; `reshaped` lines say both shapes."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    reshaped: tuple[str, ...]


class HoldfastReader(FileSystemReader):
    """Stock DCP's reader, but for `.metadata`, which was read and checked before."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata
        inside = directory.resolve()
        for info in (metadata.storage_data or {}).values():
            if not (directory / info.relative_path).resolve().is_relative_to(inside):
                raise DamagedCheckpointError(
                    f"{directory}: its .metadata points outside the directory, to "
                    f"{info.relative_path!r}; expected its own files. Load another checkpoint",
                    damaged=[f".metadata: names {info.relative_path!r}"],
                )

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The metadata given at construction."""
        return self._metadata


class HoldfastLoadPlanner(DefaultLoadPlanner):
    """Stock DCP's planner, but byte entries are read with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a byte entry, a number of a parameter group, into the state."""
        key = read_item.dest_index.fqn
        loaded = torch.load(value, weights_only=True)
        set_element(self.original_state_dict, self.mappings[key], loaded)


def is_of_one_rank(key: str) -> bool:
    """True for keys such as `rng.rank00003.cpu`, which one rank alone saves and wants.

    At another world size such keys come and go, so they are reported and never an error.
    """
    return _OF_ONE_RANK.search(key) is not None


def read_keys(directory: Path) -> frozenset[str]:
    """The flattened keys saved in `directory`; raises `DamagedCheckpointError` as loading does."""
    return frozenset(read_metadata(directory).state_dict_metadata)


def load_state(
    directory: Path,
    state: dict[str, Any],
    *,
    group: dist.ProcessGroup | None,
    strict: bool = True,
) -> LoadReport:
    """Load `directory` in place into `state`; all ranks of `group` call it together.

    Raises `KeyMismatchError` on every rank, before a byte is loaded, when shapes differ or, with
    `strict`, when keys do; `DamagedCheckpointError` when `.metadata` cannot be believed, and
    `CheckpointError` when a file cannot be read.
    """
    metadata, flat, problem = _prepare(directory, state)
    problems = [text for text in _all_gather(problem, group) if text]
    if problems:
        raise DamagedCheckpointError(problems[0], damaged=problems)
    assert metadata is not None
    found = _compare_together(metadata, flat, group)
    _raise_mismatch(directory, found, strict)
    try:
        with warnings.catch_warnings():
            # Stock DCP warns of a load without process group, which is what one process wants.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_with_dcp(
                state,
                storage_reader=HoldfastReader(directory, metadata),
                planner=HoldfastLoadPlanner(allow_partial_load=True),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        reasons = "; ".join(f"rank {r}: {e[0]}" for r, e in sorted(error.failures.items()))
        raise CheckpointError(
            f"{directory}: not loaded: {reasons}; `holdfast verify` says whether files are damaged"
        ) from error
    restored = sum(key in metadata.state_dict_metadata for key in flat)
    return LoadReport(restored, found.missing, found.extra)


def compare_keys(wanted: Mapping[str, Any], metadata: Metadata) -> KeyComparison:
    """Compare one rank's flattened state with what was saved; `extra` is by this rank's keys."""
    saved = metadata.state_dict_metadata
    reshaped = []
    for key, value in wanted.items():
        entry = saved.get(key)
        if entry is None:
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor != isinstance(entry, TensorStorageMetadata):
            kinds = ("a tensor", "a number") if is_tensor else ("a number", "a tensor")
            reshaped.append(f"{key}: wanted {kinds[0]}, saved {kinds[1]}")
        elif isinstance(entry, TensorStorageMetadata) and entry.size != value.size():
            reshaped.append(f"{key}: wanted {tuple(value.size())}, saved {tuple(entry.size)}")
    return KeyComparison(
        missing=tuple(sorted(set(wanted) - set(saved))),
        extra=tuple(sorted(set(saved) - set(wanted))),
        reshaped=tuple(sorted(reshaped)),
    )


def _prepare(
    directory: Path, state: dict[str, Any]
) -> tuple[Metadata | None, dict[str, Any], str | None]:
    """What each rank reads alone; an error is returned, for all ranks to raise together."""
    try:
        flat = flatten(state)
        metadata = read_metadata(directory)
        HoldfastReader(directory, metadata)
    except CheckpointError as error:
        return None, {}, str(error)
    return metadata, flat, None


def _compare_together(
    metadata: Metadata, flat: Mapping[str, Any], group: dist.ProcessGroup | None
) -> KeyComparison:
    """One verdict for all ranks. Keys travel only when the ranks' key sets differ."""
    own = compare_keys(flat, metadata)
    shared = sorted(key for key in flat if not is_of_one_rank(key))
    digest = hashlib.sha256("\0".join(shared).encode()).hexdigest()
    one_ranks = sorted(key for key in flat if is_of_one_rank(key))
    told = _all_gather((digest, own.missing, own.reshaped, one_ranks), group)
    wanted = set(flat).union(*(keys for _, _, _, keys in told))
    if len({told_digest for told_digest, *_ in told}) > 1:
        wanted = wanted.union(*_all_gather(shared, group))
    return KeyComparison(
        missing=tuple(sorted({key for _, missing, _, _ in told for key in missing})),
        extra=tuple(sorted(set(metadata.state_dict_metadata) - wanted)),
        reshaped=tuple(sorted({line for _, _, reshaped, _ in told for line in reshaped})),
    )


def _raise_mismatch(directory: Path, found: KeyComparison, strict: bool) -> None:
    missing = [key for key in found.missing if not is_of_one_rank(key)]
    extra = [key for key in found.extra if not is_of_one_rank(key)]
    if not found.reshaped and not (strict and (missing or extra)):
        return
    parts = [
        f"{title}: {_shorten(keys)}"
        for title, keys in (
            ("wanted but not saved", missing),
            ("saved but not wanted", extra),
            ("of another shape", found.reshaped),
        )
        if keys
    ]
    raise KeyMismatchError(
        f"{directory} does not fit this program's state. {'. '.join(parts)}. Load it into the "
        "model and optimizer that saved it, or pass strict=False to take only what is in both",
        missing=missing,
        extra=extra,
        reshaped=found.reshaped,
    )


def _shorten(keys: Collection[str]) -> str:
    shown = ", ".join(list(keys)[:KEYS_SHOWN])
    return shown + (f" and {len(keys) - KEYS_SHOWN} more" if len(keys) > KEYS_SHOWN else "")


def _all_gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered
