"""The ranks of one node that read together: who they are, and memory that all of them see.

Each rank makes a window, a memory file that the others open through `/proc`. What one rank reads
for several it reads into its own window; the others copy from there. Windows have two halves,
so that one is filled while the other is copied from.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from holdfast.trainer.loading.plan import PIECE_BYTES

WINDOW_BYTES_MAX: Final = 256 * 1024 * 1024
SLOTS_MAX: Final = 8
HALVES: Final = 2


class Node:
    """The ranks that read together, of which this is number `rank` of `size`."""

    def __init__(self, group: dist.ProcessGroup | None, *, made: bool = False) -> None:
        self._group, self._made = group, made
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @classmethod
    def join(cls, group: dist.ProcessGroup | None) -> Node:
        """The ranks of `group` on this machine; all ranks of `group` call it together."""
        if group is None:
            return cls(None)
        homes = gather(group, _home())
        ranks = [rank for rank, home in enumerate(homes) if home == homes[dist.get_rank(group)]]
        if len(ranks) == len(homes):
            return cls(group)
        if len(ranks) == 1:
            return cls(None)
        world = [dist.get_global_rank(group, rank) for rank in ranks]
        return cls(dist.new_group(world, backend="gloo", use_local_synchronization=True), made=True)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return gather(self._group, value)

    def barrier(self) -> None:
        """Return when all ranks of the node have called it."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def leave(self) -> None:
        """Let go of a group that was made for this node."""
        if self._made:
            dist.destroy_process_group(self._group)


class Windows:
    """The windows of all ranks of a node, mapped; `slots` pieces in each half."""

    def __init__(self, node: Node) -> None:
        """All ranks of the node construct it together; see `opened` for whether it worked."""
        each = WINDOW_BYTES_MAX // (HALVES * PIECE_BYTES * node.size)
        self.slots = max(1, min(SLOTS_MAX, each))
        size = HALVES * self.slots * PIECE_BYTES
        handle = os.memfd_create("holdfast-window", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, size)
            places = node.gather(f"/proc/{os.getpid()}/fd/{handle}")
            self._maps = _map_all(places, size)
            # Nobody closes before everybody has opened.
            self.opened = all(node.gather(self._maps is not None))
        finally:
            os.close(handle)

    def slot(self, rank: int, half: int, slot: int) -> memoryview:
        """The memory of one piece in the window of `rank`."""
        assert self._maps is not None
        start = (half * self.slots + slot) * PIECE_BYTES
        return memoryview(self._maps[rank])[start : start + PIECE_BYTES]


def gather(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Every rank's value, by rank; one's own alone without a group."""
    if group is None:
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _map_all(places: Sequence[str], size: int) -> list[mmap.mmap] | None:
    """The memory at `places`; None where another process's may not be opened."""
    maps = []
    for place in places:
        try:
            handle = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Ranks in containers of their own: each then reads for itself.
            return None
        try:
            maps.append(mmap.mmap(handle, size))
        finally:
            os.close(handle)
    return maps


def _home() -> tuple[str, str, str]:
    """What processes that see each other in `/proc` have in common, and others have not."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return boot, socket.gethostname(), os.readlink("/proc/self/ns/pid")
