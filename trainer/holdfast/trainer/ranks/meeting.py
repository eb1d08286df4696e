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
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.errors import HoldfastError, SessionError
from holdfast.contracts.node.rank_status import RankRecord, RankStatusTable

# The interval between polls. It is longer once a peer is late, because it may be minutes behind.
NAP_S: Final = 50e-6
LATE_S: Final = 0.05
LATE_NAP_S: Final = 1e-3
TIMEOUT_S: Final = 1800.0
# A rank that has passed a boundary did not join if its numbers are still missing after this time.
ABSENT_S: Final = 1.0
RANKS_NAMED_MAX: Final = 8


@dataclass(frozen=True)
class Boundary:
    """The end of `step`, or with `is_end` the end of the epoch after it, where ranks meet."""

    step: int
    is_end: bool = False

    def has_left(self, record: RankRecord) -> bool:
        """Return True if the rank of `record` has passed this boundary."""
        return (record.ended if self.is_end else record.completed) >= self.step

    def error(self, came: Sequence[int], absent: Sequence[int]) -> SessionError:
        """Return the error for ranks that continued without a meeting."""
        where = f"{'the end of the epoch after ' if self.is_end else ''}step {self.step}"
        return SessionError(
            f"{where}: {_listed(came)} came to save a checkpoint, and {_listed(absent)} went on. "
            "Call session.checkpoint() on every rank, not on rank 0 only, and loop over the same "
            "steps on all ranks"
        )


class NodeMeeting:
    """Agreement on the largest of each number, between all ranks of a status table."""

    def __init__(self, status_table: RankStatusTable, local_rank: int) -> None:
        self._mine = status_table.record(local_rank)
        self._all = status_table.records()
        # A session that is opened later in this launch continues the count: values of a former
        # meeting must not pass for those of the next.
        self._number = self._mine.meeting
        self._peers: dict[int, int] = {}

    def largest(self, values: Sequence[int], at: Boundary | None = None) -> list[int]:
        """Return the largest of each number over all ranks. Every rank passes the same count.

        `SAID_MAX` numbers are allowed. Raises `HoldfastError` if a peer has ended, or has not come
        within `TIMEOUT_S` seconds, and `SessionError` if one has passed `at`.
        """
        # Values carry this number, so it does not matter in which order the stores become visible
        # to other processes, see decision 43.
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
            if at is not None and time.monotonic() - began > ABSENT_S:
                self._require_presence(at, len(values))
            lost = [rank for rank in missing if rank in ended]
            if lost or time.monotonic() - began > TIMEOUT_S:
                why = "has ended" if lost else f"did not come within {TIMEOUT_S:.0f} s"
                raise HoldfastError(
                    f"rank {(lost or missing)[0]} {why}, and this rank waited for it at the end "
                    "of a step; see that rank's log for its own error"
                )
            # Sleep instead of spinning: at load 5 a spinning rank used the time that the late rank
            # needed, and the meeting took 4 to 6 ms as with gloo, see decision 43.
            time.sleep(LATE_NAP_S if time.monotonic() - began > LATE_S else NAP_S)

    def _require_presence(self, at: Boundary, count: int) -> None:
        """Raise `SessionError` if a rank has passed `at` without storing numbers."""
        gone = [record for record in self._all if at.has_left(record)]
        # A rank may have joined, had the answer and continued before this one looked.
        absent = [one.rank for one in gone if one.said(self._number, count) is None]
        if absent:
            came = [one.rank for one in self._all if one.said(self._number, count) is not None]
            raise at.error(came, absent)

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
                    # A process handle cannot mean another process that got the same pid later.
                    self._peers[record.pid] = os.pidfd_open(record.pid)
            except ProcessLookupError:
                ended.append(record.rank)
                continue
            handle = self._peers[record.pid]
            poll.register(handle, select.POLLIN)
            ranks[handle] = record.rank
        return ended + [ranks[handle] for handle, _ in poll.poll(0)]


def _listed(ranks: Sequence[int]) -> str:
    """Return "rank 0" or "ranks 1, 2", and not all names of many ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(map(str, ranks[:RANKS_NAMED_MAX]))
    more = len(ranks) - RANKS_NAMED_MAX
    return f"ranks {named}" + (f" and {more} more" if more > 0 else "")
