"""One process that supervises all live runs of its user under a root, each in a thread.

It takes up runs that were just submitted, and runs whose supervisor has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import durable, file_locks, visits
from holdfast.contracts.disk.paths import RUN_NAME, RunPaths
from holdfast.contracts.errors import RunConflictError
from holdfast.contracts.records import history_cache, supervision
from holdfast.contracts.records.consumers import needs_supervisor
from holdfast.flows.supervisor import flow_lock
from holdfast.flows.supervisor.carry import carry
from holdfast.lineage.index import Index

# How soon a submitted run is taken up.
LOOK_S: Final = 1.0
# How soon a run is taken up whose supervisor has ended.
SCAN_S: Final = 5.0
# How often a run that had ended is looked at again, in case that a request was lost.
ENDED_S: Final = 60.0
# After an error, such as a folder that cannot be read.
FAILED_S: Final = 30.0


class SupervisorService:
    """Supervises the user's live runs under `root` until `stop` is set."""

    def __init__(self, root: Path, index: Index, log: logging.Logger) -> None:
        self.root, self.stop = root, threading.Event()
        self._index, self._log = index, log
        self._folder = flow_lock.service_folder(root)
        self._threads: dict[str, threading.Thread] = {}
        # When a run without a thread is looked at again, by the monotonic clock.
        self._next_look: dict[str, float] = {}
        # The stamps of runs that had ended when they were read.
        self._ended: dict[str, tuple[object, ...]] = {}
        self._scan_at = 0.0

    def run(self) -> None:
        """Look for runs until `stop` is set. The threads of runs end with the process.

        Raises `RunConflictError` if this user has another service for the root, and `OSError` if
        the root cannot be written.
        """
        with self._only_one():
            while not self.stop.is_set():
                try:
                    self._look_at_all()
                except OSError as error:
                    # A shared file system can be unavailable for a while.
                    self._log.warning("%s: %s", self.root, error)
                    self.stop.wait(SCAN_S)
                self.stop.wait(LOOK_S)

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[None]:
        durable.make_directory(self.root)
        self._make_folder()
        handle = file_locks.open_lock(self._folder / flow_lock.LOCK, owner_only=True)
        try:
            if not file_locks.wait_for_lock(handle, SCAN_S):
                other = os.pread(handle, flow_lock.NAME_BYTES_MAX, 0).decode(errors="replace")
                raise RunConflictError(
                    f"{self.root}: {other or 'another process'} supervises your runs there already"
                )
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            os.fsync(handle)
            yield
        finally:
            os.close(handle)

    def _make_folder(self) -> None:
        """Create the service's folder, which only this user can enter."""
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
        # Anyone may create it in a shared root, also as a link to a folder of this user's.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            folder = os.open(self._folder, flags)
        except OSError as error:
            raise RunConflictError(
                f"{self._folder}: not a folder of this user ({error.strerror}); delete it, or give "
                "another --root"
            ) from error
        try:
            if (owner := os.fstat(folder).st_uid) != os.geteuid():
                raise RunConflictError(
                    f"{self._folder} belongs to another user (uid {owner}); delete it, or give "
                    "another --root"
                )
            os.fchmod(folder, 0o700)
            with contextlib.suppress(FileExistsError):
                os.mkdir(flow_lock.WANTED, dir_fd=folder)
        finally:
            os.close(folder)

    def _look_at_all(self) -> None:
        names = self._take_wanted()
        now = time.monotonic()
        if now >= self._scan_at:
            names |= {paths.name for paths in visits.own_runs(self.root)}
            self._scan_at = now + SCAN_S
        for one in visits.visit([RunPaths(self.root / name) for name in sorted(names)], self._look):
            if one.error is not None:
                self._log.warning("%s: %s", one.paths.name, one.reason)
                self._next_look[one.paths.name] = now + FAILED_S

    def _take_wanted(self) -> set[str]:
        """Return the runs that commands have left for the service, and forget them."""
        found = {
            name for name in os.listdir(self._folder / flow_lock.WANTED) if RUN_NAME.fullmatch(name)
        }
        for name in found:
            (self._folder / flow_lock.WANTED / name).unlink(missing_ok=True)
            self._next_look.pop(name, None)
        return found

    def _look(self, paths: RunPaths) -> None:
        """Supervise the run if it needs a supervisor and has none."""
        name = paths.name
        if name in self._threads and self._threads[name].is_alive():
            return
        now = time.monotonic()
        if self._next_look.get(name, 0.0) > now:
            return
        is_mine = paths.is_mine()
        if is_mine and supervision.is_supervised(paths.flow_lock):
            return
        if not is_mine or not self._is_live(paths):
            self._next_look[name] = now + ENDED_S
            return
        self._log.info("supervising %s", name)
        self._threads[name] = threading.Thread(
            target=self._supervise, args=(paths,), name=f"holdfast-{name}", daemon=True
        )
        self._threads[name].start()

    def _is_live(self, paths: RunPaths) -> bool:
        """Return whether a run needs one. If it does not, it is read again if its files change."""
        stamp = _stamp(paths)
        if stamp == self._ended.get(paths.name):
            return False
        history = history_cache.load_tallied(paths)
        # An order to a paused run is carried out at once.
        is_live = history.state.is_live or needs_supervisor(history)
        # The files may have changed since. Then the next look reads the run again.
        self._ended[paths.name] = () if is_live else stamp
        return is_live

    def _supervise(self, paths: RunPaths) -> None:
        """Supervise the run to its end. Its log goes into its own file."""
        log = logging.getLogger(f"holdfast.service.{paths.name}")
        log.propagate = False
        log.setLevel(logging.INFO)
        handler = logging.FileHandler(paths.flow_log, delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        try:
            history = carry(paths, log, self._index)
            self._log.info("%s %s", paths.name, history.state)
        except Exception:
            # Whatever the error of one run, the others need their supervisors.
            self._log.exception("%s has no supervisor for %.0f s", paths.name, FAILED_S)
            self._next_look[paths.name] = time.monotonic() + FAILED_S
        finally:
            log.removeHandler(handler)
            handler.close()


def _stamp(paths: RunPaths) -> tuple[object, ...]:
    """Return the sizes and times of the files that change when an ended run becomes live again."""
    with os.scandir(paths.journal) as entries:
        files = [Path(entry.path) for entry in entries]
    found = []
    for path in sorted([*files, paths.spec, paths.attempts]):
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            found.append((path.name, facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)
