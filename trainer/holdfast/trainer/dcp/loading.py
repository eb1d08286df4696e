"""`load`, with the parameters of stock DCP's.

Tensors and values that fit what was saved are read by Holdfast's reader, each byte once per node
and checked against the manifest on the way. Whatever does not fit, and every custom planner, is
left to stock DCP's planner. It decides and raises as always, and gets only bytes
that were checked before. No entry runs code.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.checkpoint.utils import _api_bc_check

from holdfast.contracts.disk.filesystems import is_there
from holdfast.contracts.disk.paths import MANIFEST, METADATA
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.trainer.dcp.channel import DcpLoadError, choose_group, describe, portable
from holdfast.trainer.dcp.delegation import directory_of_load, extensions_of, target_of, warn
from holdfast.trainer.dcp.record import RECORD
from holdfast.trainer.dcp.state import SaveForm, State, call_stateful, form_of, loadable
from holdfast.trainer.format.metadata import Opened, open_checkpoint
from holdfast.trainer.loading.reader import load_state
from holdfast.trainer.loading.stock import HoldfastReader, check_share, needs_stock
from holdfast.trainer.placed import finish
from holdfast.trainer.ranks.collective import attempt, tree_over
from holdfast.trainer.ranks.rank_tree import RankTree


@_api_bc_check  # type: ignore[untyped-decorator]
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load the directory `checkpoint_id` into `state_dict`, in place.

    All ranks of `process_group` call this together, as for `torch.distributed.checkpoint.load`. It
    loads checkpoints of `dcp.save`, of a `Session` and of stock DCP, at any world size.

    Raises `DcpLoadError`, or stock DCP's `CheckpointException`, on all ranks if something does not
    fit or is missing. Raises `DamagedCheckpointError` on all ranks if bytes differ from the
    manifest, or if an entry could only be opened by running code.
    """
    directory = directory_of_load(checkpoint_id, storage_reader)
    if isinstance(directory, str):
        if directory:
            warn("load", directory)
        stock_load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
        return
    group = choose_group(process_group, no_dist=no_dist)
    with tree_over(group) as tree:
        # A link may be moved to another checkpoint meanwhile, so the first rank follows it for all.
        given, target = tree.gather_all((directory, target_of(directory)))[0]
        directory = target if directory == given else target_of(directory)
        opened = _open(directory, tree)
        live = {key: state_dict[key] for key in sorted(state_dict)}
        state = call_stateful(live)
        if not _load_fitting(opened, state, planner, tree):
            reader = HoldfastReader(directory, opened.metadata, extensions_of(storage_reader))
            _load_by_planner(opened, state, reader, planner, group, tree)
    for key, value in live.items():
        if isinstance(value, Stateful):
            value.load_state_dict(state[key])
        else:
            state_dict[key] = state[key]
    RECORD.loaded(directory, opened.manifest, is_root=tree.index == 0)


def _open(directory: Path, tree: RankTree) -> Opened:
    """Open the checkpoint on all ranks, after the first rank has completed a save that was cut off.

    Raises `DcpLoadError` on all ranks if there is none.
    """

    def complete() -> None:
        # One rank only: the renames of a move must happen once. The others wait in `_together`.
        if tree.index == 0:
            finish(directory)

    _together(tree, complete)

    def open_it() -> Opened:
        if not is_there(directory / METADATA) and not is_there(directory / MANIFEST):
            raise FileNotFoundError(_why_nothing(directory))
        return open_checkpoint(directory)

    opened: Opened = _together(tree, open_it)
    return opened


def _why_nothing(directory: Path) -> str:
    if any(directory.glob(f"__*{METADATA}")):
        return (
            f"{directory}: each rank saved its own metadata (use_collectives=False), which only "
            "torch.distributed.checkpoint.load reads"
        )
    return (
        f"{directory}: no checkpoint is here: no {METADATA}. If a save was cut off, load an "
        "earlier checkpoint"
    )


def _together(tree: RankTree, act: Any) -> Any:
    """Return the result of `act` on this rank, or raise on all ranks if it failed on one."""
    value, error = attempt(act)
    found = tree.gather_all((portable(error), isinstance(error, DamagedCheckpointError)))
    failures = {rank: problem for rank, (problem, _) in enumerate(found) if problem is not None}
    if not failures:
        return value
    # The type counts: a program falls back to another checkpoint only on damage.
    if isinstance(error, DamagedCheckpointError):
        raise error
    if any(is_damage for _, is_damage in found):
        raise DamagedCheckpointError(describe(failures), damaged=[describe(failures)]) from error
    raise DcpLoadError(f"nothing was loaded: {describe(failures)}", failures) from error


def _load_fitting(
    opened: Opened, state: State, planner: LoadPlanner | None, tree: RankTree
) -> bool:
    """Load by Holdfast's reader if everything fits on all ranks. Return False if it does not."""
    # Every rank must take the same way, because each way has its own collectives.
    found, _ = attempt(lambda: _fitting(opened, state, planner, is_coordinator=tree.index == 0))
    if not all(tree.gather_all(found is not None)):
        return False
    assert found is not None
    targets, paths = found
    load_state(opened, targets, group=tree, strict=False)
    flat = flatten_state_dict(targets)[0]
    for key, path in paths.items():
        set_element(state, path, flat[key])
    return True


def _fitting(
    opened: Opened, state: State, planner: LoadPlanner | None, *, is_coordinator: bool
) -> tuple[State, dict[str, Any]] | None:
    """Return what to load into and the paths of the values, or None if something does not fit.

    A value's place in the first is empty. It takes the place of the one at its path in `state`.
    """
    if not _is_default(planner) or needs_stock(opened.metadata):
        return None
    # A program may ask its planner what was loaded. This also allocates tensors on `meta`.
    planner = planner or DefaultLoadPlanner()
    planner.set_up_planner(state, opened.metadata, is_coordinator)
    if form_of(state) is not SaveForm.ENGINE:
        return None
    saved = opened.metadata.state_dict_metadata
    flat, paths = flatten_state_dict(state)
    is_partial = isinstance(planner, DefaultLoadPlanner) and planner.allow_partial_load
    if not is_partial and flat.keys() - saved.keys():
        return None
    for key, value in flat.items():
        entry = saved.get(key)
        is_tensor = isinstance(value, torch.Tensor)
        if entry is not None and is_tensor != isinstance(entry, TensorStorageMetadata):
            return None
        if isinstance(entry, TensorStorageMetadata) and entry.size != value.size():
            return None
    values = {
        key: path
        for key, path in paths.items()
        if key in saved and not isinstance(flat[key], torch.Tensor)
    }
    return loadable(state), values


def _is_default(planner: LoadPlanner | None) -> bool:
    """Return True for stock DCP's default planner in the form that Holdfast's reader follows."""
    if planner is None:
        return True
    if type(planner) is not DefaultLoadPlanner:
        return False
    return planner.flatten_state_dict and planner.flatten_sharded_tensors


def _load_by_planner(
    opened: Opened,
    state: State,
    reader: StorageReader,
    planner: LoadPlanner | None,
    group: dist.ProcessGroup | None,
    tree: RankTree,
) -> None:
    """Load with stock DCP, after the files were compared with the manifest."""
    # Before stock DCP reads, because its planner verifies nothing.
    problems = [line for lines in tree.gather_all(check_share(opened, tree)) for line in lines]
    if problems:
        raise DamagedCheckpointError(
            f"{opened.directory}: {'; '.join(problems)}; do not use this checkpoint. Load another "
            "one, or restore the files from a copy",
            damaged=problems,
        )
    with warnings.catch_warnings():
        # Stock DCP warns about a load without a process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        stock_load(
            state,
            storage_reader=reader,
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )
