"""Delete the copies of a run's deleted checkpoints from its mirror.

`python -m holdfast.trainer.mirror` does the work, bounded in time, because only the trainer has the
libraries for object stores. The deleting process needs the store's credentials.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any, Final

from holdfast.contracts.disk.durable import write_bytes
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.mirrors import Tiers
from holdfast.contracts.disk.paths import CheckpointName, RunPaths, base_of, real_folder
from holdfast.contracts.errors import MirrorError, reading_run
from holdfast.contracts.records.attempt import RunRecord, read_document
from holdfast.contracts.records.history import check_identity
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.checkpoints.trainer_call import NEUTRAL_FOLDER

TIMEOUT_S: Final = 300.0
# After a failure the mirror is not tried for a while, because pruning happens often.
RETRY_S: Final = 300.0
NAMES_MAX: Final = 100
DONE_SUFFIX: Final = ".unmirrored"
FAILED_NAME: Final = ".mirror-failed"


def location_of(paths: RunPaths) -> str | None:
    """Return the URL of the run's location in its mirror; None if its spec has no mirror.

    The location contains the run's whole uid. Raises `MirrorError` for another user's run, because
    its spec would choose where the caller's credentials are sent. Raises `UnreadableRunError` for a
    spec that belongs to another folder.
    """
    record = read_document(RunRecord, paths.spec)
    if record is None:
        return None
    check_identity(paths, record)
    with reading_run(paths.directory):
        mirror = RunSpec.read(record.spec).checkpoint.mirror
    if not mirror:
        return None
    if not paths.is_mine():
        raise MirrorError(
            f"{paths.name}: this run belongs to another user, and only that user may change its "
            "mirror; run the command as the owner of the run's folder"
        )
    return Tiers(mirror=mirror).location(record.run, record.uid)


def ask(location: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Return the answer of `python -m holdfast.trainer.mirror`.

    Raises `MirrorError` if it failed, did not answer in time or could not start.
    """
    command = [sys.executable, "-m", "holdfast.trainer.mirror", location, *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
            cwd=NEUTRAL_FOLDER,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise MirrorError(
            f"{location}: no answer within {timeout_s:.0f} s", is_passing=True
        ) from error
    except ValueError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise MirrorError(f"{location}: {' '.join(last) or 'no answer'}") from error
    if "error" in answer:
        raise MirrorError(str(answer["error"]))
    return answer


def delete_copies(paths: RunPaths, *, writer: str) -> list[str]:
    """Delete the copies of checkpoints that were deleted here; return their names.

    If the mirror refuses, this journals the error and does not raise. A later call tries again.
    """
    names = _deleted_here(paths)[:NAMES_MAX]
    if not names or _has_failed_lately(paths):
        return []
    try:
        location = location_of(paths)
        if location is None:
            return []
        ask(location, "delete", *names)
    except MirrorError as error:
        text = f"copies of {len(names)} deleted checkpoints are still in the mirror: {error}"
        _record_failure(paths, text, writer)
        return []
    for name in names:
        _mark(paths, f"{name}{DONE_SUFFIX}")
    return names


def _deleted_here(paths: RunPaths) -> list[str]:
    """Return the checkpoints that are deleted here and may still have copies in the mirror."""
    try:
        found = set(os.listdir(paths.tombstones))
    except FileNotFoundError:
        return []
    names = (name.removesuffix(".json") for name in found if name.endswith(".json"))
    return [
        name
        for name in sorted(names)
        if f"{name}{DONE_SUFFIX}" not in found
        and CheckpointName.parse(name)
        and not paths.checkpoint(name).exists()
    ]


def _record_failure(paths: RunPaths, text: str, writer: str) -> None:
    _mark(paths, FAILED_NAME)
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(EventKind.NOTE, text=text)


def _mark(paths: RunPaths, name: str) -> None:
    """Create an empty file beside the tombstones."""
    folder = real_folder(paths.tombstones)
    write_bytes(folder / name, b"", below=base_of(folder))


def _has_failed_lately(paths: RunPaths) -> bool:
    try:
        failed_at = (paths.tombstones / FAILED_NAME).lstat().st_mtime
    except FileNotFoundError:
        return False
    # The file server has another clock. A time that is far in the future says nothing.
    return abs(time.time() - failed_at) < RETRY_S
