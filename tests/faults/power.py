"""A model of a disk after a power cut, with a file system that guarantees only what `fsync` does.

From a trace of system calls the model knows at every moment which bytes and names are durable.
All others may have reached the disk or not, in any order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Final

from tests.faults.shim import Call

SUBSETS_MAX: Final = 64


class Loss(Enum):
    """What happens to bytes that were written but not synced."""

    KEPT = "kept"
    TORN = "torn"
    LOST = "lost"


@dataclass(eq=False)
class Inode:
    """Contents of a file, link or directory: as programs see them, and as they are on disk."""

    is_directory: bool = False
    target: str = ""
    live: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    names: dict[str, Inode] = field(default_factory=dict)
    durable_names: dict[str, Inode] = field(default_factory=dict)
    pending: list[dict[str, Inode | None]] = field(default_factory=list)

    def change(self, names: dict[str, Inode | None]) -> None:
        """Set names (or remove them, with None) in one change that is not durable yet."""
        self.pending.append(names)
        _apply(self.names, names)

    def sync(self) -> None:
        self.durable = bytes(self.live)
        self.durable_names = dict(self.names)
        self.pending.clear()


class Disk:
    """A folder as a trace of calls created it; starts with the given directories."""

    def __init__(self, folders: Iterable[str]) -> None:
        self.root = Inode(is_directory=True)
        for folder in folders:
            directory = self.root
            for name in PurePosixPath(folder).parts:
                directory = directory.names.setdefault(name, Inode(is_directory=True))
                directory.sync()
        _sync_all(self.root)

    def play(self, call: Call) -> None:
        """Apply the effect of a successful call."""
        if call.result < 0:
            return
        if call.op == "mkdir":
            self._set(call.path, Inode(is_directory=True))
        elif call.op == "open" and not call.only_reads:
            found = self.find(call.path)
            if found is None:
                self._set(call.path, Inode())
            else:
                found.live.clear()
        elif call.op == "write":
            live = self._get(call.path).live
            end = call.offset + len(call.data)
            live.extend(bytes(max(0, end - len(live))))
            live[call.offset : end] = call.data
        elif call.op == "fsync":
            self._get(call.path).sync()
        elif call.op == "link":
            self._set(call.path, self._get(call.other))
        elif call.op == "symlink":
            self._set(call.path, Inode(target=call.other))
        elif call.op == "rename":
            self._rename(call.other, call.path)
        elif call.op == "unlink":
            directory, name = self._parent(call.path)
            directory.change({name: None})

    def find(self, path: str) -> Inode | None:
        """The inode that programs see at `path`."""
        inode: Inode | None = self.root
        for name in PurePosixPath(path).parts:
            inode = inode.names.get(name) if inode else None
        return inode

    def states(self, chance: random.Random) -> Iterator[State]:
        """Possible states after a power cut now: all subsets of few pending names, some of many."""
        directories = list(_directories(self.root))
        pending = [(d, i) for d in directories for i in range(len(d.pending))]
        for chosen in _subsets(pending, chance):
            for loss in Loss:
                yield State(self.root, frozenset((id(d), i) for d, i in chosen), loss)

    def worst(self) -> State:
        """The state in which everything that was not synced is lost."""
        return State(self.root, frozenset(), Loss.LOST)

    def _get(self, path: str) -> Inode:
        found = self.find(path)
        assert found is not None, path
        return found

    def _parent(self, path: str) -> tuple[Inode, str]:
        whole = PurePosixPath(path)
        return self._get(str(whole.parent)), whole.name

    def _set(self, path: str, inode: Inode) -> None:
        directory, name = self._parent(path)
        directory.change({name: inode})

    def _rename(self, old: str, new: str) -> None:
        """Rename within one directory, as a single change; the model needs no other kind."""
        directory, name = self._parent(new)
        former, former_name = self._parent(old)
        assert former is directory, (old, new)
        directory.change({former_name: None, name: self._get(old)})


@dataclass(frozen=True)
class State:
    """A disk after a power cut: which pending name changes and which bytes survived."""

    root: Inode
    made_it: frozenset[tuple[int, int]]
    loss: Loss

    def names(self, directory: Inode) -> dict[str, Inode]:
        found = dict(directory.durable_names)
        for index, change in enumerate(directory.pending):
            if (id(directory), index) in self.made_it:
                _apply(found, change)
        return found

    def content(self, inode: Inode) -> bytes:
        live, durable = bytes(inode.live), inode.durable
        if self.loss is Loss.KEPT or live == durable:
            return live
        return live[: len(live) // 2] if self.loss is Loss.TORN else durable

    def fingerprint(self) -> tuple[object, ...]:
        """Equal for equal disks."""
        return tuple(self._walk(self.root, ""))

    def has(self, path: str) -> bool:
        return any(found == path for found, _ in self._walk(self.root, ""))

    def write_files(self, directory: Inode, folder: Path) -> None:
        """Write the files of this state to `folder`."""
        folder.mkdir(exist_ok=True)
        for name, inode in self.names(directory).items():
            path = folder / name
            if inode.is_directory:
                self.write_files(inode, path)
            elif inode.target:
                path.symlink_to(inode.target)
            else:
                path.write_bytes(self.content(inode))

    def _walk(self, directory: Inode, prefix: str) -> Iterator[tuple[str, object]]:
        for name, inode in sorted(self.names(directory).items(), key=lambda item: item[0]):
            path = f"{prefix}{name}"
            if inode.is_directory:
                yield path, None
                yield from self._walk(inode, f"{path}/")
            else:
                yield path, inode.target or self.content(inode)


def _apply(names: dict[str, Inode], change: dict[str, Inode | None]) -> None:
    for name, inode in change.items():
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


def _sync_all(directory: Inode) -> None:
    directory.sync()
    for inode in directory.names.values():
        _sync_all(inode)


def _directories(directory: Inode) -> Iterator[Inode]:
    yield directory
    for inode in {id(i): i for i in directory.names.values()}.values():
        if inode.is_directory:
            yield from _directories(inode)


def _subsets(
    pending: Sequence[tuple[Inode, int]], chance: random.Random
) -> Iterator[tuple[tuple[Inode, int], ...]]:
    if 2 ** len(pending) <= SUBSETS_MAX:
        for size in range(len(pending) + 1):
            yield from itertools.combinations(pending, size)
        return
    yield ()
    yield tuple(pending)
    for _ in range(SUBSETS_MAX - 2):
        yield tuple(each for each in pending if chance.random() < 0.5)
