"""The ranks of one process group, the flushers of their nodes, and this rank's engine.

A process has one channel per process group that it saves with. Each node's first rank of the group
starts a flusher, which ends with the channel.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import WRAPPED_EXCEPTION, CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.distributed_c10d import _get_default_group

from holdfast.contracts import environment as names
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.environment import flush_timeout_s
from holdfast.contracts.errors import CheckpointError, HoldfastError, PreflightError, SaveError
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.trainer.dcp.record import RECORD, SaveRecord
from holdfast.trainer.format.metadata import open_checkpoint
from holdfast.trainer.loading.node import find_home
from holdfast.trainer.process.flusher_supervisor import FlusherSupervisor
from holdfast.trainer.process.program import program_digest
from holdfast.trainer.ranks.collective import agree, attempt, tree_over
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.ranks.rank_tree import RankTree
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.slots.modes import Staging
from holdfast.trainer.staging.in_flight import SaveResult

# Errors of both Holdfast and stock DCP, so that existing handlers of a program catch them.

NAMED_MAX = 4


class DcpSaveError(SaveError, CheckpointException):
    """A save failed. All ranks raise it. `failures` has the errors of the ranks, by rank."""

    def __init__(self, message: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        CheckpointException.__init__(self, message, failures)

    def __str__(self) -> str:
        return str(self.args[0])


class DcpLoadError(CheckpointError, CheckpointException):
    """A load failed. All ranks raise it. `failures` has the errors of the ranks, by rank."""

    def __init__(self, message: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        CheckpointException.__init__(self, message, failures)

    def __str__(self) -> str:
        return str(self.args[0])


def portable(error: BaseException | None) -> WRAPPED_EXCEPTION | None:
    """Return an error in the form that is sent to other ranks, None without an error.

    An error that cannot be pickled becomes a `HoldfastError` with its text.
    """
    if error is None:
        return None
    wrapped = _wrap_exception(error)
    # Built-in errors can be pickled. Another class may need arguments that its pickle lacks.
    if type(error).__module__ == "builtins":
        return wrapped
    return HoldfastError(f"{type(error).__name__}: {error}"), wrapped[1]


def describe(failures: Mapping[int, WRAPPED_EXCEPTION]) -> str:
    shown = sorted(failures)[:NAMED_MAX]
    texts = [f"rank {rank}: {_text(failures[rank][0])}" for rank in shown]
    more = f" and {len(failures) - NAMED_MAX} more ranks" if len(failures) > NAMED_MAX else ""
    return "; ".join(texts) + more


def _text(error: BaseException) -> str:
    is_ours = isinstance(error, HoldfastError)
    return str(error) if is_ours else f"{type(error).__name__}: {error}"


# The saves of one rank that are staged and not yet committed, and the futures that wait for them.
#
# A thread reads the results of saves from shared memory while there are any. It uses no process
# group and no tree, so it cannot get in the way of the program's own collectives.

POLL_S: Final = 0.005


class CommitFuture(Future[Any]):
    """The future of one save. Its result is the metadata, which is read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._metadata: Metadata | None = None

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait until the save is committed and return its metadata, as stock DCP's future does.

        Raises `SaveError` if it was not committed.
        """
        super().result(timeout)
        if self._metadata is None:
            self._metadata = open_checkpoint(self._directory).metadata
        return self._metadata


@dataclass(frozen=True)
class _Save:
    directory: Path
    token: str
    future: CommitFuture


class Pending:
    """The saves in flight of one engine. `record` is None except on the group's first rank."""

    def __init__(self, engine: CheckpointEngine, record: SaveRecord | None) -> None:
        self._engine, self._record = engine, record
        self._lock = threading.RLock()
        self._saves: dict[str, _Save] = {}
        self._wake = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def engine(self) -> Iterator[CheckpointEngine]:
        """Return the engine. No other thread uses it in the block."""
        with self._lock:
            yield self._engine

    def tokens_in(self, directory: Path) -> list[str]:
        with self._lock:
            return [one.token for one in self._saves.values() if one.directory == directory]

    def wait_for_slot(self, timeout_s: float) -> bool:
        """Wait until the next save will find a free slot. Return False after `timeout_s`."""
        give_up = time.monotonic() + timeout_s
        while True:
            # The lock is taken for a moment only, so that the thread can take results meanwhile.
            with self.engine() as engine:
                is_free = engine.wait_for_slot(0.0)
            if is_free or time.monotonic() >= give_up:
                return is_free
            time.sleep(POLL_S)

    def add(self, stage: Callable[[], str], directory: Path, token: str) -> CommitFuture:
        """Call `stage`, which stages a save and returns its name. Return the save's future.

        The future fails immediately if `stage` raises.
        """
        future = CommitFuture(directory)
        future.set_running_or_notify_cancel()
        # Under the lock, so that the thread cannot take the result before the save is in `_saves`.
        with self._lock:
            name, error = attempt(stage)
            if name is None:
                future.set_exception(error)
                return future
            self._saves[name] = _Save(directory, token, future)
            if self._thread is None:
                name = "holdfast-dcp"
                self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
                self._thread.start()
        self._wake.set()
        return future

    def wait(self, timeout_s: float) -> None:
        """Wait until nothing is in flight, for `timeout_s` seconds at most."""
        give_up = time.monotonic() + timeout_s
        while self._saves and time.monotonic() < give_up:
            self._take()
            time.sleep(POLL_S)

    def close(self) -> None:
        """End the thread. Futures that are still in flight fail."""
        self._take()
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            left, self._saves = list(self._saves.values()), {}
        for one in left:
            text = (
                f"{one.directory}: the process group ended before the save was committed; wait for "
                "the future before you destroy the group"
            )
            one.future.set_exception(SaveError(text))

    def _watch(self) -> None:
        while not self._is_closed:
            self._wake.wait()
            self._take()
            with self._lock:
                if not self._saves and not self._is_closed:
                    self._wake.clear()
            time.sleep(POLL_S)

    def _take(self) -> None:
        """Complete the futures of the saves that the flusher has decided."""
        with self._lock:
            decided = [
                (result, self._saves.pop(result.checkpoint))
                for result in self._engine.poll()
                if result.checkpoint in self._saves
            ]
        # Outside the lock: a callback of a future may start the next save.
        for result, save in decided:
            self._finish(result, save)

    def _finish(self, result: SaveResult, save: _Save) -> None:
        if result.committed:
            if self._record is not None:
                self._record.committed(save.directory, result.step)
            save.future.set_result(None)
            return
        problem = result.error or "the flusher gave no reason"
        if self._record is not None:
            self._record.failed(save.directory, result.step, problem)
        save.future.set_exception(SaveError(f"{save.directory}: not committed: {problem}"))


LOG_BYTES_SHOWN: Final = 2000
# A run's mirror and node-local tier are for the run's own checkpoints.
_OF_RUNS: Final = (names.CHECKPOINT_MIRROR, names.CHECKPOINT_LOCAL)


class Channel:
    """One rank's end of the channel. All ranks of the group create it together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Connect the ranks and start the flushers. Raises `CheckpointError` on all ranks."""
        self._held = contextlib.ExitStack()
        self.tree: RankTree = self._held.enter_context(tree_over(group))
        homes = self.tree.gather_all(find_home())
        own = homes[self.tree.index]
        mates = [rank for rank, home in enumerate(homes) if home == own]
        nodes = list(dict.fromkeys(homes))
        who = _identity(self.tree, mates, nodes.index(own), len(nodes))
        self._supervisor: FlusherSupervisor | None = None

        def start() -> str | None:
            return self._start_flusher(who) if who.local_rank == 0 else None

        place, places = agree(start, self.tree, lambda place: place)
        engine = CheckpointEngine(
            flusher=place or str(places[mates[0]]),
            run=None,
            identity=who,
            group=self.tree,
            any_bytes=True,
            staging=Staging.from_environment(os.environ),
        )
        self.is_root = self.tree.index == 0
        self.pending = Pending(engine, RECORD if self.is_root else None)
        self._engine = engine

    def _start_flusher(self, who: Identity) -> str:
        """Start this node's flusher and return the path of its address file.

        The file and the log are memory files, so that nothing is left behind by a killed program.
        """
        address = os.memfd_create("holdfast-address", os.MFD_CLOEXEC)
        log = os.memfd_create("holdfast-log", os.MFD_CLOEXEC)
        self._held.callback(os.close, log)
        folder = Path(f"/proc/{os.getpid()}/fd")
        try:
            self._supervisor = FlusherSupervisor(
                folder / str(address),
                node=who.node,
                nodes=who.nodes,
                log=folder / str(log),
                run=folder,
                address=address,
                env={key: value for key, value in os.environ.items() if key not in _OF_RUNS},
            )
        except PreflightError as error:
            said = os.pread(log, LOG_BYTES_SHOWN, 0).decode(errors="replace").strip()
            raise PreflightError(f"{error}. It printed: {said or 'nothing'}") from error
        return str(folder / str(address))

    def close(self, *, wait: bool) -> None:
        """Release everything. With `wait`, the saves in flight are committed first."""
        if wait:
            self.pending.wait(flush_timeout_s())
        self.pending.close()
        self._engine.close()
        if self._supervisor is not None:
            self._supervisor.close(wait=wait)
        self._held.close()


def _identity(tree: RankTree, mates: list[int], node: int, nodes: int) -> Identity:
    """Return the identity of this rank among the group's, in the agent's attempt if there is one.

    `mates` are the group's ranks on this node.
    """
    env = os.environ
    directory = env.get(names.RUN_DIRECTORY)
    run = RunPaths(Path(directory)) if directory else None
    record = read_document(RunRecord, run.spec) if run else None
    return Identity(
        run_uid=record.uid if record else "",
        run=run.name if run else "",
        attempt=int(env.get(names.ATTEMPT, "0")),
        launch=int(env.get(names.LAUNCH, "0")),
        rank=tree.index,
        local_rank=mates.index(tree.index),
        local_ranks=len(mates),
        world_size=tree.size,
        node=node,
        nodes=nodes,
        command_digest=program_digest(),
    )


# --- the channels of this process -----------------------------------------------------------------

_Alive = Callable[[], dist.ProcessGroup | None]
_channels: list[tuple[_Alive | None, Channel]] = []
_lock: Final = threading.RLock()


def channel_of(group: dist.ProcessGroup | None) -> Channel:
    """Return the channel of `group`, and create it if needed. All its ranks call this together.

    None means a single process. Channels of groups that no longer exist are closed.
    """
    with _lock:
        # A group that the program has destroyed can be followed by a new one with the same ranks.
        for alive, channel in [*_channels]:
            if alive is not None and not _exists(alive()):
                _channels.remove((alive, channel))
                # Without a wait: the ranks of a group that is gone cannot agree on anything any
                # more.
                channel.close(wait=False)
        for alive, channel in _channels:
            if (alive() if alive else None) is group:
                return channel
        made = Channel(group)
        _channels.append((weakref.ref(group) if group is not None else None, made))
        return made


def choose_group(group: dist.ProcessGroup | None, *, no_dist: bool) -> dist.ProcessGroup | None:
    """Return the process group of a call, None for a single process, as stock DCP chooses it."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return None
    return group if group is not None else _get_default_group()


def _exists(group: dist.ProcessGroup | None) -> bool:
    return group is not None and group in dist.distributed_c10d._world.pg_map


def _close_all() -> None:
    """Commit the saves in flight and end the flushers, at the end of the program."""
    with _lock:
        for _, channel in _channels:
            attempt(partial(channel.close, wait=True))
        _channels.clear()
    RECORD.close()


def _forget_all() -> None:
    """Forget the channels in a forked child. They are the parent's."""
    _channels.clear()
    RECORD.forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
