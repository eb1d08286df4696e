"""Verify a checkpoint: compare every byte of it with its manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk import damage, leases, mirrors
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths, checkpoint_id
from holdfast.contracts.errors import DamagedCheckpointError, MirrorError, NotFoundError
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.workers.checkpoints import deletion

# A checkpoint in a mirror is read completely, over the network.
MIRROR_TIMEOUT_S: Final = 6 * 3600.0
DAMAGED_KEPT_MAX: Final = 50

Watched = Callable[[Path, Manifest], list[str]]


def verify(directory: Path, find: Watched = damage.find_damage) -> dict[str, Any]:
    """Return the facts of `holdfast verify --json` for the checkpoint in `directory`.

    `find` reads the files and returns a line for each damaged one, as `find_damage` does. If the
    run's files are on the nodes' own disks, the copy in the mirror of the run's spec is read
    instead. A copy outside a run is called by its path, and may have any name. Raises
    `MirrorError` if the mirror cannot be read.
    """
    mirrored = mirrors.read_record(directory)
    own = _record_of(directory)
    damaged: list[str] = []
    manifest: Manifest | None = None
    try:
        # With a lease, so that the keep rules cannot delete it while it is read.
        with leases.reading(directory):
            manifest = read_manifest(directory, is_copy=own is None)
            if manifest is None:
                damaged = [f"{MANIFEST}: missing, {_why_missing(own)}"]
            elif mirrored is not None and _is_elsewhere(directory, manifest):
                damaged = _damage_in_mirror(_mirror_of(directory), manifest)
            else:
                damaged = [*_foreign_manifest(own, manifest), *find(directory, manifest)]
    except DamagedCheckpointError as error:
        damaged = list(error.damaged)
    except OSError as error:
        damaged = [f"{MANIFEST}: cannot be read: {error.strerror}"]
    run = RunPaths(directory.parent.parent).name
    # A directory that the program chose may contain the only instance of the checkpoint.
    is_copy = manifest is not None and own is None and not manifest.is_placed
    return {
        "ok": not damaged,
        "checkpoint": checkpoint_id(run, directory.name) if own else str(directory),
        "copy_of": manifest.id if manifest and is_copy else None,
        "path": str(directory),
        "mirror": mirrored.url if mirrored else None,
        "files": len(manifest.files) if manifest else 0,
        "bytes": manifest.bytes if manifest else 0,
        "damaged": damaged,
    }


def record(directory: Path, facts: dict[str, Any], *, by: str, writer: str = "cli") -> None:
    """Record the result of `verify` in the journal of the checkpoint's run.

    A copy outside its run and another user's run are skipped. Raises `OSError` if the journal
    cannot be written.
    """
    paths = RunPaths(directory.parent.parent)
    if _record_of(directory) is None or not paths.is_mine():
        return
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(
            EventKind.VERIFIED,
            checkpoint=directory.name,
            ok=facts["ok"],
            by=by,
            bytes=facts["bytes"],
            damaged=facts["damaged"][:DAMAGED_KEPT_MAX],
        )


def _record_of(directory: Path) -> RunRecord | None:
    """Return the record of the run in whose folder a checkpoint is; None for a copy elsewhere."""
    paths, name = RunPaths(directory.parent.parent), CheckpointName.parse(directory.name)
    if name is None or paths.checkpoint(name) != directory:
        return None
    return read_document(RunRecord, paths.spec)


def _why_missing(own: RunRecord | None) -> str:
    if own is not None:
        return "so the checkpoint was never committed"
    return "so this is not a checkpoint of Holdfast, or its copy is not complete"


def directory_to_verify(paths: RunPaths, name: str) -> Path:
    """Return a checkpoint's directory. Raises `NotFoundError`, which says if it was deleted."""
    directory, checkpoint = paths.checkpoint(name), f"{paths.name}:{name}"
    if directory.is_dir():
        return directory
    if paths.tombstone(name).is_file():
        raise NotFoundError(
            f"{checkpoint}: deleted. {paths.tombstone(name)} is its manifest, and "
            f"`holdfast checkpoints {paths.name}` shows the reason"
        )
    raise NotFoundError(
        f"{checkpoint}: no such directory ({directory}); list the checkpoints with "
        f"`holdfast checkpoints {paths.name}`"
    )


def _foreign_manifest(own: RunRecord | None, manifest: Manifest) -> list[str]:
    """Return a line if the directory is in a run and its manifest belongs to another run."""
    if own is None or own.uid == manifest.run_uid:
        return []
    return [f"{MANIFEST}: belongs to run {manifest.run}; this run is {own.run}"]


def _is_elsewhere(directory: Path, manifest: Manifest) -> bool:
    """Return True if only the manifest is here, so the files are on nodes and in the mirror."""
    return not any((directory / entry.path).exists() for entry in manifest.files)


def _mirror_of(directory: Path) -> str:
    """Return the mirror location of a checkpoint's run, from the run's spec.

    `mirrored.json` names a location too. But anyone who may write there could have named it, and
    the caller's credentials would be sent to it.
    """
    paths = RunPaths(directory.parent.parent)
    location = deletion.location_of(paths)
    if location is None:
        raise MirrorError(
            f"{directory}: its files are in a mirror, but no spec beside it names the mirror; "
            "verify the checkpoint in its run's folder"
        )
    return location


def _damage_in_mirror(location: str, manifest: Manifest) -> list[str]:
    """Return the damaged files of the copy. Raises `MirrorError` if the mirror cannot be read."""
    answer = deletion.ask(location, "verify", manifest.name, timeout_s=MIRROR_TIMEOUT_S)
    return [f"in the mirror: {line}" for line in answer["damaged"]]
