"""Opens the store of a mirror by its URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from holdfast.trainer.mirror.store import MirrorStore


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
