"""Agreement on numbers between the ranks of one node, in the node's shared memory.

A gloo collective wakes two threads on each side for every message. On busy cores each wake-up
waits for the kernel's scheduler, and a save pays for all of them. Here a rank stores its numbers
and polls for those of its peers.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from typing import Final

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.rank_status import RankStatusTable

# The interval between polls. It is longer once a peer is late, because it may be minutes behind.
NAP_S: Final = 50e-6
LATE_S: Final = 0.05
LATE_NAP_S: Final = 1e-3
TIMEOUT_S: Final = 1800.0


class NodeMeeting:
    """Agreement on the largest of each number, between all ranks of a status table."""

    def __init__(self, status_table: RankStatusTable, local_rank: int) -> None:
        self._mine = status_table.record(local_rank)
        self._all = status_table.records()
        self._number = self._mine.meeting
        self._peers: dict[int, int] = {}

    def largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks. Every rank passes equally many.

        `SAID_MAX` numbers are allowed. Raises `HoldfastError` if a peer has ended, or has not come
        within `TIMEOUT_S` seconds.
        """
        self._number += 1
        self._mine.say(self._number, values)
        began = time.monotonic()
        while True:
            # A peer may have stored its numbers before it ended.
            ended = self._find_ended() if time.monotonic() - began > LATE_S else []
            rows = [record.said(self._number, len(values)) for record in self._all]
            missing = [record.rank for record, one in zip(self._all, rows, strict=True) if not one]
            if values and not missing:
                return [max(column) for column in zip(*filter(None, rows), strict=True)]
            lost = [rank for rank in missing if rank in ended]
            if lost or time.monotonic() - began > TIMEOUT_S:
                why = "has ended" if lost else f"did not come within {TIMEOUT_S:.0f} s"
                raise HoldfastError(
                    f"rank {(lost or missing)[0]} {why}, and this rank waited for it at the end "
                    "of a step; see that rank's log for its own error"
                )
            time.sleep(LATE_NAP_S if time.monotonic() - began > LATE_S else NAP_S)

    def close(self) -> None:
        """Release the handles of the peers' processes."""
        for handle in self._peers.values():
            os.close(handle)
        self._peers.clear()

    def _find_ended(self) -> list[int]:
        """Return the ranks whose processes have ended, reaped or not."""
        poll = select.poll()
        ranks: dict[int, int] = {}
        ended = []
        for record in self._all:
            if record.pid in {0, os.getpid()}:
                continue
            try:
                if record.pid not in self._peers:
                    self._peers[record.pid] = os.pidfd_open(record.pid)
            except ProcessLookupError:
                ended.append(record.rank)
                continue
            handle = self._peers[record.pid]
            poll.register(handle, select.POLLIN)
            ranks[handle] = record.rank
        return ended + [ranks[handle] for handle, _ in poll.poll(0)]
