"""Detects from outside when a checkpoint became durable. Does not import torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.errors import SaveError

COMMIT_TIMEOUT_S: Final = 240.0
POLL_S: Final = 0.0005


def wait_until_durable(run: RunPaths, step: int, timeout_s: float = COMMIT_TIMEOUT_S) -> float:
    """Return the Unix time at which a commit of `step` or a later one was first seen."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up:
        if newest_durable(run) >= step:
            return time.time()
        time.sleep(POLL_S)
    raise SaveError(f"step {step} was not committed within {timeout_s:.0f} s; see flusher.log")


def newest_durable(run: RunPaths) -> int:
    """Return the step of the newest commit, or -1.

    `latest` moves when the manifest and its name in the directory are durable, not when they first
    become visible.
    """
    try:
        name = CheckpointName.parse(os.readlink(run.latest))
    except FileNotFoundError:
        return -1
    return name.step if name else -1


def data_fsynced_at(directory: Path) -> float:
    """Return the Unix time of the last data fsync of a committed checkpoint, from its manifest."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise SaveError(f"`latest` points to {directory}, which has no manifest")
    return manifest.staged_at + manifest.flush_s
