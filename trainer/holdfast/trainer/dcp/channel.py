"""The ranks of one process group, the flushers of their nodes, and this rank's engine.

A process has one channel per process group that it saves with. Each node's first rank of the group
starts a flusher, which ends with the channel.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from holdfast.contracts import environment as names
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.environment import flush_timeout_s
from holdfast.contracts.errors import PreflightError
from holdfast.contracts.records.attempt import RunRecord, read_document
from holdfast.trainer.dcp.pending import Pending
from holdfast.trainer.dcp.record import RECORD
from holdfast.trainer.loading.agreement import agree
from holdfast.trainer.loading.node import find_home
from holdfast.trainer.process.flusher_supervisor import FlusherSupervisor
from holdfast.trainer.process.program import program_digest
from holdfast.trainer.ranks.collective import attempt, tree_over
from holdfast.trainer.ranks.identity import Identity
from holdfast.trainer.ranks.rank_tree import RankTree
from holdfast.trainer.saving.engine import CheckpointEngine
from holdfast.trainer.slots.modes import Staging

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
