"""Upload one checkpoint to the mirror: each file checked, the manifest last.

A node sends the files that it wrote. Node 0 creates the manifest once the mirror has all files. You
can repeat an upload after a crash: an object is complete or absent, and the manifest is created
exclusively.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.mirrors import checkpoint_folder, checkpoint_key, tombstone_key
from holdfast.contracts.disk.paths import MANIFEST
from holdfast.contracts.errors import MirrorError
from holdfast.trainer.mirror.store import FormerFile, MirrorStore, equal_parts

P = ParamSpec("P")
T = TypeVar("T")

TRIES_MAX: Final = 8
PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0


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
        """The files that this node sends."""
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
    there = retries.do(store.sizes, checkpoint_folder(upload.name))
    sent = 0
    for entry in upload.entries:
        key = checkpoint_key(upload.name, entry.path)
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
    return FormerFile(checkpoint_key(former.name, other.path), parts)


def missing_files(store: MirrorStore, upload: Upload, *, retries: Retries) -> list[str]:
    """Return the checkpoint's files, of all nodes, that the mirror lacks at their full size."""
    there = retries.do(store.sizes, checkpoint_folder(upload.name))
    return [
        entry.path
        for entry in upload.manifest.files
        if there.get(checkpoint_key(upload.name, entry.path)) != entry.bytes
    ]


def commit(store: MirrorStore, upload: Upload, *, retries: Retries) -> None:
    """Create the manifest in the mirror, which commits the copy.

    Raises `MirrorError` if the mirror has another checkpoint of that name, or deleted this one.
    """
    # Again, because the other nodes' files can take half an hour.
    _refuse_deleted(store, upload, retries)
    key = checkpoint_key(upload.name)
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
    if retries.do(store.read, tombstone_key(upload.name)) is not None:
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
