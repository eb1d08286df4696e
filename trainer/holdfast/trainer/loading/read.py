"""Reads what the ranks of a node want: each unit once, verified while it is read.

If one rank wants a unit, that rank reads it, straight into the tensor's memory if the bytes are in
the same order there. If several ranks want it, one of them reads it into its window and the others
copy from there, in rounds. Damage is recorded and reading continues. The ranks stay together and
all reach the same verdict at the end.
"""

from __future__ import annotations

import contextlib
import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from holdfast.contracts.disk.digests import RunningDigest, new_checksum, range_digest
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.reading import open_regular, read_again
from holdfast.contracts.errors import CheckpointError, ForeignFileError
from holdfast.trainer.loading import plan
from holdfast.trainer.loading.node import HALVES, ReadingNode
from holdfast.trainer.loading.past_cache import fill, fill_aligned, go_past_cache, huge_memory
from holdfast.trainer.loading.targets import MemoryTarget, Wants

READERS: Final = 4
PARTS_MAX: Final = 256
PART_BYTES_MIN: Final = 4096
_OUR_DEFECT: Final = "The plan is wrong, which is a defect of Holdfast: please report it"
Placed = list[tuple[plan.CopySeries, MemoryTarget]]


class Catalogue:
    """All files of a checkpoint cut into numbered units, the same on every rank."""

    def __init__(self, extents: Mapping[str, int], manifest: Manifest | None) -> None:
        """`extents` has the last byte of each file in `.metadata`. A manifest has its size."""
        entries = {entry.path: entry for entry in manifest.files} if manifest else {}
        self.files: dict[str, plan.FileUnits] = {}
        self.whole: list[FileEntry] = []
        self.count = 0
        for path in sorted(extents):
            entry = entries.get(path)
            made = _units_of(path, extents[path], entry, self.count)
            if entry is not None and made.digests is None:
                self.whole.append(entry)
            self.files[path] = made
            self.count += made.count
        self._firsts = [file.first for file in self.files.values()]
        self._in_order = list(self.files.values())
        self.entries = entries

    def unit(self, number: int) -> plan.Unit:
        return self._in_order[bisect_right(self._firsts, number) - 1].unit(number)

    def span(self, path: str) -> slice:
        file = self.files[path]
        return slice(file.first, file.first + file.count)

    def sizes(self) -> plan.Counts:
        sizes = np.empty(self.count, dtype=np.int64)
        for file in self.files.values():
            starts = np.arange(file.count) * file.unit_bytes
            sizes[self.span(file.path)] = np.minimum(file.unit_bytes, file.size - starts)
        return sizes


def sort_by_unit(wants: Wants, catalogue: Catalogue) -> dict[int, Placed]:
    """Return the wanted parts of each unit, by its number."""
    by_unit: dict[int, Placed] = {}
    for want in wants.items:
        for number, parts in plan.cut(want.series, catalogue.files[want.path]):
            by_unit.setdefault(number, []).extend((part, want.target) for part in parts)
    return by_unit


def _units_of(path: str, extent: int, entry: FileEntry | None, first: int) -> plan.FileUnits:
    """Return how a file is read: by its entry's blocks, or by pieces if there are none."""
    if entry is None:
        return plan.FileUnits(path, extent, first, plan.PIECE_BYTES, None)
    if not entry.blocks and entry.bytes > plan.PIECE_BYTES:
        return plan.FileUnits(path, entry.bytes, first, plan.PIECE_BYTES, None)
    digests = tuple(digest for _, _, digest in entry.spans())
    return plan.FileUnits(path, entry.bytes, first, entry.block_bytes or plan.PIECE_BYTES, digests)


@dataclass
class ReadTally:
    """A rank's counts and problems. `bytes_unique` is the node's, set on its first rank only."""

    bytes_read: int
    bytes_unique: int
    problems: list[str]
    error: Exception | None = None


@dataclass(frozen=True)
class Turn:
    """A piece of a shared unit, and its slot in the window of the rank that reads it."""

    owner: int
    half: int
    slot: int
    unit: int
    start: int
    size: int


def read_wants(
    directory: Path,
    catalogue: Catalogue,
    mine: Mapping[int, Placed],
    distinct: Mapping[str, int],
    node: ReadingNode,
) -> ReadTally:
    """Read `mine` into its targets. All ranks of `node` call this together.

    Whole blocks are read and compared with their digests, if there are any. The `problems` of the
    tally are differences and storage errors. Its `error` is any other error. `distinct` comes from
    this rank's `Wants`.
    """
    flags = np.zeros(catalogue.count, dtype=np.bool_)
    flags[list(mine)] = True
    reader = _Reader(directory, catalogue)
    gathered = node.gather((np.packbits(flags), distinct, node.is_sharing))
    bits = [np.unpackbits(each, count=catalogue.count) for each, _, _ in gathered]
    wanted = np.array(bits, np.bool_)
    owner = plan.assign(wanted, catalogue.sizes())
    is_sharing = all(each for _, _, each in gathered)
    owner[(wanted.sum(axis=0) == 1) | (not is_sharing)] = plan.NOBODY
    with ThreadPoolExecutor(READERS, thread_name_prefix="load") as pool:
        for index, entry in enumerate(catalogue.whole):
            is_wanted = wanted[:, catalogue.span(entry.path)].any()
            if is_wanted and index % node.size == node.rank:
                pool.submit(reader.check_whole, entry)
        _read_all(reader, pool, node, owner, mine)
    boxes = {name: size for _, each, _ in gathered for name, size in each.items()}
    unique = sum(boxes.values()) if node.rank == 0 else 0
    return ReadTally(reader.bytes_read, unique, sorted(reader.problems), reader.error)


def _read_all(
    reader: _Reader,
    pool: ThreadPoolExecutor,
    node: ReadingNode,
    owner: plan.Counts,
    mine: Mapping[int, Placed],
) -> None:
    """Read the units of this rank alone, and at the same time the shared units in rounds.

    One half of the windows is filled while the other is copied from.
    """
    rounds = schedule(reader.catalogue, owner, node.size, node.slots)

    def begin(turns: Sequence[Turn]) -> list[Future[None]]:
        own = [turn for turn in turns if turn.owner == node.rank]
        by_unit = [list(some) for _, some in groupby(own, key=lambda turn: turn.unit)]
        return [pool.submit(reader.read_shared, some, node) for some in by_unit]

    reading = begin(rounds[0]) if rounds else []
    alone = [number for number in sorted(mine) if owner[number] == plan.NOBODY]
    private = [pool.submit(reader.read_private, number, mine[number]) for number in alone]
    for number, turns in enumerate(rounds):
        _finish(reading)
        # All ranks have filled this half and have copied the previous content of the other.
        node.barrier()
        reading = begin(rounds[number + 1]) if number + 1 < len(rounds) else []
        for turn in turns:
            reader.take_shared(turn, mine.get(turn.unit, []), node)
    _finish(private)


def schedule(catalogue: Catalogue, owner: plan.Counts, ranks: int, slots: int) -> list[list[Turn]]:
    """Return the turns of each round. Each rank fills `slots` pieces of its units, in order."""
    rounds: list[list[Turn]] = []
    for rank in range(ranks):
        units = np.flatnonzero(owner == rank).tolist()
        own = ((n, start, size) for n in units for start, size in plan.pieces(catalogue.unit(n)))
        for index, (number, start, size) in enumerate(own):
            at, slot = divmod(index, slots)
            if at == len(rounds):
                rounds.append([])
            rounds[at].append(Turn(rank, at % HALVES, slot, number, start, size))
    return rounds


class _Reader:
    """Reads units of one checkpoint's files. Several threads call its methods."""

    def __init__(self, directory: Path, catalogue: Catalogue) -> None:
        self._directory, self.catalogue = directory, catalogue
        self._running: dict[int, RunningDigest] = {}
        self._own = threading.local()
        self._lock = threading.Lock()
        self.bytes_read = 0
        self.problems: list[str] = []
        self.error: Exception | None = None

    def read_private(self, number: int, parts: Placed) -> None:
        """Read a unit that only this rank wants into its targets."""
        unit = self.catalogue.unit(number)
        if unit.digest is None:
            unit = _trim(unit, parts)
        running = new_checksum() if unit.digest is not None else None
        with self._noting(unit.path), self._open(unit.path) as handle:
            is_direct = go_past_cache(handle, unit.start, unit.size)
            for start, size in plan.pieces(unit):
                here = _clip_all(parts, start, size)
                views = None if is_direct else scatter(here, start, size, self._scratch())
                if views is not None:
                    self._read(handle, views, start, running)
                    for series, target in here:
                        target.took(series.bytes)
                else:
                    self._read_piece(handle, self._scratch(), start, size, running, is_direct)
                    copy_out(here, self._scratch(), start)
            self._compare(number, running)

    def read_shared(self, turns: Sequence[Turn], node: ReadingNode) -> None:
        """Read consecutive pieces of one shared unit into this rank's window."""
        number = turns[0].unit
        unit = self.catalogue.unit(number)
        with self._noting(unit.path), self._open(unit.path) as handle:
            running = None
            if unit.digest is not None:
                running = self._running.setdefault(number, new_checksum())
            bytes_ahead = sum(turn.size for turn in turns)
            is_direct = go_past_cache(handle, turns[0].start, bytes_ahead)
            for turn in turns:
                slot = node.slot(turn.owner, turn.half, turn.slot)
                self._read_piece(handle, slot, turn.start, turn.size, running, is_direct)
            if turns[-1].start + turns[-1].size == unit.start + unit.size:
                self._compare(number, running)

    def take_shared(self, turn: Turn, parts: Placed, node: ReadingNode) -> None:
        """Copy this rank's parts of a piece from the window of its reader."""
        with self._noting(self.catalogue.unit(turn.unit).path):
            here = _clip_all(parts, turn.start, turn.size)
            if here:
                copy_out(here, node.slot(turn.owner, turn.half, turn.slot), turn.start)

    def check_whole(self, entry: FileEntry) -> None:
        """Verify a long file whose manifest has one checksum for the whole file."""
        with self._noting(entry.path):
            with self._open(entry.path) as handle:
                found = read_again(lambda: range_digest(handle, 0, entry.bytes))
            with self._lock:
                self.bytes_read += entry.bytes
                if found != entry.checksum:
                    self.problems.append(f"{entry.path}: {entry.describe(0, found)}")

    def _read_piece(
        self,
        handle: int,
        memory: memoryview,
        start: int,
        size: int,
        running: RunningDigest | None,
        is_direct: bool,
    ) -> None:
        """Fill the beginning of a piece's `memory` with `size` bytes from `start`."""
        if not is_direct:
            self._read(handle, [memory[:size]], start, running)
            return
        scratch = self._scratch()
        fill_aligned(handle, scratch, start, size)
        self._took(scratch[:size], running)
        if memory is not scratch:
            memory[:size] = scratch[:size]

    def _read(
        self, handle: int, views: Sequence[memoryview], start: int, running: RunningDigest | None
    ) -> None:
        """Fill `views` one after another with the bytes from `start`."""
        fill(handle, views, start)
        for view in views:
            self._took(view, running)

    def _took(self, content: memoryview, running: RunningDigest | None) -> None:
        if running is not None:
            running.update(content)
        with self._lock:
            self.bytes_read += len(content)

    def _compare(self, number: int, running: RunningDigest | None) -> None:
        unit = self.catalogue.unit(number)
        if running is None or (found := running.hexdigest()) == unit.digest:
            return
        line = self.catalogue.entries[unit.path].describe(unit.start, found)
        with self._lock:
            self.problems.append(f"{unit.path}: {line}")

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[int]:
        """Open the file. Raises `EOFError` if its size differs from the manifest."""
        here = self._directory
        handle = read_again(lambda: open_regular(here / path, below=here, follow=True))
        try:
            entry, size = self.catalogue.entries.get(path), os.fstat(handle).st_size
            if entry is not None and size != entry.bytes:
                raise EOFError(f"{size} bytes, expected {entry.bytes}")
            yield handle
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def _noting(self, path: str) -> Iterator[None]:
        """Record an error instead of raising it, because other ranks wait for this one."""
        try:
            yield
        except (OSError, EOFError, ForeignFileError) as error:
            texts = getattr(error, "strerror", None), getattr(error, "problem", None), str(error)
            reason = next(filter(None, texts))
            with self._lock:
                line = f"{path}: {reason}"
                if line not in self.problems:
                    self.problems.append(line)
        except Exception as error:
            # For example, a tensor has no memory or cannot take the converted values.
            self.error = self.error or error

    def _scratch(self) -> memoryview:
        """Return this thread's own memory for one piece."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = huge_memory(plan.PIECE_BYTES)
        scratch: memoryview = self._own.scratch
        return scratch


def scatter(parts: Placed, start: int, size: int, scratch: memoryview) -> list[memoryview] | None:
    """Return memory for the file's bytes from `start`, in order: targets' own, else `scratch`.

    Returns None if that does not pay off: many small parts, strided parts, bytes wanted twice.
    """
    if len(parts) > PARTS_MAX or sum(s.bytes for s, _ in parts) < len(parts) * PART_BYTES_MIN:
        return None
    views, at = [], start
    for series, target in sorted(parts, key=lambda part: part[0].source):
        if series.count > 1 or series.source < at:
            return None
        if series.source > at:
            views.append(scratch[at - start : series.source - start])
        _require_inside(series, target.memory.size)
        views.append(target.memory.data[series.target : series.target + series.length])
        at = series.end
    if at < start + size:
        views.append(scratch[at - start : size])
    return views


def copy_out(parts: Placed, piece: memoryview, start: int) -> None:
    """Copy `parts` from a piece of the file, which begins at byte `start`, into their targets.

    Raises `CheckpointError`, before anything of a part is copied, if it lies outside the piece or
    its target.
    """
    content = np.frombuffer(piece, np.uint8)
    for series, target in parts:
        _require_inside(series, target.memory.size)
        if series.source < start or series.end > start + len(content):
            raise CheckpointError(
                f"a load planned to copy the file's bytes {series.source} to {series.end} from a "
                f"piece with bytes {start} to {start + len(content)}; expected a part of the "
                f"piece. {_OUR_DEFECT}"
            )
        source, memory = content[series.source - start :], target.memory[series.target :]
        if series.count == 1:
            memory[: series.length] = source[: series.length]
        else:
            shape = (series.count, series.length)
            as_strided(memory, shape, (series.target_stride, 1))[...] = as_strided(
                source, shape, (series.source_stride, 1)
            )
        target.took(series.bytes)


def _require_inside(series: plan.CopySeries, memory_bytes: int) -> None:
    """Raise `CheckpointError` if `series` would be written outside a memory of that size.

    A copy with strides does not check this: it would overwrite other memory of the process.
    """
    last = series.target + (series.count - 1) * series.target_stride
    low, high = min(series.target, last), max(series.target, last) + series.length
    if low < 0 or high > memory_bytes:
        raise CheckpointError(
            f"a load planned to write bytes {low} to {high} of a memory of {memory_bytes} bytes; "
            f"expected bytes inside it. {_OUR_DEFECT}"
        )


def _clip_all(parts: Placed, start: int, size: int) -> Placed:
    return [
        (part, target) for each, target in parts for part in plan.clip(each, start, start + size)
    ]


def _trim(unit: plan.Unit, parts: Placed) -> plan.Unit:
    """Return the unit without unwanted bytes at its ends."""
    start = min(series.source for series, _ in parts)
    end = max(series.end for series, _ in parts)
    return plan.Unit(unit.path, start, end - start, None)


def _finish(work: Iterable[Future[None]]) -> None:
    for each in work:
        each.result()
