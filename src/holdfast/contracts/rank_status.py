"""The status table: a node's shared memory, where ranks say where they are and read when to stop.

One page for the node and one record per local rank, all 64-bit words. A rank writes its own
record only; the node's stop coordinator (the agent, or a thread of the local rank 0 where there is
no agent) writes the head. A boundary costs a rank a few stores and one load, and no system call.

Ordering. A rank stores `entering` and then loads the proposal; the stop coordinator stores a
proposal, waits `STORE_VISIBLE_S`, and then loads `entering`. A store that preceded the rank's load
in program order is visible long before `STORE_VISIBLE_S` has passed, so either the rank saw the
proposal or the stop coordinator sees that the rank has gone past it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

MAGIC: Final = 0x48464253_00000001
HEAD_BYTES: Final = 4096
RECORD_BYTES: Final = 512
RANKS_MAX: Final = 1024
STORE_VISIBLE_S: Final = 0.002
REFUSAL_WAIT_S: Final = 0.05
# A rank's record keeps the durations of this many steps, a power of two.
RECENT_STEPS: Final = 16
AT_START: Final = -2
NOWHERE: Final = -1


class Phase(IntEnum):
    """What a rank is doing."""

    START = 0
    RENDEZVOUS = 1
    LOAD = 2
    COMPILE = 3
    TRAIN = 4
    EVAL = 5
    SAVE = 6
    STOP = 7
    DONE = 8


class Proposal(IntEnum):
    """Where the stop agreement stands."""

    NONE = 0
    PROPOSED = 1
    GO = 2
    ABORT = 3
    SAVE = 4  # leave not: save together and train on


class _Head(IntEnum):
    MAGIC = 0
    RANKS = 1
    SERIAL = 2
    STEP = 3
    STATE = 4
    STOPPING = 5
    DEADLINE = 6  # float: Unix seconds, 0 for none


class _Record(IntEnum):
    PID = 0
    RANK = 1
    COMPLETED = 2
    ENTERING = 3
    PHASE = 4
    BEAT = 5  # float: monotonic seconds
    RESUMED = 6
    WAITING = 7
    SIGNAL = 8
    STEP_TIME = 9  # float: seconds of the last step
    STACKS_SIGNAL = 10  # the signal that makes the rank write its stacks, 0 for none
    STACKS_FILE = 11  # the rank's own file descriptor that they are written to
    ASKED = 12  # the step whose loss all ranks should talk about, 0 for none
    MEETING = 13  # the number of the newest meeting that this rank came to


# floats, after the words above: seconds of the last `RECENT_STEPS` steps, by step number
_RECENT: Final = 16
_RECENT_MASK: Final = RECENT_STEPS - 1
# words, after those: what the rank says at meetings of even and of odd numbers
_SAID: Final = (32, 48)
SAID_MAX: Final = 16
_SERIAL_BITS: Final = 24
_SERIAL_MASK: Final = (1 << _SERIAL_BITS) - 1


class RankStatusTable:
    """A view of the status table's memory; every process of a node that opens it sees the same
    words."""

    def __init__(self, handle: int) -> None:
        self._map = mmap.mmap(handle, 0)
        self._words = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")
        if self._words[_Head.MAGIC] != MAGIC:
            raise ValueError("not a Holdfast rank status table, or one of another version")

    @classmethod
    def create(cls, ranks: int) -> tuple[RankStatusTable, int]:
        """A new status table for `ranks` local ranks, and the file descriptor that keeps it alive.

        Other processes of the same user open it as `/proc/<pid>/fd/<descriptor>`.
        """
        if not 1 <= ranks <= RANKS_MAX:
            raise ValueError(f"{ranks} ranks on one node: expected 1 to {RANKS_MAX}")
        handle = os.memfd_create("holdfast-rank-status", os.MFD_CLOEXEC)
        os.ftruncate(handle, HEAD_BYTES + ranks * RECORD_BYTES)
        with mmap.mmap(handle, 0) as memory, memoryview(memory) as view, view.cast("q") as words:
            words[_Head.MAGIC] = MAGIC
            words[_Head.RANKS] = ranks
        status_table = cls(handle)
        status_table.reset()
        return status_table, handle

    @classmethod
    def open(cls, path: str) -> RankStatusTable:
        """The status table at `path`; raises `OSError` when its flusher supervisor is gone."""
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(handle)
        finally:
            os.close(handle)

    def reset(self) -> None:
        """Make the status table ready for a new launch: no proposal, no rank seen."""
        self._words[_Head.STATE] = Proposal.NONE
        self._words[_Head.STOPPING] = 0
        self._floats[_Head.DEADLINE] = 0.0
        for local in range(self.ranks):
            at = self._at(local)
            for word in range(RECORD_BYTES // 8):
                self._words[at + word] = 0
            for field in (_Record.COMPLETED, _Record.ENTERING, _Record.RANK, _Record.RESUMED):
                self._words[at + field] = NOWHERE

    def close(self) -> None:
        """Let the memory go from this process."""
        self._words.release()
        self._floats.release()
        self._map.close()

    @property
    def ranks(self) -> int:
        """Local ranks that have a record."""
        return self._words[_Head.RANKS]

    def record(self, local_rank: int) -> RankRecord:
        """The record of one local rank, for its own process to write."""
        if not 0 <= local_rank < self.ranks:
            raise ValueError(f"local rank {local_rank}: this table has 0 to {self.ranks - 1}")
        return RankRecord(self, self._words, self._floats, self._at(local_rank))

    def records(self) -> list[RankRecord]:
        """All records, in order of local rank."""
        return [self.record(local) for local in range(self.ranks)]

    # --- the head: written by the stop coordinator
    # -------------------------------------------------

    @property
    def proposal(self) -> tuple[Proposal, int, int]:
        """(state, serial, step) of the current proposal."""
        words = self._words
        return Proposal(words[_Head.STATE]), words[_Head.SERIAL], words[_Head.STEP]

    def propose(self, serial: int, step: int) -> None:
        """Ask every rank to wait after `step` (`AT_START`: before its first)."""
        self._words[_Head.STATE] = Proposal.NONE
        self._words[_Head.SERIAL] = serial
        self._words[_Head.STEP] = step
        self._words[_Head.STATE] = Proposal.PROPOSED

    def answer(self, serial: int, state: Proposal) -> None:
        """Say `GO`, `SAVE` or `ABORT` to the ranks that wait on proposal `serial`."""
        if self._words[_Head.SERIAL] == serial:
            self._words[_Head.STATE] = state

    @property
    def stopping(self) -> bool:
        """True from the first wish to stop on; slow phases poll this."""
        return bool(self._words[_Head.STOPPING])

    @property
    def deadline(self) -> float | None:
        """Unix seconds at which the attempt will be killed, when known."""
        return self._floats[_Head.DEADLINE] or None

    def announce_stop(self, deadline: float | None) -> None:
        """Say that a stop is wanted, by `deadline` (Unix seconds) if there is one."""
        self._floats[_Head.DEADLINE] = deadline or 0.0
        self._words[_Head.STOPPING] = 1

    def accepts(self, serial: int, step: int) -> bool:
        """True when no rank has gone past `step` unseen; called after `propose`.

        Waits `STORE_VISIBLE_S`, and up to `REFUSAL_WAIT_S` more for a rank that stands at the
        boundary.
        """
        time.sleep(STORE_VISIBLE_S)
        give_up = time.monotonic() + REFUSAL_WAIT_S
        while True:
            ahead = [r for r in self.records() if r.is_past(serial, step)]
            if not ahead:
                return True
            if time.monotonic() > give_up:
                return False
            time.sleep(0.0005)

    @property
    def newest_entered(self) -> int:
        """The newest step that a rank has entered, or `NOWHERE`."""
        return max(record.entering for record in self.records())

    @property
    def oldest_entered(self) -> int:
        """The oldest step that a rank is in, `NOWHERE` while one has entered none."""
        return min(record.entering for record in self.records())

    @property
    def asked(self) -> int:
        """The newest step for which a rank asks all others to meet, or 0."""
        return max(record.asked for record in self.records())

    @property
    def signals(self) -> int:
        """The highest signal number that a rank caught, or 0."""
        return max(record.signal for record in self.records())

    def _at(self, local_rank: int) -> int:
        return (HEAD_BYTES + local_rank * RECORD_BYTES) // 8


class RankRecord:
    """One rank's words. Its own process writes them, the stop coordinator reads them."""

    __slots__ = ("_at", "_floats", "_status_table", "_words")

    def __init__(
        self,
        status_table: RankStatusTable,
        words: memoryview[int],
        floats: memoryview[float],
        at: int,
    ) -> None:
        self._status_table, self._words, self._floats, self._at = status_table, words, floats, at

    def register(self, rank: int, resumed_step: int) -> None:
        """Say who this is and which step it starts after."""
        self._words[self._at + _Record.PID] = os.getpid()
        self._words[self._at + _Record.RANK] = rank
        self._words[self._at + _Record.RESUMED] = resumed_step
        self._words[self._at + _Record.COMPLETED] = resumed_step
        self._floats[self._at + _Record.BEAT] = time.monotonic()

    def finish_step(self, completed: int, phase: Phase = Phase.TRAIN) -> bool:
        """Publish the boundary after step `completed`; True when a proposal must be considered.

        This is all that an ordinary step pays.
        """
        words, at, now = self._words, self._at, time.monotonic()
        floats = self._floats
        step_s = now - floats[at + _Record.BEAT]
        floats[at + _Record.STEP_TIME] = floats[at + _RECENT + (completed & _RECENT_MASK)] = step_s
        floats[at + _Record.BEAT] = now
        words[at + _Record.COMPLETED] = completed
        words[at + _Record.PHASE] = phase
        words[at + _Record.ENTERING] = completed + 1
        return words[_Head.STATE] != Proposal.NONE

    def wait_at(self, completed: int, serial: int) -> None:
        """Say that this rank stands at the boundary after `completed`, on proposal `serial`."""
        self._words[self._at + _Record.WAITING] = serial
        self._words[self._at + _Record.ENTERING] = completed

    def go_on(self, completed: int) -> None:
        """Say that this rank waits no longer and enters the step after `completed`.

        A serial left behind would pass for a vote when a later agreement counts from 1 again.
        """
        self._words[self._at + _Record.ENTERING] = completed + 1
        self._words[self._at + _Record.WAITING] = 0

    def beat(self, phase: Phase) -> None:
        """Say that this rank lives, and in which phase."""
        self._words[self._at + _Record.PHASE] = phase
        self._floats[self._at + _Record.BEAT] = time.monotonic()

    def offer_stacks(self, signal_number: int, descriptor: int) -> None:
        """Say which signal makes this process write its stacks, and to which of its files."""
        self._words[self._at + _Record.STACKS_FILE] = descriptor
        self._words[self._at + _Record.STACKS_SIGNAL] = signal_number

    def catch(self, signal_number: int) -> None:
        """All that a signal handler does: one store."""
        self._words[self._at + _Record.SIGNAL] = signal_number

    def ask(self, step: int) -> None:
        """Ask for a meeting of all ranks about step `step`; 0 when they have met."""
        self._words[self._at + _Record.ASKED] = step

    def say(self, meeting: int, values: Sequence[int]) -> None:
        """Publish this rank's values for meeting number `meeting`, from 1; `SAID_MAX` at most.

        Each word carries the meeting's number, so a reader believes a word by itself and needs no
        order of stores. A rank says something new in the same half only after all others came to
        the meeting between, and so have read this one.
        """
        if len(values) > SAID_MAX:
            raise ValueError(f"{len(values)} values for a meeting: expected {SAID_MAX} at most")
        at = self._at + _SAID[meeting & 1]
        for offset, value in enumerate(values):
            self._words[at + offset] = value << _SERIAL_BITS | meeting & _SERIAL_MASK
        self._words[self._at + _Record.MEETING] = meeting

    def said(self, meeting: int, count: int) -> list[int] | None:
        """This rank's `count` values for meeting number `meeting`; None until all are there."""
        at, serial = self._at + _SAID[meeting & 1], meeting & _SERIAL_MASK
        words = [self._words[at + offset] for offset in range(count)]
        if any(word & _SERIAL_MASK != serial for word in words):
            return None
        return [word >> _SERIAL_BITS for word in words]

    @property
    def meeting(self) -> int:
        return self._words[self._at + _Record.MEETING]

    @property
    def asked(self) -> int:
        return self._words[self._at + _Record.ASKED]

    def is_past(self, serial: int, step: int) -> bool:
        """True when this rank is inside a step after `step` and does not wait on `serial`."""
        if self.waiting == serial:
            return False
        return self.entering > (NOWHERE if step == AT_START else step)

    @property
    def pid(self) -> int:
        return self._words[self._at + _Record.PID]

    @property
    def rank(self) -> int:
        return self._words[self._at + _Record.RANK]

    @property
    def resumed_step(self) -> int:
        return self._words[self._at + _Record.RESUMED]

    @property
    def completed(self) -> int:
        return self._words[self._at + _Record.COMPLETED]

    @property
    def entering(self) -> int:
        return self._words[self._at + _Record.ENTERING]

    @property
    def phase(self) -> Phase:
        return Phase(self._words[self._at + _Record.PHASE])

    @property
    def beat_at(self) -> float:
        """Monotonic seconds of the last sign of life, 0 when there was none."""
        return self._floats[self._at + _Record.BEAT]

    @property
    def step_time_s(self) -> float:
        return self._floats[self._at + _Record.STEP_TIME]

    def recent_steps_s(self, after: int) -> list[float]:
        """Seconds of the steps after `after`, oldest first; the last `RECENT_STEPS` at most."""
        newest = self.completed
        first = max(after + 1, newest - RECENT_STEPS + 1, 0)
        at = self._at + _RECENT
        return [self._floats[at + (step & _RECENT_MASK)] for step in range(first, newest + 1)]

    @property
    def stacks_offer(self) -> tuple[int, int]:
        """(signal, descriptor) of `offer_stacks`; the signal is 0 when nothing was offered."""
        words, at = self._words, self._at
        return words[at + _Record.STACKS_SIGNAL], words[at + _Record.STACKS_FILE]

    @property
    def waiting(self) -> int:
        return self._words[self._at + _Record.WAITING]

    @property
    def signal(self) -> int:
        return self._words[self._at + _Record.SIGNAL]
