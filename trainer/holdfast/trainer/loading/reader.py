"""Loads a Holdfast or stock DCP checkpoint in place, at any world size and pipeline degree.

Wanted and saved keys are compared first. Then every node reads what its ranks want, each byte once,
verified while it is read. All ranks reach the same verdict at each stage, so that no rank waits in
a collective for a rank that has raised.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner import LoadPlanner

from holdfast.contracts.disk.digests import digest_of
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError
from holdfast.trainer.format.metadata import (
    Opened,
    find_files,
    open_checkpoint,
    open_columns,
    pick_entries,
)
from holdfast.trainer.format.plain_load import load_plain
from holdfast.trainer.loading.node import (
    Address,
    ReadingNode,
    find_home,
    mapped,
    own_window,
    published,
)
from holdfast.trainer.loading.read import Catalogue, Placed, read_wants, sort_by_unit
from holdfast.trainer.loading.stock import check_share, load_as_stock, needs_stock
from holdfast.trainer.loading.targets import Piece, Wants, collect, collect_wholes, place_whole
from holdfast.trainer.planning import compare_keys
from holdfast.trainer.planning.signature import flatten
from holdfast.trainer.process import devices
from holdfast.trainer.process.collector import pause_collection
from holdfast.trainer.ranks import collective
from holdfast.trainer.ranks.rank_tree import RankTree

T = TypeVar("T")


@dataclass(frozen=True)
class LoadReport:
    """The result of a load, by keys. Bytes are those of data files, summed over all ranks.

    `restored` counts this rank's keys. `missing` keys were wanted and not saved, `extra` keys
    saved and not wanted, `excluded` keys left out on purpose. Lines of `renamed` and `converted`
    have the form "old to new".
    """

    restored: int
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    converted: tuple[str, ...] = ()
    bytes_read: int = 0
    bytes_unique: int = 0

    def notes(self) -> tuple[str, ...]:
        """Return lines for people about keys not restored, or changed, without per-rank keys."""
        titled = (
            ("not in the checkpoint", self.missing),
            ("in the checkpoint and not used", self.extra),
            ("excluded", self.excluded),
            ("renamed", self.renamed),
            ("converted", self.converted),
        )
        shown = [
            (title, [key for key in keys if not compare_keys.is_of_one_rank(key)])
            for title, keys in titled
        ]
        return tuple(f"{title}: {compare_keys.shorten(keys)}" for title, keys in shown if keys)


@dataclass(frozen=True)
class _Message:
    """What a rank sends to all others before anything is read: its host and its keys."""

    address: Address
    common: str
    alone: compare_keys.KeyComparison
    keys_alone: tuple[str, ...]


@dataclass(frozen=True)
class _Prepared:
    """What a rank prepared alone. The keys of `opened` are already the wanted names."""

    opened: Opened
    taken: tuple[str, ...]
    renamed: tuple[str, ...]
    common: compare_keys.KeyComparison
    message: _Message
    wants: Wants
    catalogue: Catalogue
    by_unit: dict[int, Placed]

    def only_taken(self) -> Opened:
        """Return the checkpoint reduced to the keys that are loaded."""
        names = {key: key for key in self.taken}
        return replace(self.opened, metadata=pick_entries(self.opened.metadata, names))


def open_together(
    directory: Path, group: collective.Group, manifest: Manifest | None = None
) -> Opened:
    """Open a checkpoint as `open_checkpoint` does. All ranks of `group` call this.

    One rank of each node reads `.metadata` that Holdfast wrote, and shares the columns with the
    others. If any rank finds an error, all ranks raise it.
    """
    with contextlib.ExitStack() as held:
        tree = held.enter_context(collective.tree_over(group))
        homes, rank = tree.gather_all(find_home()), tree.index
        first, is_alone = homes.index(homes[rank]), homes.count(homes[rank]) == 1
        place = (directory, manifest)

        def read() -> tuple[Opened | None, str]:
            nonlocal place
            if manifest is None:
                place = find_files(directory)
            opened = open_columns(*place) if rank == first else None
            if opened is None or is_alone:
                return opened, ""
            found = opened.metadata, opened.boxes
            return opened, held.enter_context(published(found))

        (opened, _), paths = collective.agree(read, tree, lambda found: found[1])
        if paths[first]:
            # The first rank uses the shared memory too, so that the node has one table.
            opened = None

        def take() -> Opened:
            if paths[first]:
                with contextlib.suppress(OSError):
                    metadata, boxes = mapped(paths[first])
                    return Opened(*place, metadata, boxes, is_lean=True)
            return opened or open_checkpoint(*place, is_lean=bool(paths[first]))

        return collective.agree(take, tree, lambda _: None)[0]


def load_state(
    checkpoint: Path | Opened,
    state: dict[str, Any],
    *,
    group: collective.Group,
    strict: bool = True,
    include: str | Collection[str] = (),
    exclude: str | Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    planner: LoadPlanner | None = None,
    knows_names: bool = True,
) -> LoadReport:
    """Load a checkpoint in place into `state`. All ranks of `group` call this together.

    `checkpoint` is a directory, or the result of an earlier open. `include`, `exclude`, `rename`
    and `strict` are those of `Selection`. By default every key is loaded, and both sides must have
    the same keys. Without `knows_names`, names to include or exclude need not fit any key. With a
    custom `planner`, the planner decides what goes where, stock DCP reads,
    and the report has the keys that the planner asked for.

    Raises `KeyMismatchError` on every rank, before any byte is loaded, if shapes differ, if a name
    fits no key or, if strict, keys differ. Raises `DamagedCheckpointError` if bytes differ from the
    manifest; tensors of `state` may then have changed. Raises `CheckpointError` if something cannot
    be loaded.
    """
    if planner is not None and (include or exclude or rename):
        raise CheckpointError(
            "a planner and a selection of keys were given, but a planner selects keys itself. "
            "Leave out include, exclude and rename, or the planner"
        )
    pick = compare_keys.Selection.of(include=include, exclude=exclude, rename=rename, strict=strict)
    directory = checkpoint if isinstance(checkpoint, Path) else checkpoint.directory
    if planner is not None:
        return _load_planned(directory, state, group, planner)
    with contextlib.ExitStack() as held:
        held.enter_context(pause_collection())
        tree = held.enter_context(collective.tree_over(group))
        ready, messages = collective.agree(
            lambda: prepare(checkpoint, state, pick, held.enter_context(own_window())),
            tree,
            lambda ready: ready.message,
        )
        found = _compare_together(ready, pick, messages, tree)
        if knows_names:
            saved = ready.opened.metadata.state_dict_metadata
            pick.check_names({*saved, *found.missing, *found.excluded})
        compare_keys.raise_mismatch(str(directory), found, strict=pick.strict)
        if needs_stock(ready.opened.metadata):
            _raise_damage(directory, tree.gather_all(check_share(ready.opened, tree)))
            load_as_stock(ready.only_taken(), state, group, None)
            bytes_read = bytes_unique = 0
        else:
            node = held.enter_context(ReadingNode.joined(tree, [one.address for one in messages]))
            # Threads copy into the tensors. A kernel that the program queued before must not write
            # to them afterwards, on whichever stream it is.
            devices.synchronize(ready.wants.devices)
            bytes_read, bytes_unique = _load_ranges(ready, state, node, tree)
            if ready.wants.devices:
                devices.release_landings()
    return LoadReport(
        restored=len(ready.taken),
        missing=found.missing,
        extra=found.extra,
        excluded=found.excluded,
        renamed=ready.renamed,
        converted=found.converted,
        bytes_read=bytes_read,
        bytes_unique=bytes_unique,
    )


def _load_planned(
    directory: Path, state: dict[str, Any], group: collective.Group, planner: LoadPlanner
) -> LoadReport:
    """Load with the caller's planner. Only the planner knows which keys are wanted or missing."""
    with collective.tree_over(group) as tree:
        opened, _ = collective.agree(lambda: open_checkpoint(directory), tree, lambda _: None)
        _raise_damage(directory, tree.gather_all(check_share(opened, tree)))
        own = load_as_stock(opened, state, group, planner)
        read = frozenset().union(*tree.gather_all(own))
    extra = opened.metadata.state_dict_metadata.keys() - read
    return LoadReport(restored=len(own), missing=(), extra=tuple(sorted(extra)))


def prepare(
    checkpoint: Path | Opened, state: dict[str, Any], pick: compare_keys.Selection, address: Address
) -> _Prepared:
    """Return what each rank finds alone: the comparison of keys and the wanted bytes."""
    flat = flatten(state)
    opened = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    names = pick.rename_all(opened.metadata.state_dict_metadata)
    renamed = {old: new for old, new in names.items() if old != new}
    if renamed:
        picked = pick_entries(opened.metadata, names)
        opened = replace(opened, metadata=picked, boxes=opened.boxes.renamed(names))
    saved = opened.metadata.state_dict_metadata
    common = compare_keys.compare(_keys(flat, alone=False), _keys(saved, alone=False), pick)
    flat_alone, saved_alone = _keys(flat, alone=True), _keys(saved, alone=True)
    alone = replace(compare_keys.compare(flat_alone, saved_alone, pick), extra=(), excluded=())
    taken = {key: value for key, value in flat.items() if key in saved and pick.takes(key)}
    # With another shape nothing will be read, and the wanted bytes are undefined.
    is_fitting = not common.reshaped and not alone.reshaped
    wants = collect(taken, saved, opened.boxes) if is_fitting else Wants()
    catalogue = Catalogue(opened.boxes.extents, opened.manifest)
    return _Prepared(
        opened=opened,
        taken=tuple(taken),
        renamed=tuple(f"{old} to {new}" for old, new in sorted(renamed.items())),
        common=common,
        message=_Message(
            address=address,
            common=digest_of(repr(common).encode()),
            alone=alone,
            keys_alone=tuple(key for key in flat_alone if pick.takes(key)),
        ),
        wants=wants,
        catalogue=catalogue,
        by_unit=sort_by_unit(wants, catalogue),
    )


def _compare_together(
    ready: _Prepared, pick: compare_keys.Selection, messages: Sequence[_Message], tree: RankTree
) -> compare_keys.KeyComparison:
    """Return one verdict for all ranks. Keys are sent only if the ranks' key sets differ."""
    common = ready.common
    if len({message.common for message in messages}) > 1:
        common = compare_keys.join(tree.gather_all(common))
    alone = compare_keys.join(message.alone for message in messages)
    saved_alone = _keys(ready.opened.metadata.state_dict_metadata, alone=True)
    extra = {key for key in saved_alone if pick.takes(key)}
    extra.difference_update(*(message.keys_alone for message in messages))
    return compare_keys.unite([common, replace(alone, extra=tuple(sorted(extra)))])


def _keys(entries: Mapping[str, T], *, alone: bool) -> dict[str, T]:
    """Return the per-rank entries, or all other entries."""
    return {
        key: value for key, value in entries.items() if compare_keys.is_of_one_rank(key) == alone
    }


def _load_ranges(
    ready: _Prepared, state: dict[str, Any], node: ReadingNode, tree: RankTree
) -> tuple[int, int]:
    """Load every wanted byte. Return (bytes read, bytes wanted), summed over all ranks."""
    read, unique, odd = _read_turn(ready, ready.wants, ready.by_unit, state, node, tree)
    if odd is not None:
        # Entries in an unexpected form are read completely, in a second turn of all ranks.
        again = collect_wholes(odd)
        by_unit = sort_by_unit(again, ready.catalogue)
        read += _read_turn(ready, again, by_unit, state, node, tree)[0]
    return read, unique


def _read_turn(
    ready: _Prepared,
    wants: Wants,
    by_unit: Mapping[int, Placed],
    state: dict[str, Any],
    node: ReadingNode,
    tree: RankTree,
) -> tuple[int, int, list[Piece] | None]:
    """Return (bytes read, bytes wanted) of all ranks, and this rank's pieces in another form.

    The pieces are None if no rank has any. Raises on all ranks what any rank found. Damage is
    raised first, because it may have caused another rank's error.
    """
    directory = ready.opened.directory
    tally = read_wants(directory, ready.catalogue, by_unit, wants.distinct, node)
    odd = [head.piece for head in wants.headers if not head.is_as_expected]
    error = tally.error
    if error is None and not tally.problems:
        _, error = collective.attempt(lambda: _finish(state, wants))
    counts = (tally.bytes_read, tally.bytes_unique, len(odd))
    gathered = tree.gather_all((tally.problems, collective.portable(error), counts))
    _raise_damage(directory, [problems for problems, _, _ in gathered])
    collective.raise_first(error, [one for _, one, _ in gathered])
    sums = (sum(each) for each in zip(*(c for _, _, c in gathered), strict=True))
    read, unique, odd_anywhere = sums
    return read, unique, odd if odd_anywhere else None


def _finish(state: dict[str, Any], wants: Wants) -> None:
    """Put entries that were read completely in place: unusual tensors and group options."""
    paths = flatten_state_dict(dict(state))[1]
    known: dict[bytes, Any] = {}
    for piece, content in wants.wholes:
        place_whole(piece, content)
    for key, content in wants.numbers.items():
        encoded = content.memory.tobytes()
        if encoded not in known:
            known[encoded] = _open_number(key, encoded)
        set_element(state, paths[key], copy.copy(known[encoded]))


def _open_number(key: str, encoded: bytes) -> Any:
    """Return the value of a byte entry. Raises `DamagedCheckpointError` if it needs code."""
    try:
        return load_plain(encoded)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{key}: the entry is not a plain value and is not opened ({error}); leave it out with "
            "exclude, or load it with stock DCP if you trust its author",
            damaged=[f"{key}: not a plain value"],
        ) from error


def _raise_damage(directory: Path, problems: list[list[str]]) -> None:
    damaged = sorted({line for lines in problems for line in lines})
    if damaged:
        raise DamagedCheckpointError(
            f"{directory}: {compare_keys.shorten(damaged)}; do not use this checkpoint. "
            "Load another one, or restore the files from a copy",
            damaged=damaged,
        )
