"""Whether a checkpoint is whole: every byte of it compared with what was committed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.errors import DamagedCheckpointError, MirrorError, NotFoundError
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.leases import reading
from holdfast.contracts.manifest import Manifest, find_damage, read_manifest
from holdfast.contracts.mirrors import read_record
from holdfast.contracts.paths import CheckpointName, RunPaths
from holdfast.contracts.reading import is_mine
from holdfast.workers import mirrors

# A checkpoint in a mirror is read whole, over whatever lies in between.
MIRROR_TIMEOUT_S: Final = 6 * 3600.0
DAMAGED_TOLD_MAX: Final = 50

Watched = Callable[[Path, Manifest], list[str]]


def verify(directory: Path, find: Watched = find_damage) -> dict[str, Any]:
    """The facts of `holdfast verify --json` on the checkpoint in `directory`.

    `find` reads the files and returns a line for each that is damaged, as `find_damage` does.
    Where the run's files went to the nodes' own disks, the copy in the mirror that the run's spec
    names is read. Raises `MirrorError` when that cannot be asked.
    """
    record = read_record(directory)
    damaged: list[str] = []
    manifest: Manifest | None = None
    try:
        with reading(directory):
            manifest = read_manifest(directory)
            if manifest is None:
                damaged = ["manifest.json: missing: the checkpoint was never committed"]
            elif record is not None and _is_elsewhere(directory, manifest):
                damaged = _damage_in_mirror(_mirror_of(directory), manifest)
            else:
                damaged = [*_strangeness(directory, manifest), *find(directory, manifest)]
    except DamagedCheckpointError as error:
        damaged = list(error.damaged)
    except OSError as error:
        damaged = [f"manifest.json: cannot be read: {error.strerror}"]
    return {
        "ok": not damaged,
        "checkpoint": manifest.id if manifest else directory.name,
        "path": str(directory),
        "mirror": record.url if record else None,
        "files": len(manifest.files) if manifest else 0,
        "bytes": manifest.bytes if manifest else 0,
        "damaged": damaged,
    }


def record(directory: Path, facts: dict[str, Any], *, by: str, writer: str = "cli") -> None:
    """Note the verdict of `verify` in the journal of the run that the checkpoint belongs to.

    A copy outside of its run is passed over, and so is another user's run. Raises `OSError` when
    the journal cannot be written.
    """
    paths = RunPaths(directory.parent.parent)
    known = read_document(RunRecord, paths.spec)
    name = CheckpointName.parse(directory.name)
    if known is None or name is None or paths.checkpoint(name) != directory:
        return
    if not is_mine(paths.directory):
        return
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(
            EventKind.VERIFIED,
            checkpoint=directory.name,
            ok=facts["ok"],
            by=by,
            bytes=facts["bytes"],
            damaged=facts["damaged"][:DAMAGED_TOLD_MAX],
        )


def directory_to_verify(paths: RunPaths, name: str) -> Path:
    """The directory of a checkpoint; raises `NotFoundError` that says what became of it."""
    directory, checkpoint = paths.checkpoint(name), f"{paths.name}:{name}"
    if directory.is_dir():
        return directory
    if paths.tombstone(name).is_file():
        raise NotFoundError(
            f"{checkpoint}: deleted; {paths.tombstone(name)} is the manifest it had, and "
            f"`holdfast checkpoints {paths.name}` says why"
        )
    raise NotFoundError(
        f"{checkpoint}: no such directory ({directory}); `holdfast checkpoints {paths.name}` "
        "lists those there are"
    )


def _strangeness(directory: Path, manifest: Manifest) -> list[str]:
    """A line when the directory lies in a run and its manifest was written for another one."""
    record = read_document(RunRecord, RunPaths(directory.parent.parent).spec)
    if record is None or record.uid == manifest.run_uid:
        return []
    return [f"manifest.json: of another run, {manifest.run}; this one is {record.run}"]


def _is_elsewhere(directory: Path, manifest: Manifest) -> bool:
    """True when nothing but the manifest is here: the files are on nodes and in the mirror."""
    return not any((directory / entry.path).exists() for entry in manifest.files)


def _mirror_of(directory: Path) -> str:
    """The place in the mirror of the run that a checkpoint belongs to, as its spec says.

    `mirrored.json` names a place too, but anybody who may write there could have named it, and
    what a place is asked goes out with the caller's credentials.
    """
    paths = RunPaths(directory.parent.parent)
    location = mirrors.location_of(paths)
    if location is None:
        raise MirrorError(
            f"{directory}: its files are in a mirror that no spec beside it names; verify the "
            "checkpoint in its run's folder"
        )
    return location


def _damage_in_mirror(location: str, manifest: Manifest) -> list[str]:
    """The damaged files of the copy; raises `MirrorError` when the mirror cannot be asked."""
    answer = mirrors.ask(location, "verify", manifest.name, timeout_s=MIRROR_TIMEOUT_S)
    return [f"in the mirror: {line}" for line in answer["damaged"]]
