"""Loading a checkpoint in place: ours or stock DCP's, at any world size and pipeline degree.

What is wanted and what is there are compared first; then every node reads what its ranks want,
each byte once, checked on the way. All ranks reach the same verdict at each turn, so that none
is left waiting in a collective for one that raised alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner import LoadPlanner

from holdfast.contracts.digests import digest_of
from holdfast.contracts.errors import (
    CheckpointError,
    DamagedCheckpointError,
    HoldfastError,
    KeyMismatchError,
)
from holdfast.trainer.loading.compare_keys import (
    KeyComparison,
    Selection,
    combine,
    compare,
    is_of_one_rank,
    join,
    raise_mismatch,
    shorten,
)
from holdfast.trainer.loading.node import Node, gather
from holdfast.trainer.loading.plain_load import load_plain
from holdfast.trainer.loading.read import Catalogue, Tally, read_wants
from holdfast.trainer.loading.stock import check_share, load_as_stock, needs_stock
from holdfast.trainer.loading.targets import Wants, collect, collect_wholes, place_whole
from holdfast.trainer.planning.layout import flatten
from holdfast.trainer.planning.metadata import (
    Opened,
    extents_of,
    open_checkpoint,
    pick_entries,
    read_metadata,
)

T = TypeVar("T")
_KINDS: Final[dict[str, Callable[..., CheckpointError]]] = {
    kind.__name__: kind for kind in (DamagedCheckpointError, KeyMismatchError)
}


@dataclass(frozen=True)
class LoadReport:
    """What a load did, in keys; the bytes are those of data files, read and wanted by all ranks.

    `restored` counts this rank's keys; `missing` were wanted and not saved, `extra` saved and
    not wanted, `excluded` left out on purpose. `renamed` and `converted` say from what to what.
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
        """For people: what was not restored, or not as it was, by name; keys of one rank aside."""
        titled = (
            ("not in the checkpoint", self.missing),
            ("in the checkpoint and not used", self.extra),
            ("left out", self.excluded),
            ("renamed", self.renamed),
            ("converted", self.converted),
        )
        said = [(title, [key for key in keys if not is_of_one_rank(key)]) for title, keys in titled]
        return tuple(f"{title}: {shorten(keys)}" for title, keys in said if keys)


@dataclass
class _Prepared:
    """What a rank made ready alone; keys of `opened` are the wanted names already."""

    opened: Opened
    pick: Selection
    flat: dict[str, Any]
    renamed: tuple[str, ...]
    wants: Wants = field(default_factory=Wants)

    def taken(self) -> list[str]:
        """The keys that are both wanted and there."""
        saved = self.opened.metadata.state_dict_metadata
        return [key for key in self.flat if key in saved and self.pick.takes(key)]

    def collect(self) -> Wants:
        """Find the byte ranges of all that is taken; raises as `targets.collect` does."""
        self.wants = collect({key: self.flat[key] for key in self.taken()}, self.opened.metadata)
        return self.wants

    def only_taken(self) -> Opened:
        """The checkpoint as if it had nothing but what is taken."""
        names = {key: key for key in self.taken()}
        return replace(self.opened, metadata=pick_entries(self.opened.metadata, names))


def read_keys(directory: Path) -> frozenset[str]:
    """The flattened keys saved in `directory`; raises `DamagedCheckpointError` as loading does."""
    return frozenset(read_metadata(directory).state_dict_metadata)


def load_state(
    directory: Path,
    state: dict[str, Any],
    *,
    group: dist.ProcessGroup | None,
    strict: bool = True,
    include: Collection[str] = (),
    exclude: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    planner: LoadPlanner | None = None,
) -> LoadReport:
    """Load `directory` in place into `state`; all ranks of `group` call it together.

    `include`, `exclude`, `rename` and `strict` are those of `Selection`; by default everything
    is taken, and both sides must have the same keys. With a `planner` of the caller's own, that
    decides what goes where, stock DCP reads, and the report has the keys that it asked for.
    Raises `KeyMismatchError` on every rank, before a byte is loaded, when shapes differ or, if
    strict, when keys do; `DamagedCheckpointError` when bytes are not the manifest's, by which
    time tensors of `state` may have changed; `CheckpointError` for what cannot be loaded.
    """
    if planner is not None and (include or exclude or rename):
        raise CheckpointError(
            "a planner and a choice of keys were given; a planner decides on keys by itself. "
            "Leave include, exclude and rename out, or the planner"
        )
    pick = Selection(tuple(include), tuple(exclude), dict(rename or {}), strict)
    if planner is not None:
        return _load_planned(directory, state, group, planner)
    ready = _agree(_attempt(lambda: _prepare(directory, state, pick)), group)
    found = _compare_together(ready, pick, group)
    raise_mismatch(str(directory), found, strict=pick.strict)
    _agree(_attempt(ready.collect), group)
    if needs_stock(ready.opened.metadata):
        _raise_damage(directory, gather(group, check_share(ready.opened, group)))
        load_as_stock(ready.only_taken(), state, group, None)
        bytes_read = bytes_unique = 0
    else:
        bytes_read, bytes_unique = _load_ranges(ready, state, group)
    return LoadReport(
        restored=len(ready.taken()),
        missing=found.missing,
        extra=found.extra,
        excluded=found.excluded,
        renamed=ready.renamed,
        converted=found.converted,
        bytes_read=bytes_read,
        bytes_unique=bytes_unique,
    )


def _load_planned(
    directory: Path, state: dict[str, Any], group: dist.ProcessGroup | None, planner: LoadPlanner
) -> LoadReport:
    """Load as the caller's planner says, which alone knows what is wanted and what is missing."""
    opened = _agree(_attempt(lambda: open_checkpoint(directory)), group)
    _raise_damage(directory, gather(group, check_share(opened, group)))
    own = load_as_stock(opened, state, group, planner)
    read = frozenset().union(*gather(group, own))
    extra = opened.metadata.state_dict_metadata.keys() - read
    return LoadReport(restored=len(own), missing=(), extra=tuple(sorted(extra)))


def _prepare(directory: Path, state: dict[str, Any], pick: Selection) -> _Prepared:
    """What each rank reads and flattens alone."""
    flat = flatten(state)
    opened = open_checkpoint(directory)
    names = pick.rename_all(opened.metadata.state_dict_metadata)
    renamed = {old: new for old, new in names.items() if old != new}
    if renamed:
        opened = replace(opened, metadata=pick_entries(opened.metadata, names))
    lines = tuple(f"{old} to {new}" for old, new in sorted(renamed.items()))
    return _Prepared(opened, pick, flat, lines)


def _compare_together(
    ready: _Prepared, pick: Selection, group: dist.ProcessGroup | None
) -> KeyComparison:
    """One verdict for all ranks. Keys travel only when the ranks' key sets differ."""
    saved = ready.opened.metadata.state_dict_metadata
    own = compare(_keys(ready.flat, alone=False), _keys(saved, alone=False), pick)
    flat_alone, saved_alone = _keys(ready.flat, alone=True), _keys(saved, alone=True)
    alone = replace(compare(flat_alone, saved_alone, pick), extra=(), excluded=())
    digest = digest_of(repr(own).encode())
    told = gather(group, (digest, alone, [key for key in flat_alone if pick.takes(key)]))
    if len({each for each, _, _ in told}) > 1:
        own = join(gather(group, own))
    alone = join(each for _, each, _ in told)
    unwanted = {key for key in saved_alone if pick.takes(key)}.difference(*(k for _, _, k in told))
    return combine(own, replace(alone, extra=tuple(sorted(unwanted))))


def _keys(entries: Mapping[str, T], *, alone: bool) -> dict[str, T]:
    """The entries that one rank has for itself, or those that it has not."""
    return {key: value for key, value in entries.items() if is_of_one_rank(key) == alone}


def _load_ranges(
    ready: _Prepared, state: dict[str, Any], group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """Bring every wanted byte to its place; (bytes read, bytes wanted) by all ranks together."""
    node = Node.join(group)
    try:
        catalogue = Catalogue(extents_of(ready.opened.metadata), ready.opened.manifest)
        wants = ready.wants
        tally = _read_checked(ready.opened.directory, catalogue, wants, node, group)
        # Entries that are not what they seemed are taken whole, in a second turn of all ranks.
        odd = [head.piece for head in wants.headers if not head.is_as_expected]
        more = Tally(0, 0, [])
        again = collect_wholes(odd)
        if any(gather(group, bool(odd))):
            more = _read_checked(ready.opened.directory, catalogue, again, node, group)
    finally:
        node.leave()
    _agree(_attempt(lambda: _finish(state, wants, again)), group)
    totals = gather(group, (tally.bytes_read + more.bytes_read, tally.bytes_unique))
    return sum(read for read, _ in totals), sum(unique for _, unique in totals)


def _read_checked(
    directory: Path,
    catalogue: Catalogue,
    wants: Wants,
    node: Node,
    group: dist.ProcessGroup | None,
) -> Tally:
    """Read, and raise `DamagedCheckpointError` on all ranks when any found a difference."""
    tally = read_wants(directory, catalogue, wants, node)
    _raise_damage(directory, gather(group, tally.problems))
    return tally


def _finish(state: dict[str, Any], *rounds: Wants) -> None:
    """Put in place what was taken whole: unusual tensors, and numbers of parameter groups."""
    paths = flatten_state_dict(dict(state))[1]
    known: dict[bytes, Any] = {}
    for wants in rounds:
        for piece, content in wants.wholes:
            place_whole(piece, content)
        for key, content in wants.numbers.items():
            encoded = content.memory.tobytes()
            if encoded not in known:
                known[encoded] = _open_number(key, encoded)
            set_element(state, paths[key], copy.copy(known[encoded]))


def _open_number(key: str, encoded: bytes) -> Any:
    """The value of a byte entry; `DamagedCheckpointError` for one that only code could read."""
    try:
        return load_plain(encoded)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{key}: the entry is no plain value and is not opened ({error}); leave it out with "
            "exclude, or load it with stock DCP if you trust who wrote it",
            damaged=[f"{key}: no plain value"],
        ) from error


def _of_rank(rank: int, kind: str, words: str, details: dict[str, Any]) -> CheckpointError:
    """The error of another rank, of its own kind where it is one of ours."""
    return _KINDS.get(kind, CheckpointError)(f"rank {rank}: {words}", **details)


def _raise_damage(directory: Path, told: list[list[str]]) -> None:
    damaged = sorted({line for lines in told for line in lines})
    if damaged:
        raise DamagedCheckpointError(
            f"{directory}: {shorten(damaged)}; nothing of it may be used. Load another checkpoint, "
            "or restore the files from a copy",
            damaged=damaged,
        )


def _attempt(act: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        # Whatever it is, the other ranks wait for a word; `_agree` raises it on all of them.
        return None, error


def _agree(outcome: tuple[T | None, Exception | None], group: dist.ProcessGroup | None) -> T:
    """The outcome when all ranks had one; else the first error is raised on every rank."""
    value, error = outcome
    told = gather(
        group, None if error is None else (type(error).__name__, str(error), _details(error))
    )
    if error is not None:
        if isinstance(error, HoldfastError):
            raise error
        raise CheckpointError(f"not loaded: {type(error).__name__}: {error}") from error
    for rank, one in enumerate(told):
        if one is not None:
            raise _of_rank(rank, *one)
    return cast(T, value)


def _details(error: Exception) -> dict[str, Any]:
    """What an error of a checkpoint carries beside its words."""
    names = ("damaged", "missing", "extra", "reshaped")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}
