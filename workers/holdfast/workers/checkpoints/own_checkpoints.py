"""Checkpoints that a program writes itself: find them, judge them, and record them in the run.

A committed one has a directory in the run's folder, which contains only a manifest. The
manifest names the program's folder, with the size and the digest of each file. Holdfast never
changes the program's files. Links, pipes and devices among them are never opened, and nothing that
another user owns becomes a checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import durable, reading
from holdfast.contracts.disk.bounds import STEP_MAX
from holdfast.contracts.disk.digests import FileChecksum
from holdfast.contracts.disk.manifest import FileEntry, Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import CheckpointError, DamagedCheckpointError, ForeignFileError
from holdfast.contracts.spec.sections import STEP_FIELD, Program

READ_BYTES: Final = 1 << 20
FILES_MAX: Final = 100_000
DEPTH_MAX: Final = 16
TOO_DEEP: Final = "/…"
_DIGITS: Final = r"(?P<step>[0-9]{1,15})"


@dataclass(frozen=True)
class FileStamp:
    """One file: its path inside the checkpoint, its bytes, and its modification time in ns."""

    path: str
    bytes: int
    changed_ns: int


@dataclass(frozen=True, kw_only=True)
class OwnCheckpoint:
    """A checkpoint as the program has it on disk: a directory, or a single file.

    `folder` is what the paths of its files are relative to. With a `problem`, it cannot be
    recorded whatever its files are. `owners` are the users whose files count.
    """

    step: int
    path: Path
    folder: Path
    files: tuple[FileStamp, ...]
    problem: str = ""
    owners: frozenset[int] = frozenset()

    @property
    def changed_at(self) -> float:
        """When its newest file was written last, in Unix seconds."""
        return max((one.changed_ns for one in self.files), default=0) / 1e9

    def is_recorded_by(self, manifest: Manifest) -> bool:
        """Return True if the manifest describes these files, judged by sizes and newest time."""
        recorded = sorted((entry.path, entry.bytes) for entry in manifest.files)
        return (
            recorded == sorted((one.path, one.bytes) for one in self.files)
            and manifest.staged_at == self.changed_at
        )


class CheckpointPattern:
    """`program.checkpoints` of a spec, for one working directory.

    With `is_overwritten`, it is one path, whose name has no step. `owners` are the users whose
    files count, besides this process's user and root.
    """

    def __init__(
        self, program: Program, working_directory: str, *, owners: Collection[int] = ()
    ) -> None:
        self._owners = frozenset({os.geteuid(), 0, *owners})
        whole = Path(working_directory) / program.checkpoints
        self.text, self.folder = str(whole), whole.parent
        self.is_overwritten = program.is_overwritten
        self._name = re.compile(_DIGITS.join(map(re.escape, whole.name.split(STEP_FIELD))))

    def step_of(self, name: str) -> int | None:
        """Return the step in the name of a file or directory; None if the name does not match.

        It is 0 for a path without a step.
        """
        match = self._name.fullmatch(name)
        if match is None or self.is_overwritten:
            return None if match is None else 0
        return step if (step := int(match["step"])) <= STEP_MAX else None

    def find(self) -> list[OwnCheckpoint]:
        """Return what matches the pattern now, by step. Raises `OSError` if storage fails."""
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        steps = {name: step for name in names if (step := self.step_of(name)) is not None}
        ordered = sorted(steps, key=lambda name: (steps[name], name))
        found = (look_at(self.folder / name, steps[name], self._owners) for name in ordered)
        return [one for one in found if one is not None]


def look_at(path: Path, step: int, owners: frozenset[int]) -> OwnCheckpoint | None:
    """Return the checkpoint at `path`; None if it was deleted meanwhile.

    It has a problem if another user than the `owners` owns it, or anything in it.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    problem = "" if status.st_uid in owners else f"belongs to another user (uid {status.st_uid})"
    made = partial(OwnCheckpoint, step=step, path=path, owners=owners)
    if stat.S_ISREG(status.st_mode):
        one = FileStamp(path.name, status.st_size, status.st_mtime_ns)
        return made(folder=path.parent, files=(one,), problem=problem)
    if problem or not stat.S_ISDIR(status.st_mode):
        return made(folder=path, files=(), problem=problem or "is a link or a special file")
    files: list[FileStamp] = []
    for inside, each in _walk(path):
        if each.st_uid not in owners:
            problem = f"contains {inside} of another user (uid {each.st_uid})"
            break
        if stat.S_ISDIR(each.st_mode) and not inside.endswith(TOO_DEEP):
            continue
        if not stat.S_ISREG(each.st_mode):
            problem = problem or f"contains the link or special file {inside}"
        elif len(files) == FILES_MAX:
            problem = f"contains more than {FILES_MAX} files"
            break
        else:
            files.append(FileStamp(inside, each.st_size, each.st_mtime_ns))
    ordered = tuple(sorted(files, key=lambda one: one.path))
    return made(folder=path, files=ordered, problem=problem)


def number(found: OwnCheckpoint, known: Manifest | None, step: int, least: int) -> OwnCheckpoint:
    """Return a checkpoint that the program overwrites, with the step of its present files.

    That is the step in its record, `known`, or `step`, or `least` if that is larger.
    """
    if known is not None and found.is_recorded_by(known):
        return replace(found, step=known.step)
    return replace(found, step=min(max(step, least), STEP_MAX))


def _walk(
    folder: Path, inside: str = "", depth: int = DEPTH_MAX
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (path, status) of everything in `folder`, without following links.

    What disappears meanwhile is left out. The path of a folder that is too deep ends in `TOO_DEEP`.
    """
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            status = entry.stat(follow_symlinks=False)
            is_folder = stat.S_ISDIR(status.st_mode)
            yield f"{inside}{entry.name}" + (TOO_DEEP if is_folder and not depth else ""), status
            if is_folder and depth:
                yield from _walk(Path(entry.path), f"{inside}{entry.name}/", depth - 1)


def why_incomplete(
    found: OwnCheckpoint,
    program: Program,
    *,
    still_s: float,
    was_seen: bool,
    is_old: bool = False,
    ended: str = "",
) -> str:
    """Return why a checkpoint does not count as complete; empty if it does.

    It has not changed for `still_s` seconds, as this process saw it. With `was_seen`, this process
    saw it appear or change. With `is_old`, it is from before the launch. `ended` is empty while the
    program runs, `exited` if it exited with status 0, else `died`. A dead program changes
    nothing, so silence proves nothing: only a file of `complete` does, or a program that exited
    with status 0.
    """
    if found.problem:
        return found.problem
    if missing := sorted(set(program.complete) - {one.path for one in found.files}):
        return f"{missing[0]} is missing"
    if not found.files:
        return "contains no file"
    # Silence proves nothing about files that an earlier launch may have left half written, see
    # decision 76.
    if not was_seen and not program.complete:
        return "it was there before the program started, so nothing shows that it is complete"
    if ended or is_old:
        is_proved = ended == "exited" or bool(program.complete)
        return "" if is_proved else "the program died while it may still have been writing it"
    left_s = program.settle_s - still_s
    return f"its files changed less than {program.settle_s:g} s ago" if left_s > 0 else ""


def seal(found: OwnCheckpoint, goes_on: Callable[[], bool]) -> tuple[FileEntry, ...]:
    """Make the files durable, read them, and return their entries for the manifest.

    Raises `CheckpointError` if they change meanwhile, `InterruptedError` once `goes_on` returns
    False, and `OSError` if storage fails.
    """
    entries = tuple(_seal_file(found, one, goes_on) for one in found.files)
    folders = {(found.folder / one.path).parent for one in found.files}
    # The names as well, up to that of the checkpoint: the program may not have called fsync.
    for folder in sorted({*folders, found.folder, found.path.parent}):
        durable.fsync_directory(folder)
    # A program may write again while its files are read. Then the digests describe no state that
    # ever existed.
    again = look_at(found.path, found.step, found.owners)
    if again is None or again.problem or again.files != found.files:
        raise CheckpointError(f"{found.path}: the program changed its files while they were read")
    return entries


def _seal_file(found: OwnCheckpoint, one: FileStamp, goes_on: Callable[[], bool]) -> FileEntry:
    try:
        handle = reading.open_regular(found.folder / one.path, below=found.folder)
    except (FileNotFoundError, ForeignFileError) as error:
        raise CheckpointError(f"{found.path}: {one.path} was replaced: {error}") from error
    try:
        # Checked on the open descriptor, because the file may have been replaced since the listing.
        if (owner := os.fstat(handle).st_uid) not in found.owners:
            raise CheckpointError(f"{found.path}: {one.path} belongs to another user (uid {owner})")
        # Durable before the manifest is written, as for Holdfast's own files.
        os.fsync(handle)
        checksum, left = FileChecksum(one.bytes), one.bytes
        while left and goes_on():
            if not (piece := os.read(handle, min(READ_BYTES, left))):
                raise CheckpointError(f"{found.path}: {one.path} became shorter")
            checksum.update(piece)
            left -= len(piece)
    finally:
        os.close(handle)
    if left:
        raise InterruptedError(f"{found.path}: no time was left to read its files")
    return FileEntry.of(one.path, one.bytes, checksum)


def recorded(paths: RunPaths, pattern: CheckpointPattern) -> dict[Path, Manifest]:
    """Return the newest manifest in the run of each checkpoint that the pattern describes."""
    found: dict[Path, Manifest] = {}
    for directory in paths.list_checkpoints():
        with contextlib.suppress(DamagedCheckpointError, OSError):
            manifest = read_manifest(directory)
            if manifest is not None and (path := path_of(manifest, pattern)) is not None:
                found[path] = manifest
    return found


def path_of(manifest: Manifest, pattern: CheckpointPattern) -> Path | None:
    """Return the path of the program's checkpoint that a manifest is about."""
    if manifest.source is None:
        return None
    source = Path(manifest.source)
    if source == pattern.folder and len(manifest.files) == 1:
        return source / manifest.files[0].path
    return source if source.parent == pattern.folder else None


def newest_before(
    manifests: Sequence[Manifest], step: int, *, or_at: bool = False
) -> Manifest | None:
    """Return the newest manifest of a step before `step`, or with `or_at` of a step up to it."""
    limit = step if or_at else step - 1
    fitting = [one for one in manifests if one.step <= limit]
    return max(fitting, key=lambda one: (one.step, one.attempt, one.launch), default=None)
