"""Read the manifests of checkpoints, never their tensors."""

from __future__ import annotations

from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.contracts.errors import DamagedCheckpointError


def committed_checkpoints(paths: RunPaths) -> list[Manifest]:
    """Return the manifests of the run's committed checkpoints, oldest step first.

    Damaged checkpoints are skipped here; `holdfast verify` reports them.
    """
    found = []
    for directory in paths.list_checkpoints():
        try:
            manifest = read_manifest(directory)
        except DamagedCheckpointError:
            continue
        if manifest is not None:
            found.append(manifest)
    return found


def newest_committed(paths: RunPaths, attempt: int) -> Manifest | None:
    """Return the manifest of the newest step that `attempt` committed, or None."""
    for directory in reversed(paths.list_checkpoints()):
        name = CheckpointName.parse(directory.name)
        if name is None or name.attempt != attempt:
            continue
        try:
            manifest = read_manifest(directory)
        except DamagedCheckpointError:
            continue
        if manifest is not None:
            return manifest
    return None
