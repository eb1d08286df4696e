"""The flusher's thread that copies committed checkpoints to the mirror and journals the result.

New checkpoints go first, in order. On node 0, those that an earlier flusher did not finish follow,
newest first. Saves never wait for the mirror: if it is slower than the saves, the oldest waiting
checkpoint is skipped, and the journal records that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk import durable, file_locks
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.mirrors import MirrorRecord, Tiers, read_record, write_record
from holdfast.contracts.disk.paths import MANIFEST, CheckpointName, RunPaths
from holdfast.contracts.errors import HoldfastError, MirrorError
from holdfast.contracts.plain_text import counted
from holdfast.trainer.mirror import transfer
from holdfast.trainer.mirror.store import PART_BYTES, MirrorStore
from holdfast.trainer.slots.slot_table import SlotTable

# Checkpoints that may wait before the oldest is skipped.
BACKLOG_MAX: Final = 4
# How long node 0 waits for other nodes' files of a checkpoint. The second is for a checkpoint that
# an earlier flusher left.
PEERS_WAIT_S: Final = 1800.0
LEFT_WAIT_S: Final = 120.0
PEERS_POLL_S: Final = 1.0
# If the mirror does not answer, a checkpoint is tried so many times, with a pause in between.
ROUNDS_MAX: Final = 10
ROUND_PAUSE_S: Final = 60.0
ERROR_CHARACTERS_MAX: Final = 2000
NAMED_MAX: Final = 20
# Older checkpoints that are looked at for one in the mirror.
FORMER_MAX: Final = 8
# Checkpoints that stay on a node's own disk for a restart on the same node.
NODE_COPIES_MAX: Final = 2


@dataclass
class Task:
    """A checkpoint to copy. `own` as in `read_upload`. `began` is when this node began to copy."""

    run: RunPaths
    directory: Path
    files: Path
    own: frozenset[str] | None
    upload: transfer.Upload | None = None
    began: float = 0.0
    due_at: float = 0.0
    rounds: int = 0
    is_sent: bool = False
    sent: int = 0
    peers_wait_s: float = PEERS_WAIT_S
    made: float = field(default_factory=time.monotonic)


def start_mirror(node: int, run: Path | None) -> MirrorWorker:
    """Start a worker if the environment names a mirror. `run` may have unfinished copies."""
    worker = MirrorWorker(Tiers.from_environment(os.environ), node=node)
    worker.start()
    if run is not None:
        worker.recover(RunPaths(run))
    return worker


class MirrorWorker:
    """Copies one node's files to the mirror. Public methods may be called from any thread."""

    def __init__(self, tiers: Tiers, *, node: int) -> None:
        self._tiers, self._node = tiers, node
        self._new: deque[Task] = deque()
        self._old: deque[Task] = deque()
        self._waiting: list[Task] = []
        self._current: Task | None = None
        self._store: tuple[str, MirrorStore] | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="mirror", daemon=True)

    def start(self) -> None:
        """Start the thread if there is a mirror. It ends with the process."""
        if self._tiers.mirror:
            self._thread.start()

    def take(self, tables: Sequence[SlotTable]) -> None:
        """Queue a step that was just committed. `tables` are this node's slot tables.

        A checkpoint in a directory that the program chose is not copied.
        """
        if not self._tiers.mirror or tables[0].target:
            return
        own = frozenset(file.path for table in tables for file in table.files)
        one = tables[0]
        with self._changed:
            self._new.append(Task(one.run, one.directory, one.files_directory, own))
            # The oldest goes, because a newer one is worth more after a failure. Saves never wait
            # for the mirror, see decision 13.
            skipped = self._new.popleft() if len(self._new) > BACKLOG_MAX else None
            self._changed.notify()
        if skipped is not None:
            error = f"skipped: {BACKLOG_MAX} newer ones wait; the mirror is slower than the saves"
            self._journal(skipped, EventKind.MIRROR_FAILED, error=error)

    def recover(self, run: RunPaths) -> None:
        """Queue what earlier flushers of the run left: on node 0, or each node's own files."""
        is_ours = self._node == 0 or bool(self._tiers.local)
        if not self._tiers.mirror or not is_ours:
            return
        left = [
            Task(run, directory, self._files_of(run, directory), None, peers_wait_s=LEFT_WAIT_S)
            for directory in reversed(run.list_checkpoints())
            if _has_files(directory) and read_record(directory) is None
        ]
        with self._changed:
            self._old.extend(left)
            self._changed.notify()

    @property
    def unfinished(self) -> list[str]:
        """Names of checkpoints that are not in the mirror yet, at most `NAMED_MAX`."""
        with self._changed:
            tasks = [*self._new, *self._old, *self._waiting]
            tasks += [self._current] if self._current else []
        return [task.directory.name for task in tasks[:NAMED_MAX]]

    # --- thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            task = self._next()
            try:
                self._advance(task)
            except MirrorError as error:
                self._failed(task, str(error), is_passing=error.is_passing)
            except (HoldfastError, OSError, ValueError) as error:
                self._failed(task, str(error), is_passing=False)
            except Exception as error:
                # A bug in one copy must not end the thread and with it all later copies.
                self._failed(task, f"{type(error).__name__}: {error}", is_passing=False)
            finally:
                with self._changed:
                    self._current = None

    def _next(self) -> Task:
        """Return the next task: a new one, one that is due again, or an old one."""
        with self._changed:
            while True:
                now = time.monotonic()
                due = next((t for t in self._waiting if t.due_at <= now), None)
                if self._new:
                    self._current = self._new.popleft()
                elif due is not None:
                    self._waiting.remove(due)
                    self._current = due
                elif self._old:
                    self._current = self._old.popleft()
                if self._current is not None:
                    return self._current
                self._changed.wait(PEERS_POLL_S if self._waiting else None)

    def _advance(self, task: Task) -> None:
        """Copy one checkpoint as far as is possible now."""
        upload = task.upload = task.upload or transfer.read_upload(
            task.directory, task.own, task.files
        )
        if upload is None:
            return
        task.began = task.began or time.monotonic()
        store = self._store_of(upload)
        if not task.is_sent:
            # A flusher that was replaced may still be sending the same files.
            former = self._former(task, upload)
            with self._alone(task.run):
                task.sent += transfer.send_files(
                    store, upload, retries=transfer.Retries(), former=former
                )
            task.is_sent = True
            self._clear_node(task)
        if self._node != 0:
            return
        missing = transfer.missing_files(store, upload, retries=transfer.Retries())
        if not missing:
            transfer.commit(store, upload, retries=transfer.Retries())
            self._finish(task, upload)
        elif time.monotonic() < task.made + task.peers_wait_s:
            self._try_again_later(task, PEERS_POLL_S)
        else:
            lacking = ", ".join(missing[:5])
            raise MirrorError(
                f"the mirror lacks {counted(len(missing), 'file')} of other nodes: {lacking}"
            )

    def _former(self, task: Task, upload: transfer.Upload) -> Manifest | None:
        """Return the newest checkpoint before this one of which the mirror has a copy, or None."""
        if not any(entry.bytes > PART_BYTES for entry in upload.entries):
            return None
        older = [one for one in task.run.list_checkpoints() if one.name < upload.name]
        for directory in reversed(older[-FORMER_MAX:]):
            # A damaged one says nothing about this copy.
            with contextlib.suppress(HoldfastError, OSError):
                if read_record(directory) is not None:
                    return read_manifest(directory)
        return None

    def _try_again_later(self, task: Task, pause_s: float) -> None:
        task.due_at = time.monotonic() + pause_s
        with self._changed:
            self._waiting.append(task)

    def _finish(self, task: Task, upload: transfer.Upload) -> None:
        """Record the copy beside the manifest and in the journal."""
        seconds = round(time.monotonic() - task.began, 6)
        url = self._location(upload)
        record = MirrorRecord(
            url=url, bytes=upload.manifest.bytes, seconds=seconds, mirrored_at=time.time()
        )
        # The keep rules may have deleted it meanwhile. Writing the record would restore the folder.
        if (task.directory / MANIFEST).exists():
            write_record(task.directory, record)
        facts: dict[str, Any] = {"url": url, "bytes": record.bytes, "seconds": seconds}
        facts["sent_bytes"] = task.sent
        self._journal(task, EventKind.MIRRORED, **facts)

    def _failed(self, task: Task, problem: str, *, is_passing: bool) -> None:
        if not (task.directory / MANIFEST).exists():
            # The checkpoint was deleted meanwhile, so there is nothing to copy or report.
            return
        self._journal(task, EventKind.MIRROR_FAILED, error=problem[:ERROR_CHARACTERS_MAX])
        task.rounds += 1
        if is_passing and task.rounds < ROUNDS_MAX:
            self._try_again_later(task, ROUND_PAUSE_S)

    def _files_of(self, run: RunPaths, directory: Path) -> Path:
        """Return this node's folder for the files of a checkpoint that an earlier flusher wrote."""
        manifest = read_manifest(directory) if self._tiers.local else None
        if manifest is None:
            return directory
        folder = self._tiers.node_folder(manifest.run, manifest.run_uid)
        return folder.checkpoint(directory.name) if folder else directory

    def _clear_node(self, task: Task) -> None:
        """Keep only the newest copies on the node's own disk, because the mirror has the others.

        A checkpoint that is not in the mirror yet stays, unless the run's folder deleted it.
        """
        if task.files == task.directory:
            return
        folder = RunPaths(task.files.parent.parent)
        for files in folder.list_checkpoints()[:-NODE_COPIES_MAX]:
            # Files that no mirror has may be the only copy.
            home = task.run.checkpoint(files.name)
            if read_record(home) is not None or not home.exists():
                shutil.rmtree(files, ignore_errors=True)

    def _location(self, upload: transfer.Upload) -> str:
        return self._tiers.location(upload.manifest.run, upload.manifest.run_uid)

    def _store_of(self, upload: transfer.Upload) -> MirrorStore:
        """Return the run's store in the mirror. The first call opens it and imports libraries."""
        url = self._location(upload)
        if self._store is None or self._store[0] != url:
            self._store = (url, transfer.Retries().do(transfer.open_store, url))
        return self._store[1]

    def _journal(self, task: Task, kind: EventKind, **facts: Any) -> None:
        name = CheckpointName.parse(task.directory.name)
        attempt = name.attempt if name else 0
        url = facts.pop("url", self._tiers.mirror)
        # A line less in the journal is no reason to give a copy up.
        with contextlib.suppress(OSError):
            path = task.run.attempt(attempt).mirror_journal(self._node)
            with JournalWriter(path) as journal:
                journal.append(
                    kind,
                    attempt=attempt,
                    checkpoint=task.directory.name,
                    step=name.step if name else 0,
                    url=url,
                    **facts,
                )

    @contextlib.contextmanager
    def _alone(self, run: RunPaths) -> Iterator[None]:
        """Hold a lock so that one flusher at a time sends a node's files, even after a restart."""
        durable.make_directory(run.directory / "mirror")
        path = run.directory / "mirror" / f"node-{self._node:04d}.lock"
        with file_locks.locked(
            path, PEERS_WAIT_S, below=run.directory, owner_only=True
        ) as is_locked:
            if not is_locked:
                raise MirrorError(f"another flusher held {path} for {PEERS_WAIT_S:.0f} s")
            yield


def _has_files(directory: Path) -> bool:
    """Return True for a committed checkpoint whose files are in the run's folder."""
    with contextlib.suppress(HoldfastError):
        manifest = read_manifest(directory)
        return manifest is not None and manifest.source is None
    return False
