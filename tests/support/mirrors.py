"""Committed checkpoints on disk, and uploaders in separate processes, for tests of mirrors."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

from holdfast.contracts.disk.digests import FileChecksum
from holdfast.contracts.disk.manifest import FileEntry, Manifest
from holdfast.contracts.disk.paths import CheckpointName

UID = "a" * 32
WAIT_S = 120.0
# The smallest part size that S3 accepts, so that a small file has several parts.
PART_BYTES = 5 * 1024 * 1024
SIZES = {"small": 1000, "empty": 0, "pp0/large": PART_BYTES + 17}


def make_checkpoint(
    run: Path,
    step: int,
    sizes: Mapping[str, int] | None = None,
    contents: Mapping[str, bytes] | None = None,
) -> Path:
    """A committed checkpoint with these or random bytes; returns its directory."""
    name = CheckpointName(step, 1, 1)
    directory = run / "checkpoints" / str(name)
    entries = []
    if contents is None:
        sizes = SIZES if sizes is None else sizes
        contents = {path: os.urandom(size) for path, size in sizes.items()}
    for path, content in contents.items():
        size = len(content)
        checksum = FileChecksum(size)
        checksum.update(content)
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
        entries.append(FileEntry.of(path, size, checksum))
    manifest = Manifest(
        run_uid=UID,
        run=run.name,
        name=str(name),
        step=step,
        attempt=1,
        launch=1,
        world_size=1,
        files=tuple(entries),
        committed_at=time.time(),
    )
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    return directory


def fork_server() -> ForkServerContext:
    """A fork server that has imported the libraries and has none of pytest's threads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["s3fs", "holdfast.trainer.mirror"])
    return context


def push(variables: Mapping[str, str], location: str, directory: Path) -> None:
    """Upload one checkpoint without retries; runs in a child process."""
    from holdfast.trainer.mirror import store as mirror_store
    from holdfast.trainer.mirror.transfer import (
        Retries,
        commit,
        open_store,
        read_upload,
        send_files,
    )

    os.environ.update(variables)
    mirror_store.PART_BYTES = PART_BYTES  # type: ignore[misc]
    store, retries = open_store(location), Retries(pauses_s=())
    upload = read_upload(directory, None)
    assert upload is not None
    send_files(store, upload, retries=retries)
    commit(store, upload, retries=retries)


def start(
    context: ForkServerContext, target: Callable[..., None], *given: object
) -> ForkServerProcess:
    """Start a child process; join it within `WAIT_S`."""
    process = context.Process(target=target, args=given, daemon=True)
    process.start()
    return process
