"""Heartbeats: one small file per node, which the node's agent replaces every few seconds."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from holdfast.contracts.attempt import Document, read_document
from holdfast.contracts.bounds import Name, Number, Ranks, Seconds, Step
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.workers.agent.calibration import PhaseTimes
from holdfast.workers.agent.gpus import GpuBeat

# A node is silent after this many missed heartbeats.
BEATS_MISSED_MAX: Final = 3
# The clocks of a cluster agree to far less than this. More is a configuration error.
CLOCK_SKEW_S: Final = 30.0


class RankBeat(Document):
    """One rank as the agent last saw it. `age_s` is the seconds since its last sign of life.

    `own_s` is the part of a step in which it did not wait for others. A value of None means that
    the kernel does not report it.
    """

    rank: Number
    step: Step
    phase: Name
    age_s: float | None
    step_time_s: float
    pid: Number
    step_p50_s: float = 0.0
    step_p99_s: float = 0.0
    own_s: float = 0.0
    rss_bytes: int | None = None
    cpu_percent: float | None = None
    threads: Number | None = None
    read_bytes: int | None = None
    write_bytes: int | None = None


class NodeBeat(Document):
    """`heartbeats/node-NNNN.json`: a node and its ranks.

    `time` is Unix seconds, for display only. `monotonic_s`, of the boot `boot_id`, does not change
    with the clock. `phases` is how long each phase is silent in normal operation.
    """

    node: Number
    host: Name
    time: Annotated[float, Field(allow_inf_nan=False)]
    attempt: Number
    launch: Number
    agent_pid: Number
    monotonic_s: Seconds = 0.0
    boot_id: Name = ""
    world_size: Ranks = 0
    ranks: tuple[RankBeat, ...] = ()
    gpus: tuple[GpuBeat, ...] = ()
    phases: dict[str, PhaseTimes] = Field(default_factory=dict)
    memory_percent: float | None = None


def read_heartbeats(paths: AttemptPaths) -> list[NodeBeat]:
    """Return the newest heartbeat of every node that wrote one, in order of node."""
    beats = []
    for path in sorted(paths.heartbeats.glob("node-*.json")):
        # An invalid heartbeat counts as a missed one.
        with contextlib.suppress(OSError, HoldfastError):
            beat = read_document(NodeBeat, path)
            beats += [beat] if beat else []
    return beats


def live_step(paths: RunPaths) -> int | None:
    """Return the last step that any rank of the newest attempt finished, from its heartbeats."""
    attempts = paths.list_attempts()
    return newest_step(read_heartbeats(attempts[-1])) if attempts else None


def newest_step(beats: list[NodeBeat]) -> int | None:
    """Return the last step that any rank finished, or None if no rank has reported one."""
    steps = [rank.step for beat in beats for rank in beat.ranks if rank.step >= 0]
    return max(steps, default=None)


def clock_problems(beats: Iterable[NodeBeat], now: float) -> list[str]:
    """Return a message for each node whose heartbeat lies in the future. `now` is Unix time.

    Holdfast decides nothing by these clocks, but they explain odd times in the output.
    """
    return [
        f"the heartbeat of {beat.host} is {beat.time - now:.0f} s in the future; the clock of that "
        "host or of this one is wrong"
        for beat in beats
        if beat.time - now > CLOCK_SKEW_S
    ]


@dataclass
class _Seen:
    """The last state of a node's file, and when this process saw it (monotonic seconds)."""

    state: tuple[int, int]
    at: float
    is_silent: bool = False


class HeartbeatWatch:
    """Finds silent nodes by changes of their files and this process's own clock.

    A check costs one `stat` per node and reads no file, so one supervisor can watch thousands.
    Neither the nodes' clocks, nor the storage's clock, nor the times in the files matter.
    """

    def __init__(self, paths: AttemptPaths, heartbeat_s: float) -> None:
        self._directory = paths.heartbeats
        self._silence_s = BEATS_MISSED_MAX * heartbeat_s
        self._seen: dict[str, _Seen] = {}

    def look(self, now: float | None = None) -> tuple[list[str], list[str]]:
        """Return the nodes that fell silent and that returned. `now` is monotonic seconds."""
        now = time.monotonic() if now is None else now
        silent, returned = [], []
        for name, state in self._states():
            seen = self._seen.get(name)
            if seen is None:
                self._seen[name] = _Seen(state, now)
            elif state != seen.state:
                if seen.is_silent:
                    returned.append(name)
                self._seen[name] = _Seen(state, now)
            elif not seen.is_silent and now - seen.at > self._silence_s:
                seen.is_silent = True
                silent.append(name)
        return silent, returned

    def _states(self) -> list[tuple[str, tuple[int, int]]]:
        """Return (node, a value that changes with each heartbeat) of every heartbeat file."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith("node-"):
                    with contextlib.suppress(OSError):
                        state = entry.stat()
                        name = entry.name.removesuffix(".json")
                        found.append((name, (state.st_ino, state.st_mtime_ns)))
        return found
