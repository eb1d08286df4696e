"""What a source of weights contains: parts of tensors, and the bytes of files that hold them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from math import prod
from operator import and_
from pathlib import Path
from typing import Final

import torch

from holdfast.contracts.disk.reading import open_regular, read_again
from holdfast.contracts.errors import CheckpointError, ForeignFileError
from holdfast.trainer.planning.compare_keys import Selection, shorten

MODEL: Final = "model."
# Tied weights and views share their bytes. A file that needs more than this is hostile: it would
# fill the disk.
SHARING_MAX: Final = 8
DIMENSIONS_MAX: Final = 64
EMPTY_MAX: Final = 10_000
NAME_SHOWN: Final = 100
BLOBS: Final = "blobs"
_BYTES_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ByteSegment:
    """`bytes` bytes of the file `path` from `offset`. The path is relative to the source's base."""

    path: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class SourcePart:
    """A box of a tensor: all of it, or what one rank saved.

    `shape` is the whole tensor's, `offsets` and `sizes` are the box's. The bytes of `segments`, one
    after another, are the box in row-major order. With `strides`, in elements, the only segment
    holds the elements in another order.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    segments: tuple[ByteSegment, ...]
    strides: tuple[int, ...] | None = None

    @classmethod
    def whole(
        cls,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        segments: Sequence[ByteSegment],
        strides: tuple[int, ...] | None = None,
    ) -> SourcePart:
        sizes = tuple(shape)
        return cls(name, dtype, sizes, (0,) * len(sizes), sizes, tuple(segments), strides)

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class SourceStamp:
    """The size and the time of change of a file, to notice that it changes while it is read.

    `rights` are the permissions that a copy of it may have.
    """

    bytes: int
    changed_ns: int
    rights: int = 0o666

    @classmethod
    def of(cls, found: os.stat_result) -> SourceStamp:
        return cls(found.st_size, found.st_mtime_ns, rights_of(found))


@dataclass(frozen=True)
class WeightsSource:
    """Weights to import. `base` is the folder that all paths of segments start at.

    `files` are the files that were opened, with their states. `left_out` are lines for people on
    what else the source has. `is_snapshot` as in `SourceFiles`.
    """

    place: Path
    base: Path
    form: str
    parts: tuple[SourcePart, ...]
    files: Mapping[str, SourceStamp]
    left_out: tuple[str, ...] = ()
    is_snapshot: bool = False

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def rights(self) -> int:
        """The permissions of files that are made from the source's files."""
        return reduce(and_, (state.rights for state in self.files.values()), 0o666)


class SourceFiles:
    """Opens the regular files of a source, and remembers their states.

    Paths are relative to `base`, which no link may leave. In a snapshot of the Hugging Face hub's
    cache, links may end in `blobs` only.
    """

    def __init__(self, base: Path, *, is_snapshot: bool = False) -> None:
        self.base, self.is_snapshot = base, is_snapshot
        self.states: dict[str, SourceStamp] = {}

    @classmethod
    def of(cls, directory: Path) -> SourceFiles:
        """Return the files of a folder, which may be a snapshot in a cache."""
        repository = directory.parent.parent
        blobs = repository / BLOBS
        is_snapshot = (
            directory.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink()
        )
        return cls(repository if is_snapshot else directory, is_snapshot=is_snapshot)

    def open(self, path: str) -> int:
        """Return a descriptor of the file `path`, relative to the base. The caller closes it.

        Links are followed if they stay inside the base. Raises `CheckpointError` for a file that is
        missing, cannot be read or is not a regular file.
        """
        place = self.base / path
        try:
            handle = read_again(partial(self._open, path))
        except (OSError, ValueError) as error:
            reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"{place}: {reason}; expected a file of weights that can be read"
            ) from error
        found = os.fstat(handle)
        self.states[path] = SourceStamp.of(found)
        return handle

    def read(self, path: str, bytes_max: int) -> bytes:
        """Return the bytes of a small file. Raises `OSError` and `ForeignFileError`."""
        with open(self._open(path), "rb") as stream:
            if (size := os.fstat(stream.fileno()).st_size) > bytes_max:
                text = f"{size} bytes, expected {bytes_max} or less"
                raise ForeignFileError(self.base / path, text)
            return stream.read(size)

    def resolve(self, path: str) -> str:
        """Return the path of the file that a link in a snapshot leads to, else `path` itself.

        Raises `CheckpointError` for a link that leads elsewhere.
        """
        place = self.base / path
        if not self.is_snapshot or not place.is_symlink():
            return path
        target = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(place)))
        if os.path.dirname(target) != BLOBS:
            raise CheckpointError(
                f"{place}: a link that does not end in {self.base / BLOBS}; download it again"
            )
        return target

    def _open(self, path: str) -> int:
        return open_regular(self.base / path, below=self.base, follow=not self.is_snapshot)

    def size(self, path: str) -> int:
        return self.states[path].bytes


def rights_of(found: os.stat_result) -> int:
    """Return the permissions that a copy of a file may have: no user gets more than before."""
    rights = found.st_mode & 0o666 | 0o600
    # The copy belongs to another group.
    return rights if found.st_gid == os.getegid() or rights & 0o006 else rights & ~0o060


def check_shape(name: str, shape: object, dtype: torch.dtype, where: str) -> tuple[int, ...]:
    """Return a shape as a tuple. Raises `CheckpointError` if no tensor can have it."""
    sizes = tuple(shape) if isinstance(shape, list | tuple) else None
    is_sound = sizes is not None and len(sizes) <= DIMENSIONS_MAX
    if sizes is None or not is_sound or not all(type(n) is int and n >= 0 for n in sizes):
        raise CheckpointError(
            f"{where}: {name}: its shape is {_shown(shape)}, expected at most {DIMENSIONS_MAX} "
            "numbers of 0 or more; write the file again"
        )
    if prod(size for size in sizes if size) * dtype.itemsize > _BYTES_MAX:
        raise CheckpointError(
            f"{where}: {name}: its shape {_shown(sizes)} is larger than any tensor; write the file "
            "again"
        )
    return sizes


def select(
    parts: Sequence[SourcePart],
    *,
    rename: Mapping[str, str],
    exclude: Collection[str],
    where: Path,
) -> list[SourcePart]:
    """Return the parts that are wanted, under the names of the model's parameters.

    `rename` maps names in the source to parameter names, exactly or by prefix with `old.*` to
    `new.*`. A `*` alone stands for every name. `exclude` has parameter names or their prefixes.
    Raises `KeyMismatchError` for a rule or an exclusion that fits no name, and for names that would
    become equal. Raises `CheckpointError` if nothing is left.
    """
    rules, leave = model_rules(rename), model_names(exclude)
    pick = Selection(exclude=leave, rename=rules)
    names = pick.rename_all({f"{MODEL}{part.name}": None for part in parts})
    pick.check_names(set(names.values()))
    kept = [
        replace(part, name=new.removeprefix(MODEL))
        for part in parts
        if pick.takes(new := names[f"{MODEL}{part.name}"])
    ]
    outside = [new for old, new in names.items() if not new.startswith(MODEL)]
    if outside:
        raise CheckpointError(f"{where}: a rename gives {shorten(outside)}, expected a name")
    if not kept:
        raise CheckpointError(
            f"{where}: no tensor is left to import; it has "
            f"{shorten([part.name for part in parts]) or 'none'}"
        )
    return kept


def model_rules(rename: Mapping[str, str]) -> dict[str, str]:
    """Return rules for parameter names as rules for the keys of a checkpoint, `model.<name>`."""
    return {f"{MODEL}{old}": f"{MODEL}{new}" for old, new in rename.items()}


def model_names(names: Collection[str]) -> tuple[str, ...]:
    """Return parameter names as keys of a checkpoint. A single name may be given as a string."""
    given = (names,) if isinstance(names, str) else names
    return tuple(f"{MODEL}{name}" for name in given)


def check_all(parts: Sequence[SourcePart], files: SourceFiles, where: Path) -> None:
    """Raise `CheckpointError` for tensors that no program saves.

    Those are names that are not printable or lead to another folder, bytes outside their file,
    bytes that far too many tensors share, and many thousand tensors without elements.
    """
    for part in parts:
        if not part.name.isprintable() or {"", "..", "."} & set(part.name.split("/")):
            raise CheckpointError(
                f"{where}: {part.name[:NAME_SHOWN]!a} is not a name of a tensor; expected "
                "printable characters and no `..`. Save it under another name"
            )
    check_empty(sum(not part.bytes for part in parts), str(where))
    for part in parts:
        for segment in part.segments:
            size = files.size(segment.path)
            if segment.offset < 0 or segment.bytes < 0 or segment.offset + segment.bytes > size:
                raise CheckpointError(
                    f"{files.base / segment.path}: {part.name} needs bytes {segment.offset} to "
                    f"{segment.offset + segment.bytes}, but the file has {size}; the file is cut "
                    "short. Copy it again"
                )
    needed, there = sum(part.bytes for part in parts), sum(s.bytes for s in files.states.values())
    if needed > SHARING_MAX * max(there, 1):
        raise CheckpointError(
            f"{where}: its tensors have {needed} bytes, but its files have only {there}; expected "
            f"at most {SHARING_MAX} times as many. Save the tensors with .clone()"
        )


def check_empty(count: int, where: str) -> None:
    """Raise `CheckpointError` if too many tensors have no elements: each costs time."""
    if count > EMPTY_MAX:
        raise CheckpointError(
            f"{where}: {count} of its tensors have no elements, expected at most {EMPTY_MAX}; "
            "leave them out when the file is written"
        )


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor in row-major order, in elements."""
    strides, stride = [0] * len(sizes), 1
    for dimension in range(len(sizes) - 1, -1, -1):
        strides[dimension] = stride
        stride *= sizes[dimension]
    return tuple(strides)


def is_contiguous(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if elements of this layout are in row-major order, without gaps."""
    pairs = zip(sizes, strides, contiguous_strides(sizes), strict=True)
    return 0 in sizes or all(given == own for size, given, own in pairs if size > 1)


def in_file_order(parts: Sequence[SourcePart]) -> list[SourcePart]:
    """Return the parts in the order of their bytes, so that each file is read from its start."""

    def position(part: SourcePart) -> tuple[str, int, str]:
        first = part.segments[0] if part.segments else ByteSegment("", 0, 0)
        return first.path, first.offset, part.name

    return sorted(parts, key=position)


def twice(names: Sequence[str]) -> list[str]:
    ordered = sorted(names)
    return sorted({one for one, other in pairwise(ordered) if one == other})


def _shown(shape: object) -> str:
    text = str(shape)
    return text if len(text) <= 100 else f"{text[:100]}…"
