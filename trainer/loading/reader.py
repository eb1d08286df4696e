"""Loading a checkpoint in place: ours or stock DCP's, at any world size and pipeline degree.

What is wanted and what is there are compared first; then every node reads what its ranks want,
each byte once, checked on the way. All ranks reach the same verdict at each turn, so that none
is left waiting in a collective for one that raised alone.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from holdfast.contracts.manifest import Manifest
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
from holdfast.trainer.loading.node import Address, Node, gather, own_window
from holdfast.trainer.loading.plain_load import load_plain
from holdfast.trainer.loading.read import Catalogue, Placed, read_wants, sort_by_unit
from holdfast.trainer.loading.stock import check_share, load_as_stock, needs_stock
from holdfast.trainer.loading.targets import (
    Piece,
    Wants,
    collect,
    collect_wholes,
    place_whole,
)
from holdfast.trainer.planning.layout import flatten
from holdfast.trainer.planning.metadata import (
    Opened,
    extents_of,
    open_checkpoint,
    open_committed,
    pick_entries,
    read_metadata,
)

T = TypeVar("T")
W = TypeVar("W")
PortableError = tuple[str, str, dict[str, Any]]
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


@dataclass(frozen=True)
class _Word:
    """What a rank says to all others before anything is read: of its keys, and where it runs."""

    address: Address
    common: str
    alone: KeyComparison
    keys_alone: tuple[str, ...]


@dataclass(frozen=True)
class _Prepared:
    """What a rank made ready alone; keys of `opened` are the wanted names already."""

    opened: Opened
    taken: tuple[str, ...]
    renamed: tuple[str, ...]
    common: KeyComparison
    word: _Word
    wants: Wants
    catalogue: Catalogue
    by_unit: dict[int, Placed]

    def only_taken(self) -> Opened:
        """The checkpoint as if it had nothing but what is taken."""
        names = {key: key for key in self.taken}
        return replace(self.opened, metadata=pick_entries(self.opened.metadata, names))


def read_keys(directory: Path) -> frozenset[str]:
    """The flattened keys saved in `directory`; raises `DamagedCheckpointError` as loading does."""
    return frozenset(read_metadata(directory).state_dict_metadata)


def open_together(
    directory: Path, manifest: Manifest | None, group: dist.ProcessGroup | None
) -> Opened:
    """The checkpoint in `directory`, whose manifest was read before; all ranks of `group` call it.

    Raises on all ranks what any of them found: `DamagedCheckpointError` as `open_checkpoint` does.
    """
    return _agree(lambda: open_committed(directory, manifest), group, lambda _: None)[0]


def open_any_together(directory: Path, group: dist.ProcessGroup | None) -> Opened:
    """A checkpoint of ours or of stock DCP's; otherwise as `open_together`."""
    return _agree(lambda: open_checkpoint(directory), group, lambda _: None)[0]


def load_state(
    checkpoint: Path | Opened,
    state: dict[str, Any],
    *,
    group: dist.ProcessGroup | None,
    strict: bool = True,
    include: Collection[str] = (),
    exclude: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    planner: LoadPlanner | None = None,
) -> LoadReport:
    """Load a checkpoint in place into `state`; all ranks of `group` call it together.

    `checkpoint` is its directory, or itself where that was looked into before.
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
    directory = checkpoint if isinstance(checkpoint, Path) else checkpoint.directory
    if planner is not None:
        return _load_planned(directory, state, group, planner)
    with contextlib.ExitStack() as held:
        held.enter_context(_uncollected())
        ready, words = _agree(
            lambda: _prepare(checkpoint, state, pick, held.enter_context(own_window())),
            group,
            lambda ready: ready.word,
        )
        found = _compare_together(ready, pick, words, group)
        raise_mismatch(str(directory), found, strict=pick.strict)
        if needs_stock(ready.opened.metadata):
            _raise_damage(directory, gather(group, check_share(ready.opened, group)))
            load_as_stock(ready.only_taken(), state, group, None)
            bytes_read = bytes_unique = 0
        else:
            node = Node.join(group, [word.address for word in words])
            bytes_read, bytes_unique = _load_ranges(ready, state, node, group)
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
    directory: Path, state: dict[str, Any], group: dist.ProcessGroup | None, planner: LoadPlanner
) -> LoadReport:
    """Load as the caller's planner says, which alone knows what is wanted and what is missing."""
    opened, _ = _agree(lambda: open_checkpoint(directory), group, lambda _: None)
    _raise_damage(directory, gather(group, check_share(opened, group)))
    own = load_as_stock(opened, state, group, planner)
    read = frozenset().union(*gather(group, own))
    extra = opened.metadata.state_dict_metadata.keys() - read
    return LoadReport(restored=len(own), missing=(), extra=tuple(sorted(extra)))


def _prepare(
    checkpoint: Path | Opened, state: dict[str, Any], pick: Selection, address: Address
) -> _Prepared:
    """What each rank finds out alone: how keys compare, and which bytes it wants."""
    flat = flatten(state)
    opened = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    names = pick.rename_all(opened.metadata.state_dict_metadata)
    renamed = {old: new for old, new in names.items() if old != new}
    if renamed:
        opened = replace(opened, metadata=pick_entries(opened.metadata, names))
    saved = opened.metadata.state_dict_metadata
    common = compare(_keys(flat, alone=False), _keys(saved, alone=False), pick)
    flat_alone, saved_alone = _keys(flat, alone=True), _keys(saved, alone=True)
    alone = replace(compare(flat_alone, saved_alone, pick), extra=(), excluded=())
    taken = {key: value for key, value in flat.items() if key in saved and pick.takes(key)}
    # Of another shape, nothing will be read, and what to read cannot be said.
    is_fitting = not common.reshaped and not alone.reshaped
    wants = collect(taken, opened.metadata) if is_fitting else Wants()
    catalogue = Catalogue(extents_of(opened.metadata), opened.manifest)
    return _Prepared(
        opened=opened,
        taken=tuple(taken),
        renamed=tuple(f"{old} to {new}" for old, new in sorted(renamed.items())),
        common=common,
        word=_Word(
            address=address,
            common=digest_of(repr(common).encode()),
            alone=alone,
            keys_alone=tuple(key for key in flat_alone if pick.takes(key)),
        ),
        wants=wants,
        catalogue=catalogue,
        by_unit=sort_by_unit(wants, catalogue),
    )


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, of which what is made here has none.

    So many new objects would set off a search through all that torch and the program hold, which
    takes longer than to make them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _compare_together(
    ready: _Prepared, pick: Selection, words: Sequence[_Word], group: dist.ProcessGroup | None
) -> KeyComparison:
    """One verdict for all ranks. Keys travel only when the ranks' key sets differ."""
    common = ready.common
    if len({word.common for word in words}) > 1:
        common = join(gather(group, common))
    alone = join(word.alone for word in words)
    saved_alone = _keys(ready.opened.metadata.state_dict_metadata, alone=True)
    extra = {key for key in saved_alone if pick.takes(key)}
    extra.difference_update(*(word.keys_alone for word in words))
    return combine(common, replace(alone, extra=tuple(sorted(extra))))


def _keys(entries: Mapping[str, T], *, alone: bool) -> dict[str, T]:
    """The entries that one rank has for itself, or those that it has not."""
    return {key: value for key, value in entries.items() if is_of_one_rank(key) == alone}


def _load_ranges(
    ready: _Prepared, state: dict[str, Any], node: Node, group: dist.ProcessGroup | None
) -> tuple[int, int]:
    """Bring every wanted byte to its place; (bytes read, bytes wanted) by all ranks together."""
    read, unique, odd = _read_turn(ready, ready.wants, ready.by_unit, state, node, group)
    if odd is not None:
        # Entries that are not what they seemed are taken whole, in a second turn of all ranks.
        again = collect_wholes(odd)
        by_unit = sort_by_unit(again, ready.catalogue)
        read += _read_turn(ready, again, by_unit, state, node, group)[0]
    return read, unique


def _read_turn(
    ready: _Prepared,
    wants: Wants,
    by_unit: Mapping[int, Placed],
    state: dict[str, Any],
    node: Node,
    group: dist.ProcessGroup | None,
) -> tuple[int, int, list[Piece] | None]:
    """(bytes read, bytes wanted) by all ranks, and this rank's pieces that are not as they seemed.

    None where no rank has such. Raises on all ranks what any of them found: damage first, which
    may well be what another one then stumbled on.
    """
    directory = ready.opened.directory
    tally = read_wants(directory, ready.catalogue, by_unit, wants.distinct, node)
    odd = [head.piece for head in wants.headers if not head.is_as_expected]
    error = tally.error
    if error is None and not tally.problems:
        _, error = _attempt(lambda: _finish(state, wants))
    counts = (tally.bytes_read, tally.bytes_unique, len(odd))
    told = gather(group, (tally.problems, _portable(error), counts))
    _raise_damage(directory, [problems for problems, _, _ in told])
    _raise_first(error, [one for _, one, _ in told])
    read, unique, odd_anywhere = (sum(each) for each in zip(*(c for _, _, c in told), strict=True))
    return read, unique, odd if odd_anywhere else None


def _finish(state: dict[str, Any], wants: Wants) -> None:
    """Put in place what was taken whole: unusual tensors, and numbers of parameter groups."""
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
    """The value of a byte entry; `DamagedCheckpointError` for one that only code could read."""
    try:
        return load_plain(encoded)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{key}: the entry is no plain value and is not opened ({error}); leave it out with "
            "exclude, or load it with stock DCP if you trust who wrote it",
            damaged=[f"{key}: no plain value"],
        ) from error


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
        # Whatever it is, the other ranks wait for a word; then it is raised on all of them.
        return None, error


def _agree(
    act: Callable[[], T], group: dist.ProcessGroup | None, tell: Callable[[T], W]
) -> tuple[T, list[W]]:
    """What `act` returned, and what every rank has to `tell` of that, in one meeting.

    Where `act` raised on any rank, the first error is raised on every rank.
    """
    value, error = _attempt(act)
    word = None if error is not None else tell(cast(T, value))
    told = gather(group, (_portable(error), word))
    _raise_first(error, [one for one, _ in told])
    return cast(T, value), [cast(W, word) for _, word in told]


def _raise_first(error: Exception | None, told: Sequence[PortableError | None]) -> None:
    """Raise the first error that a rank has `told`, on each of them; `error` is one's own."""
    rank, first = next(((r, one) for r, one in enumerate(told) if one is not None), (0, None))
    if first is None:
        return
    kind, words, details = first
    if isinstance(error, HoldfastError) and type(error).__name__ == kind:
        raise error
    made = _KINDS.get(kind, CheckpointError)
    raise made(f"rank {rank}: not loaded: {kind}: {words}", **details) from error


def _portable(error: Exception | None) -> PortableError | None:
    """An error as the other ranks are told: its kind, its words, what it carries beside them."""
    return None if error is None else (type(error).__name__, str(error), _details(error))


def _details(error: Exception) -> dict[str, Any]:
    """What an error of a checkpoint carries beside its words."""
    names = ("damaged", "missing", "extra", "reshaped")
    return {name: getattr(error, name) for name in names if hasattr(error, name)}
