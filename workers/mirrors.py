"""The copies of a run in its mirror, from the operator's side: deleted with their originals.

The work is done by `python -m holdfast.trainer.mirror`, bounded in time, because object stores
are the trainer's business and need its libraries. Whoever deletes needs the store's credentials.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any, Final

from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.durable import write_bytes
from holdfast.contracts.errors import MirrorError, reading_run
from holdfast.contracts.history import check_identity
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.mirrors import Tiers
from holdfast.contracts.paths import CheckpointName, RunPaths
from holdfast.contracts.reading import is_mine
from holdfast.contracts.spec import RunSpec
from holdfast.workers.trainer_call import NEUTRAL_FOLDER

TIMEOUT_S: Final = 300.0
# After a failure the mirror is left alone for a while: pruning is asked for often.
RETRY_S: Final = 300.0
NAMES_MAX: Final = 100
DONE_SUFFIX: Final = ".unmirrored"
FAILED_NAME: Final = ".mirror-failed"


def location_of(paths: RunPaths) -> str | None:
    """The URL of the run's place in its mirror; None when its spec names no mirror.

    The place bears the run's whole uid. Raises `MirrorError` for another user's run: what its spec
    names would be asked with the caller's credentials. Raises `UnreadableRunError` for a spec that
    is another folder's.
    """
    record = read_document(RunRecord, paths.spec)
    if record is None:
        return None
    check_identity(paths, record)
    with reading_run(paths.directory):
        mirror = RunSpec.model_validate(record.spec).checkpoint.mirror
    if not mirror:
        return None
    if not (is_mine(paths.directory) and is_mine(paths.spec)):
        raise MirrorError(
            f"{paths.name}: another user's run, whose mirror only that user touches; run the "
            "command as the owner of the run's folder"
        )
    return Tiers(mirror=mirror).location(record.run, record.uid)


def ask(location: str, *words: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """What `python -m holdfast.trainer.mirror` answers.

    Raises `MirrorError` when it failed, did not answer in time, or could not be started.
    """
    command = [sys.executable, "-m", "holdfast.trainer.mirror", location, *words]
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
        raise MirrorError(f"{location}: no answer in {timeout_s:.0f} s", is_passing=True) from error
    except ValueError as error:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise MirrorError(f"{location}: {' '.join(last) or 'no answer'}") from error
    if "error" in answer:
        raise MirrorError(str(answer["error"]))
    return answer


def delete_copies(paths: RunPaths, *, writer: str) -> list[str]:
    """Delete from the mirror what was deleted here; returns the names.

    Never raises for a mirror that refuses: that is journaled and tried again at a later time.
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
        write_bytes(paths.tombstones / FAILED_NAME, b"", below=paths.directory)
        with JournalWriter(paths.journal_of(writer)) as journal:
            text = f"copies of {len(names)} deleted checkpoints are still in the mirror: {error}"
            journal.append(EventKind.NOTE, text=text)
        return []
    for name in names:
        write_bytes(paths.tombstones / f"{name}{DONE_SUFFIX}", b"", below=paths.directory)
    return names


def _deleted_here(paths: RunPaths) -> list[str]:
    """Checkpoints whose fate is sealed here and whose copies may still be in the mirror."""
    return [
        path.stem
        for path in sorted(paths.tombstones.glob("step-*.json"))
        if CheckpointName.parse(path.stem)
        and not path.with_suffix(DONE_SUFFIX).exists()
        and not paths.checkpoint(path.stem).exists()
    ]


def _has_failed_lately(paths: RunPaths) -> bool:
    try:
        failed_at = (paths.tombstones / FAILED_NAME).lstat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - failed_at < RETRY_S
