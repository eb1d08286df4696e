"""A mirror on any other fsspec file system. It uses only what all fsspec file systems support.

Such a store may show an object before it is complete, and may not support exclusive creation. A
file is therefore written under a temporary name, read back and compared, and then moved. So is a
manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from holdfast.contracts.disk.manifest import FileEntry
from holdfast.contracts.errors import MirrorError
from holdfast.trainer.mirror import store

T = TypeVar("T")
UNFINISHED = ".uploading"
CALLS_AT_ONCE = 8


class FsspecStore:
    """Any fsspec file system. Its calls run in threads, so that each can time out."""

    def __init__(self, url: str) -> None:
        self._url = url
        # A spec has no place for library options beyond those of the environment.
        with store.wrap_errors(url, "opening", ImportError, ValueError, OSError, is_passing=False):
            # Without the cache of listings: another node's files would stay invisible.
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        self._pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="mirror")

    def put_file(
        self, key: str, path: Path, entry: FileEntry, former: store.FormerFile | None = None
    ) -> int:
        del former  # Such a store has no call that copies a part.
        target = self._at(key)
        temporary = f"{target}{UNFINISHED}"
        self._call(f"creating the folder of {key}", self._make_parent, target)
        stream = self._call(f"writing {key}", self._fs.open, temporary, "wb")
        try:
            for part in store.checked_parts(path, entry):
                self._call(f"writing {key}", stream.write, part)
            self._call(f"writing {key}", stream.close)
            check = store.EntryCheck(entry)
            # Read back, because such a store need not check what it gets, see decision 13.
            for piece in self._pieces_of(temporary, key):
                check.update(piece)
            check.finish()
        except BaseException:
            self._forget(stream, temporary)
            raise
        self._call(f"renaming {key}", self._fs.mv, temporary, target)
        return 0

    def put_new(self, key: str, content: bytes) -> bool:
        target = self._at(key)
        self._call(f"creating the folder of {key}", self._make_parent, target)
        # Not exclusive, as the store may have no such call. Only node 0 writes a manifest.
        if self._call(f"looking for {key}", self._fs.exists, target):
            return False
        temporary = f"{target}{UNFINISHED}"
        self._call(f"writing {key}", self._fs.pipe_file, temporary, content)
        if self._call(f"reading {key} back", self._fs.cat_file, temporary) != content:
            error = f"{self._url}: {key} was written, but other bytes were read back"
            raise MirrorError(error, is_passing=True)
        self._call(f"renaming {key}", self._fs.mv, temporary, target)
        return True

    def put(self, key: str, content: bytes) -> None:
        target = self._at(key)
        self._call(f"creating the folder of {key}", self._make_parent, target)
        self._call(f"writing {key}", self._fs.pipe_file, target, content)

    def read(self, key: str) -> bytes | None:
        found: bytes | None = self._call(f"reading {key}", self._read, self._at(key))
        return found

    def pieces(self, key: str, size_bytes: int) -> Iterator[bytes]:
        return self._pieces_of(self._at(key), key)

    def sizes(self, prefix: str) -> dict[str, int]:
        found = self._call(f"listing {prefix}", self._find, self._at(prefix))
        start = len(self._root.rstrip("/")) + 1
        return {
            name[start:]: int(facts["size"])
            for name, facts in found.items()
            if not name.endswith(UNFINISHED)
        }

    def folders(self, prefix: str) -> list[str]:
        inside = len(prefix.rstrip("/")) + 1
        return sorted({key[inside:].split("/")[0] for key in self.sizes(prefix)})

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._call(f"deleting {key}", self._remove, self._at(key))

    def abort_uploads(self, prefix: str) -> int:
        parent = self._at(prefix).rpartition("/")[0]
        found = self._call(f"listing {prefix}", self._find, parent)
        doomed = [n for n in found if n.startswith(self._at(prefix)) and n.endswith(UNFINISHED)]
        for name in doomed:
            self._call(f"deleting {name}", self._remove, name)
        return len(doomed)

    # --- internals ------------------------------------------------------------------------

    def _at(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"

    def _call(self, doing: str, act: Callable[..., T], *given: Any) -> T:
        """Run one call for at most `CALL_TIMEOUT_S`. A call that hangs only blocks its thread."""
        errors = (OSError, FutureTimeoutError, ValueError, NotImplementedError)
        with store.wrap_errors(self._url, doing, *errors):
            return self._pool.submit(act, *given).result(store.CALL_TIMEOUT_S)

    def _pieces_of(self, name: str, key: str) -> Iterator[bytes]:
        stream = self._call(f"reading {key}", self._fs.open, name, "rb")
        try:
            while piece := self._call(f"reading {key}", stream.read, store.PART_BYTES):
                yield piece
        finally:
            self._call(f"reading {key}", stream.close)

    def _make_parent(self, name: str) -> None:
        self._fs.makedirs(name.rpartition("/")[0], exist_ok=True)

    def _find(self, name: str) -> dict[str, dict[str, Any]]:
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(name, detail=True)
        except FileNotFoundError:
            return {}
        return found

    def _read(self, name: str) -> bytes | None:
        try:
            content: bytes = self._fs.cat_file(name)
        except FileNotFoundError:
            return None
        return content

    def _remove(self, name: str) -> None:
        try:
            self._fs.rm_file(name)
        except FileNotFoundError:
            return

    def _forget(self, stream: Any, name: str) -> None:
        """Remove the rest of a failed upload, as far as the store allows."""
        for act in (stream.close, lambda: self._remove(name)):
            try:
                self._call("clearing up", act)
            except MirrorError:
                continue
