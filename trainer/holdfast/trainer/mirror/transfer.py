"""Move one checkpoint to the mirror or from it: each file checked, the manifest last.

A node sends the files that it wrote. Node 0 creates the manifest once the mirror has all files. You
can repeat an upload after a crash: an object is complete or absent, and the manifest is created
exclusively.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError

from holdfast.contracts.disk import durable, mirrors
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.paths import FETCHING, MANIFEST, CheckpointName
from holdfast.contracts.errors import DamagedCheckpointError, MirrorError
from holdfast.trainer.mirror.store import (
    EntryCheck,
    FormerFile,
    MirrorStore,
    equal_parts,
    write_all,
)

P = ParamSpec("P")
T = TypeVar("T")

TRIES_MAX: Final = 8
PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0


def open_store(url: str) -> MirrorStore:
    """Open the store at `url` by its scheme: a directory, S3, or another fsspec file system.

    Libraries are imported here, at first use. Raises `MirrorError` if one is missing.
    """
    scheme = urlsplit(url).scheme
    if scheme == "file":
        from holdfast.trainer.mirror.directory import DirectoryStore

        return DirectoryStore(url)
    if scheme in {"s3", "s3a"}:
        from holdfast.trainer.mirror.s3 import S3Store

        return S3Store(url)
    from holdfast.trainer.mirror.any_filesystem import FsspecStore

    return FsspecStore(url)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A committed checkpoint to copy, where its files are, and which of them this node sends."""

    files: Path
    manifest: Manifest
    content: bytes
    own: frozenset[str]

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def entries(self) -> list[FileEntry]:
        return [entry for entry in self.manifest.files if entry.path in self.own]


def read_upload(
    directory: Path, own: Collection[str] | None, files: Path | None = None
) -> Upload | None:
    """Return what to copy of the checkpoint in `directory`, or None if it is not committed.

    `own` are the paths of this node's files, None for all that exist. `files` is their directory
    if it is not `directory`.
    """
    try:
        content = (directory / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    manifest = Manifest.model_validate_json(content)
    paths = frozenset(entry.path for entry in manifest.files)
    place = directory if files is None else files
    ours = {p for p in paths if (place / p).exists()} if own is None else paths & set(own)
    return Upload(files=place, manifest=manifest, content=content, own=frozenset(ours))


def send_files(
    store: MirrorStore, upload: Upload, *, retries: Retries, former: Manifest | None = None
) -> int:
    """Copy those files of this node that the mirror lacks, and return the bytes that were sent.

    Parts that equal those of `former`, a checkpoint in the mirror, need not be sent.
    Raises `MirrorError` if the mirror refuses or does not answer, `DamagedCheckpointError` if a
    file here differs from the committed one, and `OSError` if it cannot be read.
    """
    # A deletion may have overtaken this upload, which waits in a queue.
    _refuse_deleted(store, upload, retries)
    there = retries.do(store.sizes, mirrors.checkpoint_folder(upload.name))
    sent = 0
    for entry in upload.entries:
        key = mirrors.checkpoint_key(upload.name, entry.path)
        # An object is complete or absent, so the size is enough, see decision 13.
        if there.get(key) == entry.bytes:
            continue
        known = _former_file(entry, former)
        sent += entry.bytes
        sent -= retries.do(store.put_file, key, upload.files / entry.path, entry, known)
    return sent


def _former_file(entry: FileEntry, former: Manifest | None) -> FormerFile | None:
    """Return the file of `former` that has parts of this one, or None."""
    files = former.files if former is not None else ()
    other = next((one for one in files if one.path == entry.path), None)
    if former is None or other is None or not (parts := equal_parts(entry, other)):
        return None
    return FormerFile(mirrors.checkpoint_key(former.name, other.path), parts)


def missing_files(store: MirrorStore, upload: Upload, *, retries: Retries) -> list[str]:
    """Return the checkpoint's files, of all nodes, that the mirror lacks at their full size."""
    there = retries.do(store.sizes, mirrors.checkpoint_folder(upload.name))
    return [
        entry.path
        for entry in upload.manifest.files
        if there.get(mirrors.checkpoint_key(upload.name, entry.path)) != entry.bytes
    ]


def commit(store: MirrorStore, upload: Upload, *, retries: Retries) -> None:
    """Create the manifest in the mirror, which commits the copy.

    Raises `MirrorError` if the mirror has another checkpoint of that name, or deleted this one.
    """
    # Again, because the other nodes' files can take half an hour.
    _refuse_deleted(store, upload, retries)
    key = mirrors.checkpoint_key(upload.name)
    # The manifest has the same bytes everywhere, so a request whose answer was lost can be
    # repeated, see decision 13.
    if retries.do(store.put_new, key, upload.content):
        return
    # An earlier try may have succeeded although its answer was lost.
    if retries.do(store.read, key) != upload.content:
        raise MirrorError(
            f"{upload.name}: the mirror has another checkpoint of that name. Nothing was replaced. "
            "Two runs must not share a name, an identity and a mirror"
        )


def _refuse_deleted(store: MirrorStore, upload: Upload, retries: Retries) -> None:
    if retries.do(store.read, mirrors.tombstone_key(upload.name)) is not None:
        raise MirrorError(f"{upload.name} was deleted from the mirror and is not uploaded again")


class Retries:
    """Retries a request with growing pauses while its error may be temporary."""

    def __init__(
        self,
        *,
        pauses_s: Iterable[float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._sleep = sleep
        self._pauses_s = tuple(default_pauses() if pauses_s is None else pauses_s)

    def do(self, act: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Return the result of `act`. Raises its `MirrorError` if permanent or retries run out."""
        for pause_s in self._pauses_s:
            try:
                return act(*given, **named)
            except MirrorError as error:
                if not error.is_passing:
                    raise
            self._sleep(pause_s)
        return act(*given, **named)


def default_pauses() -> list[float]:
    """Return the seconds between retries. They double, with jitter so that nodes spread out."""
    return [
        min(PAUSE_FIRST_S * 2**number, PAUSE_MAX_S) * random.uniform(0.5, 1.0)
        for number in range(TRIES_MAX - 1)
    ]


# --- fetch ------------------------------------------------------------------------------------

# Until the manifest is there the directory does not count, and a fetch that was cut off continues
# with the files that are whole.


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
    content = retries.do(store.read, mirrors.checkpoint_key(str(name)))
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
    durable.make_directory(directory)
    # The mark tells a fetch that was cut off from a save that was never committed.
    durable.write_bytes(directory / FETCHING, b"{}\n")
    for parent in _parents(directory, remote.manifest.files):
        durable.make_directory(parent)


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
        durable.fsync_directory(parent)
    return read_bytes


def finish_fetch(remote: Remote, directory: Path, *, url: str, seconds: float) -> None:
    """Make the directory a checkpoint once all its files are durable: write the manifest."""
    size = remote.manifest.bytes
    record = mirrors.MirrorRecord(
        url=url, bytes=size, seconds=round(seconds, 6), mirrored_at=time.time()
    )
    mirrors.write_record(directory, record)
    # Last, and exclusive: another process may have fetched the same checkpoint.
    durable.create_bytes(directory / MANIFEST, remote.content)
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
        for piece in store.pieces(
            mirrors.checkpoint_key(remote.manifest.name, entry.path), entry.bytes
        ):
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
