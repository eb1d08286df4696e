"""Read the manifests of checkpoints, never their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.errors import DamagedCheckpointError


def committed_checkpoints(paths: RunPaths) -> list[Manifest]:
    """Return the manifests of the run's committed checkpoints, oldest step first.

    Damaged checkpoints are skipped here; `holdfast verify` reports them.
    """
    return list(_manifests(paths.list_checkpoints()))


def newest_committed(paths: RunPaths, attempt: int) -> Manifest | None:
    """Return the manifest of the newest step that `attempt` committed, or None."""
    own = [
        directory
        for directory in reversed(paths.list_checkpoints())
        if (name := CheckpointName.parse(directory.name)) and name.attempt == attempt
    ]
    return next(_manifests(own), None)


def _manifests(directories: Iterable[Path]) -> Iterator[Manifest]:
    for directory in directories:
        try:
            manifest = read_manifest(directory)
        except DamagedCheckpointError:
            continue
        if manifest is not None:
            yield manifest
