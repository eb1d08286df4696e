"""What is recorded of saves: the order of a program's checkpoints, and the journal of its run.

Under an agent, the lines `staged`, `committed` and `save_failed` go to rank 0's journal, which the
index reads. In them, `checkpoint` is the directory that the program chose.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Final

from holdfast.contracts import environment as names
from holdfast.contracts.bounds import NAME_CHARACTERS_MAX
from holdfast.contracts.journal import EventKind
from holdfast.contracts.manifest import Manifest, read_manifest
from holdfast.contracts.paths import RunPaths
from holdfast.trainer.metrics import Recorder

REASON: Final = "request"


class SaveRecord:
    """The newest checkpoint that this process has loaded or committed: the next one's parent.

    Checkpoints are counted along their line of descent. The first rank of a process group decides
    for all its ranks, so only its record matters.
    """

    def __init__(self) -> None:
        self.parent: str | None = None
        self._count = 0
        # The watching threads of all process groups write here too.
        self._lock = threading.Lock()
        self._recorder: Recorder | None = None

    def next_step(self) -> int:
        """Return the number of the next save."""
        self._count += 1
        return self._count

    def loaded(self, directory: Path, manifest: Manifest | None) -> None:
        """Record that the program continues from the checkpoint in `directory`."""
        self.parent = _id_of(directory)
        if manifest is not None:
            self._count = max(self._count, manifest.step)

    def staged(self, directory: Path, step: int, size: int, blocked_s: float) -> None:
        """Record that a save of `size` bytes on this rank is staged."""
        facts = {"bytes": size, "blocked_s": round(blocked_s, 6), "reason": REASON}
        self._write(EventKind.STAGED, directory, step, **facts)

    def committed(self, directory: Path, step: int) -> None:
        """Record that a save is committed."""
        self.parent = _id_of(directory)
        if _has_run():
            self._write(EventKind.COMMITTED, directory, step, **_measured(directory))

    def failed(self, directory: Path, step: int, problem: str) -> None:
        """Record that a save was not committed."""
        self._write(EventKind.SAVE_FAILED, directory, step, error=problem)

    def close(self) -> None:
        """Write the lines that are queued."""
        with self._lock:
            recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.close()

    def _write(self, kind: EventKind, directory: Path, step: int, **facts: Any) -> None:
        if not _has_run():
            return
        with self._lock:
            if self._recorder is None:
                self._recorder = _open_recorder()
            self._recorder.event(kind, checkpoint=str(directory), step=step, **facts)


def _has_run() -> bool:
    """Return True under an agent."""
    return bool(os.environ.get(names.RUN_DIRECTORY))


def _open_recorder() -> Recorder:
    """Return a recorder that writes to the journal of rank 0."""
    run = RunPaths(Path(os.environ[names.RUN_DIRECTORY]))
    number, launch = int(os.environ[names.ATTEMPT]), int(os.environ[names.LAUNCH])
    journal = run.attempt(number).rank_journal
    return Recorder(journal, run.metrics_of(number, launch), attempt=number, launch=launch)


# One for all process groups of this process.
RECORD: Final = SaveRecord()


def _id_of(directory: Path) -> str | None:
    """Return the id that a manifest names as its parent: the directory's path."""
    text = str(directory)
    return text if len(text) <= NAME_CHARACTERS_MAX else None


def _measured(directory: Path) -> dict[str, Any]:
    """Return the facts of a committed save, none if the program has moved or replaced it."""
    try:
        manifest = read_manifest(directory)
    except (OSError, ValueError, RuntimeError):
        return {}
    return {} if manifest is None else {"bytes": manifest.bytes, "flush_s": manifest.flush_s}
