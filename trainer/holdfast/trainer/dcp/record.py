"""What is recorded of saves: the order of a program's checkpoints, and their rows in its run.

Under an agent, each committed save gets a manifest in the run's folder, and the lines `staged`,
`committed` and `save_failed` go to rank 0's journal, which the index reads. Beside an open
`Session`, whose checkpoints these are not, a save has only its lines, and `checkpoint` in them is
the directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts import environment as names
from holdfast.contracts.disk.bounds import NAME_CHARACTERS_MAX
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.manifest import (
    GONE,
    PROGRAM,
    REPLACED,
    Manifest,
    read_manifest,
    record_source,
    retire_source,
)
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.trainer.metrics import Recorder
from holdfast.trainer.process.program import program_argv, program_digest
from holdfast.trainer.session.lifetime import is_claimed

# A run's record of checkpoints that its program placed by `dcp.save`.
#
# Each has a directory in the run's folder with nothing but a manifest, and the manifest names the
# program's directory. So the index, `holdfast checkpoints`, `lineage` and `verify` know them.

# This many directories are inspected after each save. Programs keep few, and delete the oldest.
LOOKS: Final = 8


@dataclass(frozen=True)
class Placed:
    """One record. `contents` is the checksum of the manifest's table of files."""

    id: str
    name: str
    directory: Path
    contents: str
    committed_at: float

    @classmethod
    def of(cls, manifest: Manifest) -> Placed:
        return cls(
            manifest.id,
            manifest.name,
            Path(manifest.source or ""),
            manifest.checksum,
            manifest.committed_at,
        )


class RunCheckpoints:
    """The placed checkpoints of a run that still exist. Not safe for use by several threads."""

    def __init__(self, run: RunPaths) -> None:
        self._run = run
        # The first ones are checked next.
        self._known = deque(_read_all(run))

    def find(self, manifest: Manifest) -> Placed | None:
        """Return the newest record with these contents, even if its directory was renamed."""
        contents = manifest.checksum
        # By contents, because programs rename their directories. Copies have equal contents.
        same = [one for one in self._known if one.contents == contents]
        return max(same, key=lambda one: one.committed_at, default=None)

    def add(
        self, directory: Path, manifest: Manifest, name: CheckpointName, parent: str | None
    ) -> Placed:
        """Record the checkpoint in `directory`, which has `manifest`, under `name`.

        `parent` is the id of the checkpoint before it. Raises `OSError` if storage fails, and
        `ValueError` if the run has another checkpoint of this name, or if a manifest cannot name
        the directory.
        """
        here = {
            "name": str(name),
            "step": name.step,
            "source": str(directory),
            "parent": parent,
            # In the run's folder it names its files by `source`, as an opaque program's does, see
            # decision 76.
            "is_placed": False,
        }
        recorded = Manifest.model_validate(manifest.model_dump() | here)
        if not record_source(self._run, recorded):
            raise ValueError(f"the run has another checkpoint {name}")
        added = Placed.of(recorded)
        self._known.append(added)
        return added

    def retire_lost(self, newest: Placed) -> Iterator[tuple[Placed, str]]:
        """Yield each record whose files are gone or were replaced, and why, then retire it.

        `newest` was just recorded. Only `LOOKS` directories are checked, in turn. Raises
        `OSError` if storage fails.
        """
        lost = [
            (one, REPLACED)
            for one in self._known
            if one.directory == newest.directory and one != newest
        ]
        for _ in range(min(LOOKS, len(self._known))):
            one = self._known[0]
            self._known.rotate(-1)
            if (one, REPLACED) not in lost and _is_gone(one.directory):
                lost.append((one, GONE))
        for one, why in lost:
            # The line comes first: the journal is what the index is rebuilt from.
            yield one, why
            retire_source(self._run, one.name)
            self._known.remove(one)


def _read_all(run: RunPaths) -> Iterator[Placed]:
    """Yield what can be read. Storage that fails here must not end the program."""
    with contextlib.suppress(OSError, HoldfastError):
        for directory in run.list_checkpoints():
            with contextlib.suppress(OSError, HoldfastError):
                manifest = read_manifest(directory)
                if manifest is not None and manifest.source is not None:
                    yield Placed.of(manifest)


def _is_gone(directory: Path) -> bool:
    # Without the folder above, the file system may be unreachable, which proves nothing.
    return not (directory / MANIFEST).exists() and directory.parent.is_dir()


REASON: Final = "request"
# A longer number in a name is a date or a time.
_STEP: Final = re.compile(r"(?<![0-9])[0-9]{1,7}$")


class SaveRecord:
    """The newest checkpoint that this process has loaded or committed: the next one's parent.

    Checkpoints are counted along their line of descent, by the steps in the names of their
    directories where these grow. The first rank of a process group decides for all its ranks, so
    only its record matters.
    """

    def __init__(self) -> None:
        self.parent: str | None = None
        self._step = 0
        # The watching threads of all process groups write here too.
        self._lock = threading.RLock()
        self._run: _RunRecord | None = None

    def next_step(self, directory: Path) -> int:
        """Return the number of the next save, which goes into `directory`."""
        named = _STEP.search(directory.name)
        self._step = max(self._step + 1, int(named[0]) if named else 0)
        return self._step

    def loaded(self, directory: Path, manifest: Manifest | None, *, is_root: bool = True) -> None:
        """Record that the program continues from the checkpoint in `directory`.

        Only the process with `is_root` writes a line.
        """
        self.parent = _id_of(directory)
        if manifest is not None:
            self._step = max(self._step, manifest.step)
            with self._lock:
                if (run := self._under_run()) is not None:
                    run.loaded(manifest, is_root=is_root)

    def staged(self, directory: Path, step: int, size: int, blocked_s: float) -> None:
        with self._lock:
            if (run := self._under_run()) is not None:
                run.staged(directory, step, size, blocked_s)

    def committed(self, directory: Path, step: int) -> None:
        self.parent = _id_of(directory)
        with self._lock:
            if (run := self._under_run()) is not None:
                run.committed(directory, step)

    def failed(self, directory: Path, step: int, problem: str) -> None:
        with self._lock:
            if (run := self._under_run()) is not None:
                run.write(EventKind.SAVE_FAILED, directory, step, error=problem)

    def close(self) -> None:
        """Write the lines that are queued."""
        with self._lock:
            run, self._run = self._run, None
        if run is not None:
            run.close()

    def forget(self) -> None:
        """Forget the run in a forked child. It is the parent's, and so is the lock."""
        self._run = None

    def _under_run(self) -> _RunRecord | None:
        """Return the record in the run that is around this process, if there is one."""
        if self._run is None and os.environ.get(names.RUN_DIRECTORY):
            self._run = _RunRecord()
        return self._run


class _RunRecord:
    """The rows of placed checkpoints in the run of this launch."""

    def __init__(self) -> None:
        run = RunPaths(Path(os.environ[names.RUN_DIRECTORY]))
        self._attempt, self._launch = int(os.environ[names.ATTEMPT]), int(os.environ[names.LAUNCH])
        journal = run.attempt(self._attempt).rank_journal
        metrics = run.metrics_of(self._attempt, self._launch)
        self._recorder = Recorder(journal, metrics, attempt=self._attempt, launch=self._launch)
        self._checkpoints = RunCheckpoints(run)
        self._parent: str | None = None
        self._has_begun = int(os.environ.get("RANK", "0")) != 0

    def loaded(self, manifest: Manifest, *, is_root: bool) -> None:
        found = self._checkpoints.find(manifest)
        self._parent = found.id if found else None
        if found and is_root:
            self._begin(found.id, manifest.step)

    def staged(self, directory: Path, step: int, size: int, blocked_s: float) -> None:
        self._begin(None, 0)
        facts = {"bytes": size, "blocked_s": round(blocked_s, 6), "reason": REASON}
        self.write(EventKind.STAGED, directory, step, **facts)

    def _begin(self, checkpoint: str | None, step: int) -> None:
        """Write once in a launch what it continues from. Beside a session, the session does."""
        if self._has_begun or is_claimed():
            # A launch has one `resumed` line, and beside a session it belongs to the session.
            return
        self._has_begun = True
        self._recorder.event(
            EventKind.RESUMED,
            checkpoint=checkpoint,
            step=step,
            command_digest=program_digest(),
            argv=program_argv(),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            counts_steps=False,
        )

    def committed(self, directory: Path, step: int) -> None:
        """Write the manifest of a save and its line, and end the records that it has replaced.

        A save whose manifest cannot be written has only its line, because it is complete in the
        directory where the program wants it.
        """
        manifest = _read(directory, step)
        if manifest is None:
            # The program has moved or replaced it already.
            self.write(EventKind.COMMITTED, directory, step)
            return
        facts = {"bytes": manifest.bytes, "flush_s": manifest.flush_s, "reason": REASON}
        try:
            # A session's checkpoints have their own steps, and two checkpoints of a launch cannot
            # have the same one, see decision 71.
            added = None if is_claimed() else self._add(directory, manifest, step)
            self.write(EventKind.COMMITTED, directory, step, **facts)
            if added is not None:
                self._retire_lost(added)
        except (OSError, ValueError, HoldfastError) as error:
            self._recorder.event(EventKind.NOTE, text=f"{directory}: not recorded: {error}")

    def _add(self, directory: Path, manifest: Manifest, step: int) -> Placed:
        """Write the manifest in the run. If that fails, the save has its line nevertheless."""
        try:
            added = self._checkpoints.add(directory, manifest, self._name(step), self._parent)
        except (OSError, ValueError, HoldfastError):
            place = str(directory)
            facts: dict[str, Any] = {"checkpoint": place, "step": step, "directory": place}
            self._recorder.event(EventKind.COMMITTED, **facts, bytes=manifest.bytes, reason=REASON)
            raise
        self._parent = added.id
        return added

    def _retire_lost(self, newest: Placed) -> None:
        for lost, why in self._checkpoints.retire_lost(newest):
            self._recorder.event(
                EventKind.CHECKPOINT_DELETED, checkpoint=lost.name, reason=why, by=PROGRAM
            )

    def write(self, kind: EventKind, directory: Path, step: int, **facts: Any) -> None:
        checkpoint = str(directory) if is_claimed() else str(self._name(step))
        self._recorder.event(
            kind, checkpoint=checkpoint, step=step, directory=str(directory), **facts
        )

    def close(self) -> None:
        self._recorder.close()

    def _name(self, step: int) -> CheckpointName:
        return CheckpointName(step, self._attempt, self._launch)


# One for all process groups of this process.
RECORD: Final = SaveRecord()


def _id_of(directory: Path) -> str | None:
    """Return the id that a manifest names as its parent: the directory's path."""
    text = str(directory)
    return text if len(text) <= NAME_CHARACTERS_MAX else None


def _read(directory: Path, step: int) -> Manifest | None:
    """Return the manifest of the save of `step`; None if it is not there, or is another's."""
    try:
        manifest = read_manifest(directory)
    except (OSError, ValueError, RuntimeError):
        return None
    return manifest if manifest is not None and manifest.step == step else None
