"""Fetch a checkpoint from the mirror: check each file as it is written, write the manifest last.

Until the manifest is there the directory does not count, and a fetch that was cut off continues
with the files that are whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from holdfast.contracts.disk.durable import (
    create_bytes,
    fsync_directory,
    make_directory,
    write_bytes,
)
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.mirrors import MirrorRecord, checkpoint_key, write_record
from holdfast.contracts.disk.paths import FETCHING, MANIFEST, CheckpointName
from holdfast.contracts.errors import DamagedCheckpointError
from holdfast.trainer.mirror.store import EntryCheck, MirrorStore, write_all
from holdfast.trainer.mirror.upload import Retries

FILES_AT_ONCE: Final = 4


@dataclass(frozen=True)
class Remote:
    """A checkpoint that is committed in the mirror. `content` is the manifest file's bytes."""

    manifest: Manifest
    content: bytes

    @property
    def name(self) -> CheckpointName:
        facts = self.manifest
        return CheckpointName(facts.step, facts.attempt, facts.launch)


def list_remote(store: MirrorStore, *, retries: Retries) -> list[CheckpointName]:
    """Return the checkpoints with files in the mirror, committed or not, oldest first."""
    found = retries.do(store.folders, "checkpoints")
    return sorted(n for n in map(CheckpointName.parse, found) if n is not None)


def read_remote(
    store: MirrorStore, name: CheckpointName, run_uid: str | None, *, retries: Retries
) -> Remote | None:
    """Return the checkpoint `name` of the mirror, or None if it was never committed there.

    Raises `DamagedCheckpointError` if its manifest belongs to another name or run.
    """
    content = retries.do(store.read, checkpoint_key(str(name)))
    if content is None:
        return None
    try:
        remote = Remote(Manifest.model_validate_json(content), content)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise _damaged(name, f"its manifest cannot be read: {problem}") from error
    if remote.name != name or remote.manifest.name != str(name):
        raise _damaged(name, f"it has the manifest of {remote.manifest.name}")
    if run_uid is not None and remote.manifest.run_uid != run_uid:
        raise _damaged(name, "it has the manifest of another run")
    return remote


def newest_remote(
    store: MirrorStore,
    run_uid: str,
    *,
    newer_than: CheckpointName | None,
    without: Collection[str],
    retries: Retries,
) -> tuple[Remote | None, list[str]]:
    """Return the newest valid checkpoint of the mirror, and a line for each one skipped."""
    skipped: list[str] = []
    for name in reversed(list_remote(store, retries=retries)):
        if newer_than is not None and name <= newer_than:
            break
        if str(name) in without:
            continue
        try:
            remote = read_remote(store, name, run_uid, retries=retries)
        except DamagedCheckpointError as error:
            skipped.append(f"{name} in the mirror: {'; '.join(error.damaged)}")
            continue
        if remote is not None:
            return remote, skipped
        skipped.append(f"{name} in the mirror: never committed there")
    return None, skipped


def fetch(
    store: MirrorStore, remote: Remote, directory: Path, *, url: str, retries: Retries
) -> int:
    """Fetch a checkpoint into `directory` and return the bytes that were read from the mirror.

    Complete files stay as they are. Raises `MirrorError` or `DamagedCheckpointError` if the mirror
    does not have what its manifest lists, and `OSError` if a file cannot be written here. The
    directory then has no manifest and does not count as a checkpoint.
    """
    began = time.monotonic()
    begin_fetch(remote, directory)
    read_bytes = fetch_files(store, remote, remote.manifest.files, directory, retries=retries)
    finish_fetch(remote, directory, url=url, seconds=time.monotonic() - began)
    return read_bytes


def begin_fetch(remote: Remote, directory: Path) -> None:
    """Create the folders, and mark the directory as one that is being fetched."""
    make_directory(directory)
    # The mark tells a fetch that was cut off from a save that was never committed.
    write_bytes(directory / FETCHING, b"{}\n")
    for parent in _parents(directory, remote.manifest.files):
        make_directory(parent)


def fetch_files(
    store: MirrorStore,
    remote: Remote,
    files: Sequence[FileEntry],
    directory: Path,
    *,
    retries: Retries,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Fetch `files`, which are some of the checkpoint's, and return the bytes read. They are
    durable then. Several processes may fetch different files at the same time.

    `progress` is called with the number of bytes of each piece. Raises as `fetch`.
    """

    def bring(entry: FileEntry) -> int:
        return retries.do(_bring, store, remote, entry, directory, progress)

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="fetch") as pool:
        read_bytes = sum(pool.map(bring, files))
    # Durable before the manifest, which `finish_fetch` writes.
    for parent in _parents(directory, files):
        fsync_directory(parent)
    return read_bytes


def finish_fetch(remote: Remote, directory: Path, *, url: str, seconds: float) -> None:
    """Make the directory a checkpoint once all its files are durable: write the manifest."""
    size = remote.manifest.bytes
    record = MirrorRecord(url=url, bytes=size, seconds=round(seconds, 6), mirrored_at=time.time())
    write_record(directory, record)
    # Last, and exclusive: another process may have fetched the same checkpoint.
    create_bytes(directory / MANIFEST, remote.content)
    (directory / FETCHING).unlink(missing_ok=True)


def _parents(directory: Path, files: Iterable[FileEntry]) -> set[Path]:
    return {(directory / entry.path).parent for entry in files}


def _bring(
    store: MirrorStore,
    remote: Remote,
    entry: FileEntry,
    directory: Path,
    progress: Callable[[int], None] | None,
) -> int:
    """Fetch one file under a temporary name and rename it when every block is correct."""
    target = directory / entry.path
    took = progress or (lambda _count: None)
    # A fetch that was cut off continues with the files that are whole.
    if _is_whole(target, entry, took):
        return 0
    temporary = target.with_name(f"{target.name}.tmp")
    check = EntryCheck(entry)
    with open(temporary, "wb", buffering=0) as stream:
        for piece in store.pieces(checkpoint_key(remote.manifest.name, entry.path), entry.bytes):
            check.update(piece)
            write_all(stream.fileno(), piece)
            took(len(piece))
        check.finish()
        # The bytes before the name, so a file with its final name is whole after a power cut.
        os.fsync(stream.fileno())
    os.replace(temporary, target)
    return entry.bytes


def _is_whole(path: Path, entry: FileEntry, took: Callable[[int], None]) -> bool:
    """Return True if the file at `path` has exactly the committed bytes."""
    try:
        if path.stat().st_size != entry.bytes:
            return False
        check = EntryCheck(entry)
        with open(path, "rb", buffering=0) as stream:
            while piece := stream.read(1 << 20):
                check.update(piece)
                took(len(piece))
        check.finish()
    except (OSError, DamagedCheckpointError):
        return False
    return True


def _damaged(name: CheckpointName, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{name} in the mirror is not used: {problem}", damaged=[problem])
