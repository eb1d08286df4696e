"""A thread that watches the ranks of this node through the status table and the kernel.

Ten times a second it looks for signs of life, measures silences and step times, and records whether
each rank's main thread waits for others. Hangs and stragglers are judged by these measurements.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import psutil

from holdfast.contracts.node.rank_status import NOWHERE, Phase, RankRecord, RankStatusTable
from holdfast.workers.agent.guard import is_running, is_unreaped
from holdfast.workers.agent.watch.kernel_view import waits_for_others
from holdfast.workers.agent.watch.silence import RankStatus
from holdfast.workers.nodes.calibration import Calibration, PhaseTimes, percentile
from holdfast.workers.nodes.series import NO_TIMES, RankTimes

TICK_S: Final = 0.1
STOP_WAIT_S: Final = 5.0
# How many samples of a rank's waiting are kept: with `TICK_S`, ten seconds of training.
MOMENTS: Final = 100
STEPS_KEPT: Final = 128
COUNTERS_S: Final = 1.0


@dataclass
class Counters:
    """The kernel's counters of a process; None if the kernel does not report one."""

    cpu_s: float = 0.0
    cpu_percent: float | None = None
    rss_bytes: int | None = None
    threads: int | None = None
    read_bytes: int | None = None
    write_bytes: int | None = None
    taken_at: float = 0.0

    @property
    def io_bytes(self) -> int:
        return (self.read_bytes or 0) + (self.write_bytes or 0)


@dataclass
class _Spent:
    """Where the time of a rank went since the last bucket of the series began, in seconds.

    `data_s` and `others_s` are parts of `trained_s`. `stepped_s` is the duration of `steps` steps.
    """

    trained_s: float = 0.0
    data_s: float = 0.0
    others_s: float = 0.0
    stepped_s: float = 0.0
    steps: int = 0

    def per_step(self, current_s: float) -> RankTimes:
        """Return the times per step; `current_s` is the time in the step that has not ended."""
        if not self.trained_s:
            return NO_TIMES
        step_s = self.stepped_s / self.steps if self.steps else current_s
        data_share, others_share = self.data_s / self.trained_s, self.others_s / self.trained_s
        return RankTimes(step_s, min(1.0, data_share) * step_s, others_share * step_s)


@dataclass
class _Rank:
    """What is remembered about one rank, always of the same process."""

    pid: int = 0
    beat_at: float = 0.0
    phase: Phase = Phase.START
    completed: int = NOWHERE
    moments: deque[bool] = field(default_factory=lambda: deque(maxlen=MOMENTS))
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    process: psutil.Process | None = None
    counters: Counters = field(default_factory=Counters)
    spent: _Spent = field(default_factory=_Spent)
    # The rank's wait for data at the last tick, and the time of that tick.
    data_wait_s: float = 0.0
    ticked_at: float = 0.0

    def step_times(self) -> tuple[float, float]:
        """Return (p50, p99) of the newest steps in seconds; zeros before the first."""
        ordered = sorted(self.steps_s)
        if not ordered:
            return 0.0, 0.0
        return percentile(ordered, 0.5), percentile(ordered, 0.99)

    @property
    def own_share(self) -> float:
        """The share of samples in which the rank did not wait for others."""
        return 1.0 - sum(self.moments) / len(self.moments) if self.moments else 1.0


class RankWatch:
    """Watches one node's status table; safe for use by several threads."""

    def __init__(
        self, status_table: RankStatusTable, first_rank: int, prior: Mapping[str, PhaseTimes]
    ) -> None:
        """`first_rank` is the rank of local rank 0. `prior` has the times of earlier attempts."""
        self.calibration = Calibration(prior, status_table.ranks)
        self._status_table, self._first_rank = status_table, first_rank
        self._lock = threading.Lock()
        self._ranks = [_Rank() for _ in range(status_table.ranks)]
        self._began_at = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Start a new launch and forget the ranks of the last one."""
        with self._lock:
            self._ranks = [_Rank() for _ in self._ranks]
            self._began_at = time.monotonic()

    def move(self, first_rank: int) -> None:
        """Give local rank 0 another rank, before the next launch begins."""
        self._first_rank = first_rank

    def close(self) -> None:
        """Stop watching. The status table may be closed afterwards."""
        self._over.set()
        self._thread.join(STOP_WAIT_S)

    def statuses(self) -> list[RankStatus]:
        """Return the current status of every rank of this node, by local rank."""
        now = time.monotonic()
        with self._lock:
            pairs = zip(self._status_table.records(), self._ranks, strict=True)
            return [self._status_of(i, record, seen, now) for i, (record, seen) in enumerate(pairs)]

    def counters(self) -> list[Counters]:
        """Return the kernel's counters of every rank, by local rank, at most a second old."""
        with self._lock:
            return [seen.counters for seen in self._ranks]

    def step_times(self) -> list[tuple[float, float]]:
        """Return (p50, p99) in seconds of the newest steps, by local rank."""
        with self._lock:
            return [seen.step_times() for seen in self._ranks]

    @property
    def first_rank(self) -> int:
        """The rank of local rank 0."""
        return self._first_rank

    def take_bucket(self) -> list[RankTimes]:
        """Return each rank's times per step since the last call, by local rank."""
        with self._lock:
            now, found = time.monotonic(), []
            for seen in self._ranks:
                found.append(seen.spent.per_step(max(0.0, now - seen.beat_at)))
                seen.spent = _Spent()
            return found

    def summary(self) -> dict[str, PhaseTimes]:
        """Return the known times of all phases, including earlier attempts."""
        with self._lock:
            return self.calibration.summary()

    def _run(self) -> None:
        while not self._over.wait(TICK_S):
            with self._lock:
                for record, seen in zip(self._status_table.records(), self._ranks, strict=True):
                    self._tick(record, seen)

    def _tick(self, record: RankRecord, seen: _Rank) -> None:
        pid, beat_at, phase, completed = record.pid, record.beat_at, record.phase, record.completed
        if not pid:
            return
        if pid != seen.pid:
            self._register(seen, pid, beat_at)
        elif beat_at > seen.beat_at:
            self._measure(record, seen, beat_at, completed)
        seen.beat_at, seen.phase, seen.completed = beat_at, phase, completed
        self._spend(record, seen, pid, phase)
        if time.monotonic() - seen.counters.taken_at >= COUNTERS_S:
            seen.counters = _count(seen)

    def _spend(self, record: RankRecord, seen: _Rank, pid: int, phase: Phase) -> None:
        """Record where the time since the last tick went. A wait for data is for no other rank."""
        now = time.monotonic()
        tick_s, seen.ticked_at = now - seen.ticked_at, now
        before_s = seen.data_wait_s
        seen.data_wait_s, is_in_data = record.data_wait_s(now)
        if phase is not Phase.TRAIN:
            return
        waits = not is_in_data and waits_for_others(pid)
        seen.moments.append(waits)
        data_s = min(tick_s, max(0.0, seen.data_wait_s - before_s))
        seen.spent.trained_s += tick_s
        seen.spent.data_s += data_s
        seen.spent.others_s += tick_s - data_s if waits else 0.0

    def _register(self, seen: _Rank, pid: int, beat_at: float) -> None:
        """Register a rank's process at its first sign of life, and record its start-up time."""
        seen.pid, seen.ticked_at = pid, time.monotonic()
        with contextlib.suppress(psutil.Error):
            seen.process = psutil.Process(pid)
        if beat_at > self._began_at:
            self.calibration.add("start", [beat_at - self._began_at])

    def _measure(self, record: RankRecord, seen: _Rank, beat_at: float, completed: int) -> None:
        """Record the silence that this sign of life ends, for the phase that the rank was in."""
        steps_s = record.recent_steps_s(seen.completed) if completed > seen.completed else []
        if seen.phase is Phase.TRAIN and steps_s:
            seen.steps_s.extend(steps_s)
            seen.spent.steps += len(steps_s)
            seen.spent.stepped_s += sum(steps_s)
            self.calibration.add("train", steps_s)
        elif seen.phase is not Phase.TRAIN:
            self.calibration.add(seen.phase.name.lower(), [beat_at - seen.beat_at])

    def _status_of(self, local: int, record: RankRecord, seen: _Rank, now: float) -> RankStatus:
        pid, phase = record.pid, record.phase.name.lower()
        step_s = seen.step_times()[0]
        return RankStatus(
            rank=self._first_rank + local,
            pid=pid,
            step=record.completed,
            phase=phase,
            silent_s=round(max(0.0, now - (record.beat_at or self._began_at)), 3),
            is_alive=is_running(pid) if pid else True,
            is_unreaped=is_unreaped(pid) if pid else False,
            step_s=step_s,
            own_s=step_s * seen.own_share,
            cpu_s=seen.counters.cpu_s,
            io_bytes=seen.counters.io_bytes,
            times=self.calibration.times(phase),
        )


def _count(seen: _Rank) -> Counters:
    """Return the kernel's counters of a rank; a value that it does not report keeps its default."""
    counted = Counters(taken_at=time.monotonic())
    process = seen.process
    if process is None:
        return counted
    with contextlib.suppress(psutil.Error), process.oneshot():
        times = process.cpu_times()
        counted.cpu_s = times.user + times.system
        counted.cpu_percent = process.cpu_percent()
        counted.rss_bytes = process.memory_info().rss
        counted.threads = process.num_threads()
        # Count requested bytes, including cached ones: reading from memory is progress as well.
        io = process.io_counters()
        counted.read_bytes, counted.write_bytes = io.read_chars, io.write_chars
    return counted
