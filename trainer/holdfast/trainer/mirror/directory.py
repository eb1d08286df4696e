"""A mirror in a directory of a shared file system: `file:///shared/directory`.

A file gets its own name only when it is durable, and new names are created exclusively.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from holdfast.contracts.disk import durable, reading
from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.errors import MirrorError
from holdfast.trainer.mirror import store

# The suffix of a file that is being written. Only a crash leaves such a file.
UNFINISHED = ".uploading"
# From linux/fs.h: _IOW(0x94, 13, struct file_clone_range), a structure of 32 bytes.
FICLONERANGE: Final = 0x4020940D


class DirectoryStore:
    """A directory, used with durable writes, renames and exclusive links."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._root = Path(unquote(urlsplit(url).path))
        # False once the file system has refused to share blocks between files.
        self._shares = True
        # Where many users can write, another user may have created the directory first.
        if self._root.exists() and not reading.is_mine(self._root):
            raise MirrorError(
                f"{url}: belongs to another user, so it is not trusted. Name a mirror that others "
                "cannot write, or move that directory away"
            )

    def put_file(
        self, key: str, path: Path, entry: FileEntry, former: store.FormerFile | None = None
    ) -> int:
        target = self._root / key
        temporary = target.with_name(f"{target.name}{UNFINISHED}")
        shared = 0
        with store.wrap_errors(self._url, f"writing {key}", OSError):
            durable.make_directory(target.parent)
            try:
                with (
                    open(temporary, "w+b", buffering=0) as stream,
                    self._former(former) as source,
                ):
                    at = 0
                    for part in store.checked_parts(path, entry):
                        is_equal = former is not None and at in former.parts
                        if is_equal and self._share(source, stream.fileno(), at, part):
                            shared += len(part)
                        else:
                            os.lseek(stream.fileno(), at, os.SEEK_SET)
                            store.write_all(stream.fileno(), part)
                        at += len(part)
                    # The same order as for the run's own files: bytes, name, and `fsync` of the
                    # directory.
                    os.fsync(stream.fileno())
                os.replace(temporary, target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            durable.fsync_directory(target.parent)
        return shared

    def put_new(self, key: str, content: bytes) -> bool:
        target = self._root / key
        with store.wrap_errors(self._url, f"creating {key}", OSError):
            durable.make_directory(target.parent)
            # A manifest commits the copy, so it must not replace another one.
            return durable.create_bytes(target, content)

    def put(self, key: str, content: bytes) -> None:
        target = self._root / key
        with store.wrap_errors(self._url, f"writing {key}", OSError):
            durable.make_directory(target.parent)
            durable.write_bytes(target, content)

    def read(self, key: str) -> bytes | None:
        with store.wrap_errors(self._url, f"reading {key}", OSError):
            try:
                return (self._root / key).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        with (
            store.wrap_errors(self._url, f"reading {key}", OSError),
            open(self._root / key, "rb", buffering=0) as stream,
        ):
            while piece := stream.read(store.PART_BYTES):
                yield piece

    def sizes(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        with store.wrap_errors(self._url, f"listing {prefix}", OSError):
            for folder, _, names in os.walk(self._root / prefix):
                for name in names:
                    path = Path(folder) / name
                    if not name.endswith(UNFINISHED):
                        # The file may be deleted between the listing and `stat`.
                        with contextlib.suppress(FileNotFoundError):
                            key = path.relative_to(self._root).as_posix()
                            found[key] = path.stat().st_size
        return found

    def folders(self, prefix: str) -> list[str]:
        with store.wrap_errors(self._url, f"listing {prefix}", OSError):
            try:
                return sorted(e.name for e in os.scandir(self._root / prefix) if e.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, keys: Sequence[str]) -> None:
        with store.wrap_errors(self._url, "deleting", OSError):
            parents = set()
            for key in keys:
                path = self._root / key
                path.unlink(missing_ok=True)
                parents.add(path.parent)
            for parent in sorted(parents, key=lambda p: len(p.parts), reverse=True):
                self._remove_if_empty(parent)

    def abort_uploads(self, prefix: str) -> int:
        count = 0
        with store.wrap_errors(self._url, f"clearing {prefix}", OSError):
            place = self._root / prefix
            folder = place if place.is_dir() else place.parent
            for path in sorted(folder.rglob(f"*{UNFINISHED}")):
                if path.as_posix().startswith(place.as_posix()):
                    path.unlink(missing_ok=True)
                    count += 1
        return count

    @contextlib.contextmanager
    def _former(self, former: store.FormerFile | None) -> Iterator[int]:
        """Open the file that the mirror has, or yield -1 without one or without the means."""
        handle = -1
        if former is not None and self._shares:
            # It may be deleted meanwhile.
            with contextlib.suppress(OSError):
                handle = os.open(self._root / former.key, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            yield handle
        finally:
            if handle >= 0:
                os.close(handle)

    def _share(self, source: int, target: int, at: int, part: bytes) -> bool:
        """Let `target` share the blocks of `source` at this place. Return False if it does not.

        The call is FICLONERANGE of Linux, for which XFS and Btrfs need no space and move no bytes.
        The part is then read back, because the mirror's file may have been damaged.
        """
        if source < 0 or not self._shares:
            return False
        try:
            fcntl.ioctl(target, FICLONERANGE, struct.pack("qQQQ", source, at, len(part), at))
        except OSError:
            self._shares = False
            return False
        return os.pread(target, len(part), at) == part

    def _remove_if_empty(self, folder: Path) -> None:
        """Remove empty directories, because an object store would not have them either."""
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent
