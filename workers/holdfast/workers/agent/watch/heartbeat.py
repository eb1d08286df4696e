"""The node's heartbeat: every few seconds, a thread reports the ranks' state to node 0.

Node 0's thread writes the newest heartbeats of all nodes to the attempt's folder.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.disk.rank_logs import TIMES, time_line
from holdfast.contracts.node.rank_status import RankStatusTable
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.watch.node_series import NodeSeries
from holdfast.workers.agent.watch.rank_watch import RankWatch
from holdfast.workers.nodes import heartbeats
from holdfast.workers.nodes.calibration import PhaseTimes, scaled
from holdfast.workers.nodes.gpus import GpuBeat, watch_gpus
from holdfast.workers.nodes.processes import boot_id

# Records when the ranks' output appeared, for `holdfast logs --timestamps`.

# For the first minutes of a launch, each heartbeat records. After that, a month of 16 files that
# always grow takes about 20 MB.
FINE_S: Final = 600.0
COARSE_S: Final = 60.0


class LogTimes:
    """Appends the sizes of a node's growing logs to the file `times.log` beside them."""

    def __init__(self, attempt: AttemptPaths, node: int) -> None:
        self._attempt, self._node = attempt, node
        self._launch, self._began, self._wrote = 0, 0.0, 0.0
        self._sizes: dict[str, int] = {}

    def look(self, launch: int, *, is_last: bool = False) -> None:
        """Record the logs that have grown. `launch` is the current one, 0 before the first."""
        now = time.time()
        if launch != self._launch:
            self._write(now)
            self._launch, self._began, self._sizes = launch, now, {}
        is_fine = now - self._began < FINE_S or not 0 <= now - self._wrote < COARSE_S
        if is_fine or is_last:
            self._write(now)

    def _write(self, now: float) -> None:
        if not self._launch:
            return
        folder = self._attempt.rank_log(self._node, self._launch, 0).parent
        grown = [
            (path.name, size)
            for path in sorted(folder.glob("rank-*.log"))
            if (size := _size_of(path)) > self._sizes.get(path.name, 0)
        ]
        if not grown:
            return
        with open(folder / TIMES, "a") as stream:
            stream.writelines(time_line(now, name, size) for name, size in grown)
        self._sizes.update(grown)
        self._wrote = now


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# The number of out-of-memory kills by the kernel, as evidence for causes.

_VMSTAT = Path("/proc/vmstat")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Return the out-of-memory kills so far in this process's control group, or the machine."""
    of_group = _of_own_group()
    return of_group if of_group is not None else _field(_VMSTAT, "oom_kill") or 0


def _of_own_group() -> int | None:
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            return _field(_GROUPS / path.lstrip("/") / "memory.events", "oom_kill")
        if "memory" in controllers.split(","):
            group = _GROUPS / "memory" / path.lstrip("/")
            return _field(group / "memory.oom_control", "oom_kill")
    return None


def _field(path: Path, name: str) -> int | None:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), None)


STOP_WAIT_S: Final = 5.0
# Clock adjustment shifts less than this between two heartbeats. More is a jump.
CLOCK_JUMP_S: Final = 5.0


class Heartbeat:
    """Reports what the rank watch has measured; never touches a rank."""

    def __init__(
        self,
        context: AgentContext,
        status_table: RankStatusTable,
        watch: RankWatch,
        program: Callable[[], tuple[heartbeats.RankBeat, ...]] = tuple,
    ) -> None:
        """`program` returns the part of a program that does not use the status table."""
        self.launch = 0
        # While this node gives way to another lead, it writes nothing.
        self.is_paused = False
        # On other nodes, sends a heartbeat to node 0 once this node has joined.
        self.send: Callable[[dict[str, Any]], object] | None = None
        self._context = context
        self._world_size = context.request.world_size
        self._every_s = heartbeats.interval_s(
            context.request.supervision.heartbeat_s, context.nodes_of_job
        )
        # The newest heartbeat of each node. The channel's thread adds those of other nodes.
        self._beats: dict[int, dict[str, Any]] = {}
        self._writer = heartbeats.HeartbeatWriter(context.attempt) if context.is_lead else None
        self._status_table, self._watch, self._program = status_table, watch, program
        self._log_times = LogTimes(context.attempt, context.node)
        self._gpus = watch_gpus()
        self._series = NodeSeries(context, watch, self.gpus, lambda: self.launch)
        self._boot_id = boot_id()
        self._clock = _clock_offset_s()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def gpus(self) -> tuple[GpuBeat, ...]:
        """Return the newest data on this node's GPUs."""
        return self._gpus.beats() if self._gpus else ()

    def take(self, beat: dict[str, Any]) -> None:
        """Take the heartbeat of another node, for the next write. Node 0 only."""
        self._beats[int(beat["node"])] = beat

    def forget(self, node: int) -> None:
        """Leave a lost node out of later writes. Node 0 only."""
        self._beats.pop(node, None)

    def lead(self) -> None:
        """Write the heartbeats of all nodes from now on, instead of sending this one's."""
        self.send, self._writer = None, heartbeats.HeartbeatWriter(self._context.attempt)

    def end_launch(self) -> None:
        """Keep what was measured of this launch, before the next one's ranks are watched."""
        self._series.end_bucket()

    def move(self, placed: AgentContext) -> None:
        """Report another place of this node, from the next launch on."""
        self._world_size = placed.request.world_size
        self._log_times = LogTimes(placed.attempt, placed.node)
        self._series.move(placed)

    def close(self) -> None:
        """Report one last heartbeat and stop."""
        self._over.set()
        self._series.close()
        self._thread.join(STOP_WAIT_S)
        if self._writer is not None and not self._thread.is_alive():
            self._writer.close()
        if self._gpus is not None:
            self._gpus.close()

    def _run(self) -> None:
        while True:
            is_last = self._over.wait(self._every_s)
            # A full or absent file system, or the loss of node 0, must not stop later heartbeats.
            with contextlib.suppress(OSError):
                self._look_at_clock()
            with contextlib.suppress(OSError):
                self._log_times.look(self.launch, is_last=is_last)
            with contextlib.suppress(OSError):
                self._report()
            if is_last:
                return

    def _report(self) -> None:
        if self.is_paused:
            return
        beat = self._take_beat().model_dump(mode="json", exclude_none=True)
        if self._writer is not None:
            self.take(beat)
            self._writer.write(list(self._beats.copy().values()))
        elif self.send is not None:
            self.send(beat)

    def _take_beat(self) -> heartbeats.NodeBeat:
        return heartbeats.NodeBeat(
            node=self._context.node,
            host=self._context.host,
            time=time.time(),
            attempt=self._context.request.attempt,
            launch=self.launch,
            agent_pid=os.getpid(),
            monotonic_s=round(time.monotonic(), 3),
            every_s=self._every_s,
            boot_id=self._boot_id,
            world_size=self._world_size,
            ranks=self._ranks() or self._program(),
            gpus=self.gpus(),
            phases=self._watch.summary(),
            memory_percent=psutil.virtual_memory().percent,
        )

    def _ranks(self) -> tuple[heartbeats.RankBeat, ...]:
        seen = zip(
            self._status_table.records(),
            self._watch.statuses(),
            self._watch.counters(),
            self._watch.step_times(),
            strict=True,
        )
        return tuple(
            heartbeats.RankBeat(
                rank=record.rank,
                step=record.completed,
                phase=status.phase,
                age_s=status.silent_s,
                step_time_s=round(record.step_time_s, 6),
                pid=record.pid,
                step_p50_s=round(p50_s, 6),
                step_p99_s=round(p99_s, 6),
                own_s=round(status.own_s, 6),
                rss_bytes=counters.rss_bytes,
                cpu_percent=counters.cpu_percent,
                threads=counters.threads,
                read_bytes=counters.read_bytes,
                write_bytes=counters.write_bytes,
            )
            for record, status, counters, (p50_s, p99_s) in seen
            if record.pid
        )

    def _look_at_clock(self) -> None:
        """Journal a jump of the clock. Silences are measured by the monotonic clock."""
        offset_s = _clock_offset_s()
        jump_s, self._clock = offset_s - self._clock, offset_s
        if abs(jump_s) < CLOCK_JUMP_S:
            return
        attempt = self._context.attempt
        with JournalWriter(attempt.node_journal(self._context.node)) as journal:
            text = f"the clock of {self._context.host} jumped by {jump_s:+.1f} s"
            journal.append(
                EventKind.NOTE, attempt=attempt.number, text=f"{text}, and so did its time stamps"
            )


def earlier_times(context: AgentContext) -> dict[str, PhaseTimes]:
    """Return the phase times of this run's last attempts, scaled to this attempt's rank count.

    Fewer ranks share the same global batch, so their steps take proportionally longer.
    """
    for attempt in reversed(context.run.list_attempts()):
        if attempt.number >= context.attempt.number:
            continue
        for beat in heartbeats.read_heartbeats(attempt):
            if beat.phases:
                factor = max(1.0, beat.world_size / context.request.world_size)
                return scaled(beat.phases, factor)
    return {}


def _clock_offset_s() -> float:
    """Return Unix time minus monotonic time, which is constant until the clock is set."""
    return time.time() - time.monotonic()
