"""The rank status table: shared memory of a node, with each rank's progress and the stop proposal.

It has one page for the node (the head) and one record per local rank, all of 64-bit words. A rank
writes only its own record. The node's stop coordinator (the agent, or a thread of local rank 0
where there is no agent) writes the head. A step boundary costs a rank a few stores and one load,
without a system call.

Memory ordering: a rank stores `entering` and then loads the proposal. The stop coordinator stores a
proposal, waits `STORE_VISIBLE_S`, and then loads `entering`. The rank's store becomes visible long
before that wait is over. So either the rank sees the proposal, or the stop coordinator sees that
the rank is past the step. Words that belong together are published by the last of them, with a
fence before it and one in the reader (`memory_order`). Only `finish_step` has none: durations of
steps are for people, and may be those of a step before.
"""

from __future__ import annotations

import mmap
import os
import time
from _thread import allocate_lock
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

# The order of loads and stores in memory that processes share without a lock.
#
# A writer stores data and then a word that says that the data is there. A reader loads the word
# and then the data. x86 keeps both orders by itself. An aarch64 processor may make the word
# visible before the data, or load the data before the word. A fence on both sides forbids that:
#
#     writer: data, fence(), word          reader: word, fence(), data


def fence() -> None:
    """Complete all loads and stores so far before any later one.

    Python has no instruction for it, but its locks contain the parts. Nothing moves behind the
    release of a lock or before the acquisition of one, and a processor does not make an acquisition
    before an earlier release. The lock is new, so this neither waits nor fails in a signal handler
    or in a forked child.
    """
    lock = allocate_lock()
    lock.acquire()
    lock.release()
    lock.acquire()


MAGIC: Final = 0x48464253_00000001
HEAD_BYTES: Final = 4096
RECORD_BYTES: Final = 512
RANKS_MAX: Final = 1024
STORE_VISIBLE_S: Final = 0.002
REFUSAL_WAIT_S: Final = 0.05
# A rank's record has the durations of this many recent steps. Must be a power of two.
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
    """The state of the stop agreement."""

    NONE = 0
    PROPOSED = 1
    GO = 2
    ABORT = 3
    SAVE = 4  # do not exit; save together and continue
    TEST = 5  # do not exit; measure the nodes and their links together, and continue


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
    STACKS_FILE = 11  # the rank's own file descriptor for the stacks
    ASKED = 12  # the step for whose loss all ranks must meet, 0 for none
    MEETING = 13  # the number of the newest meeting that this rank joined
    ENDED = 14  # the last step after which this rank completed the end of an epoch
    DATA_WAIT = 15  # float: see `RankRecord.data_wait_s`


# Words that are `NOWHERE` in a new launch.
_NOWHERE_FIRST: Final = (
    _Record.COMPLETED,
    _Record.ENTERING,
    _Record.RANK,
    _Record.RESUMED,
    _Record.ENDED,
)

# After the words above: floats, the seconds of the last `RECENT_STEPS` steps, by step number.
_RECENT: Final = 16
_RECENT_MASK: Final = RECENT_STEPS - 1
# After those: words, the rank's values for meetings with even and with odd numbers.
_MEETING_AT: Final = (32, 48)
SAID_MAX: Final = 16
# A larger number does not fit beside the meeting's number.
SAID_VALUE_MAX: Final = 1 << 38
# As plain integers, for the step boundary.
_STATE_AT: Final = int(_Head.STATE)
_NONE: Final = int(Proposal.NONE)
_TRAIN: Final = int(Phase.TRAIN)
_SERIAL_BITS: Final = 24
_SERIAL_MASK: Final = (1 << _SERIAL_BITS) - 1


class RankStatusTable:
    """A view of the table's memory. All processes of a node that open it share the same words."""

    def __init__(self, handle: int) -> None:
        self._map = mmap.mmap(handle, 0)
        self._words = memoryview(self._map).cast("q")
        self._floats = memoryview(self._map).cast("d")
        if self._words[_Head.MAGIC] != MAGIC:
            raise ValueError("not a rank status table of this version of Holdfast")

    @classmethod
    def create(cls, ranks: int) -> tuple[RankStatusTable, int]:
        """Create a table for `ranks` local ranks. Return it and the descriptor that keeps it alive.

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
        """Open the table at `path`. Raises `OSError` if the process that created it is gone."""
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(handle)
        finally:
            os.close(handle)

    def reset(self) -> None:
        """Clear the table for a new launch: no proposal and no registered rank."""
        self._words[_Head.STATE] = Proposal.NONE
        self._words[_Head.STOPPING] = 0
        self._floats[_Head.DEADLINE] = 0.0
        for local in range(self.ranks):
            at = self._at(local)
            for word in range(RECORD_BYTES // 8):
                self._words[at + word] = 0
            for field in _NOWHERE_FIRST:
                self._words[at + field] = NOWHERE

    def close(self) -> None:
        """Unmap the memory from this process."""
        self._words.release()
        self._floats.release()
        self._map.close()

    @property
    def ranks(self) -> int:
        """The number of local ranks with a record."""
        return self._words[_Head.RANKS]

    def record(self, local_rank: int) -> RankRecord:
        """Return the record of one local rank. Only that rank's process may write to it."""
        if not 0 <= local_rank < self.ranks:
            raise ValueError(f"local rank {local_rank}: expected 0 to {self.ranks - 1}")
        return RankRecord(self, self._words, self._floats, self._at(local_rank))

    def records(self) -> list[RankRecord]:
        """Return all records, in order of local rank."""
        return [self.record(local) for local in range(self.ranks)]

    # --- The head, written by the stop coordinator.

    @property
    def proposal(self) -> tuple[Proposal, int, int]:
        """(state, serial, step) of the current proposal."""
        words = self._words
        state = Proposal(words[_Head.STATE])
        fence()
        return state, words[_Head.SERIAL], words[_Head.STEP]

    def propose(self, serial: int, step: int) -> None:
        """Ask every rank to wait after `step` (`AT_START`: before its first step)."""
        self._words[_Head.STATE] = Proposal.NONE
        fence()
        self._words[_Head.SERIAL] = serial
        self._words[_Head.STEP] = step
        fence()
        self._words[_Head.STATE] = Proposal.PROPOSED

    def answer(self, serial: int, state: Proposal) -> None:
        """Send an answer, such as `GO` or `ABORT`, to the ranks that wait on proposal `serial`."""
        if self._words[_Head.SERIAL] == serial:
            self._words[_Head.STATE] = state

    @property
    def stopping(self) -> bool:
        """True after the first stop request. Slow phases poll this."""
        is_stopping = bool(self._words[_Head.STOPPING])
        fence()
        return is_stopping

    @property
    def deadline(self) -> float | None:
        """The time at which the attempt will be killed, in Unix seconds; None if unknown."""
        return self._floats[_Head.DEADLINE] or None

    def announce_stop(self, deadline: float | None) -> None:
        """Announce a stop request, with its `deadline` in Unix seconds if there is one."""
        self._floats[_Head.DEADLINE] = deadline or 0.0
        fence()
        self._words[_Head.STOPPING] = 1

    def accepts(self, serial: int, step: int) -> bool:
        """Return True if no rank is past `step`. Call it after `propose`.

        Waits `STORE_VISIBLE_S`, and up to `REFUSAL_WAIT_S` more for a rank that is at the step
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
        """The newest step that any rank has entered, or `NOWHERE`."""
        return max(record.entering for record in self.records())

    @property
    def oldest_entered(self) -> int:
        """The oldest step that any rank is in; `NOWHERE` while a rank has entered none."""
        return min(record.entering for record in self.records())

    @property
    def asked(self) -> int:
        """The newest step for which a rank asks all ranks to meet, or 0."""
        return max(record.asked for record in self.records())

    @property
    def signals(self) -> int:
        """The highest signal number that any rank caught, or 0."""
        return max(record.signal for record in self.records())

    def _at(self, local_rank: int) -> int:
        return (HEAD_BYTES + local_rank * RECORD_BYTES) // 8


class _Word:
    """One word of a rank's record."""

    def __init__(self, word: _Record) -> None:
        self._word = word

    def __get__(self, record: RankRecord, _kind: type) -> int:
        return record._words[record._at + self._word]


class RankRecord:
    """One rank's record. Its own process writes it, and the stop coordinator reads it."""

    __slots__ = (
        *("_at", "_floats", "_status_table", "_words"),
        *("_beat_at", "_completed_at", "_entering_at", "_phase_at", "_recent_at", "_step_time_at"),
        "_data_wait_at",
    )

    rank = _Word(_Record.RANK)
    resumed_step = _Word(_Record.RESUMED)
    completed = _Word(_Record.COMPLETED)
    entering = _Word(_Record.ENTERING)
    waiting = _Word(_Record.WAITING)
    signal = _Word(_Record.SIGNAL)
    meeting = _Word(_Record.MEETING)
    asked = _Word(_Record.ASKED)
    ended = _Word(_Record.ENDED)

    def __init__(
        self,
        status_table: RankStatusTable,
        words: memoryview[int],
        floats: memoryview[float],
        at: int,
    ) -> None:
        self._status_table, self._words, self._floats, self._at = status_table, words, floats, at
        # Plain integers: sums with enum members would take two thirds of `finish_step`.
        self._completed_at, self._entering_at = at + _Record.COMPLETED, at + _Record.ENTERING
        self._phase_at, self._beat_at = at + _Record.PHASE, at + _Record.BEAT
        self._step_time_at, self._recent_at = at + _Record.STEP_TIME, at + _RECENT
        self._data_wait_at = at + _Record.DATA_WAIT

    @property
    def pid(self) -> int:
        """The rank's process, or 0. If it is there, so is the rest of `register`."""
        found = self._words[self._at + _Record.PID]
        fence()
        return found

    def register(self, rank: int, resumed_step: int) -> None:
        """Record this process's id and rank, and the step after which it starts."""
        self._words[self._at + _Record.RANK] = rank
        self._words[self._at + _Record.RESUMED] = resumed_step
        self._words[self._at + _Record.COMPLETED] = resumed_step
        self._floats[self._at + _Record.BEAT] = time.monotonic()
        fence()
        self._words[self._at + _Record.PID] = os.getpid()

    def finish_step(self, completed: int, phase: int = _TRAIN) -> bool:
        """Publish the end of step `completed`. Return True if there is a proposal to consider.

        This is the whole cost of a normal step.
        """
        words, floats, beat_at = self._words, self._floats, self._beat_at
        now = time.monotonic()
        step_s = now - floats[beat_at]
        floats[self._step_time_at] = floats[self._recent_at + (completed & _RECENT_MASK)] = step_s
        floats[beat_at] = now
        words[self._completed_at] = completed
        words[self._phase_at] = phase
        words[self._entering_at] = completed + 1
        return words[_STATE_AT] != _NONE

    def wait_at(self, completed: int, serial: int) -> None:
        """Publish that this rank waits after step `completed`, on proposal `serial`."""
        self._words[self._at + _Record.WAITING] = serial
        fence()
        self._words[self._at + _Record.ENTERING] = completed

    def go_on(self, completed: int) -> None:
        """Publish that this rank stops waiting and enters the step after `completed`.

        The serial is cleared, because a later agreement that counts from 1 again would take it for
        a vote.
        """
        self._words[self._at + _Record.ENTERING] = completed + 1
        fence()
        self._words[self._at + _Record.WAITING] = 0

    def begin_data_wait(self) -> None:
        """Publish that this rank waits for its next batch."""
        # One word holds both facts, so no reader sees half of a change: minus the time at which
        # the wait would have begun if all waits were one.
        self._floats[self._data_wait_at] -= time.monotonic()

    def end_data_wait(self) -> None:
        """Publish that the batch is there."""
        self._floats[self._data_wait_at] += time.monotonic()

    def data_wait_s(self, now: float) -> tuple[float, bool]:
        """Return the seconds that this rank has waited for data, and whether it waits now.

        `now` is monotonic seconds.
        """
        word = self._floats[self._data_wait_at]
        return (max(0.0, word + now), True) if word < 0 else (word, False)

    def finish_end(self, step: int) -> None:
        """Publish that the end of an epoch is complete, which follows `step`."""
        self._words[self._at + _Record.ENDED] = step

    def beat(self, phase: Phase) -> None:
        """Publish a sign of life and the phase of this rank."""
        self._words[self._at + _Record.PHASE] = phase
        self._floats[self._at + _Record.BEAT] = time.monotonic()

    def offer_stacks(self, signal_number: int, descriptor: int) -> None:
        """Publish the signal that makes this process write its stacks, and their descriptor."""
        self._words[self._at + _Record.STACKS_FILE] = descriptor
        fence()
        self._words[self._at + _Record.STACKS_SIGNAL] = signal_number

    def catch(self, signal_number: int) -> None:
        """Record a caught signal. This single store is all that a signal handler does."""
        self._words[self._at + _Record.SIGNAL] = signal_number

    def ask(self, step: int) -> None:
        """Ask for a meeting of all ranks about `step`; 0 withdraws the request."""
        self._words[self._at + _Record.ASKED] = step

    def say(self, meeting: int, values: Sequence[int]) -> None:
        """Publish this rank's values, at most `SAID_MAX`, for meeting number `meeting` (from 1).

        Each word contains the meeting's number, so a reader can check each word alone and the order
        of the stores does not matter. A rank reuses a half only after all others have joined the
        meeting in between, and so have read the old values.
        """
        if len(values) > SAID_MAX:
            raise ValueError(f"{len(values)} values for a meeting: expected at most {SAID_MAX}")
        at = self._at + _MEETING_AT[meeting & 1]
        for offset, value in enumerate(values):
            self._words[at + offset] = value << _SERIAL_BITS | meeting & _SERIAL_MASK
        fence()
        self._words[self._at + _Record.MEETING] = meeting

    def said(self, meeting: int, count: int) -> list[int] | None:
        """Return this rank's `count` values for meeting `meeting`; None until all are published."""
        at, serial = self._at + _MEETING_AT[meeting & 1], meeting & _SERIAL_MASK
        words = [self._words[at + offset] for offset in range(count)]
        if any(word & _SERIAL_MASK != serial for word in words):
            return None
        return [word >> _SERIAL_BITS for word in words]

    def is_past(self, serial: int, step: int) -> bool:
        """Return True if this rank is in a step after `step` and does not wait on `serial`."""
        if self.waiting == serial:
            return False
        fence()
        return self.entering > (NOWHERE if step == AT_START else step)

    @property
    def phase(self) -> Phase:
        return Phase(self._words[self._at + _Record.PHASE])

    @property
    def beat_at(self) -> float:
        """The monotonic time of the last sign of life in seconds, or 0."""
        return self._floats[self._at + _Record.BEAT]

    @property
    def step_time_s(self) -> float:
        return self._floats[self._at + _Record.STEP_TIME]

    def recent_steps_s(self, after: int) -> list[float]:
        """Return the seconds of the steps after `after`, oldest first, at most `RECENT_STEPS`."""
        newest = self.completed
        first = max(after + 1, newest - RECENT_STEPS + 1, 0)
        at = self._at + _RECENT
        return [self._floats[at + (step & _RECENT_MASK)] for step in range(first, newest + 1)]

    @property
    def stacks_offer(self) -> tuple[int, int]:
        """(signal, descriptor) of `offer_stacks`; the signal is 0 without an offer."""
        words, at = self._words, self._at
        signal_number = words[at + _Record.STACKS_SIGNAL]
        fence()
        return signal_number, words[at + _Record.STACKS_FILE]
