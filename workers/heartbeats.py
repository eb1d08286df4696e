"""Heartbeats: one small file per node, replaced every few seconds by the node's agent."""

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
from holdfast.contracts.paths import AttemptPaths
from holdfast.workers.agent.calibration import PhaseTimes
from holdfast.workers.agent.gpus import GpuBeat

# So many heartbeats that do not come make a node silent.
BEATS_MISSED_MAX: Final = 3
# Clocks of a cluster agree to far less; more is somebody's mistake.
CLOCK_SKEW_S: Final = 30.0


class RankBeat(Document):
    """One rank as the agent last saw it. `age_s` is seconds since its last sign of life.

    `own_s` is what of a step it spent not waiting for others. None: the kernel does not say.
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
    """`heartbeats/node-NNNN.json`: a node's ranks.

    `time` is Unix seconds and for people; `monotonic_s`, of the boot `boot_id`, no change of the
    clock moves. `phases` is how long each phase is silent when all is well.
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
    """The newest heartbeat of every node that gave one, in order of node."""
    beats = []
    for path in sorted(paths.heartbeats.glob("node-*.json")):
        # A beat that cannot be believed is one that did not come.
        with contextlib.suppress(OSError, HoldfastError):
            beat = read_document(NodeBeat, path)
            beats += [beat] if beat else []
    return beats


def newest_step(beats: list[NodeBeat]) -> int | None:
    """The last step that any rank finished, or None when none has said."""
    steps = [rank.step for beat in beats for rank in beat.ranks if rank.step >= 0]
    return max(steps, default=None)


def clock_problems(beats: Iterable[NodeBeat], now: float) -> list[str]:
    """What is wrong with the nodes' clocks, in words: beats from the future. `now` is Unix time.

    Nothing is decided by these clocks; people who read times should know.
    """
    return [
        f"the heartbeat of {beat.host} is {beat.time - now:.0f} s in the future; its clock or "
        "this one is wrong"
        for beat in beats
        if beat.time - now > CLOCK_SKEW_S
    ]


@dataclass
class _Seen:
    """What was last seen of a node's file, and when, by this process's monotonic clock."""

    state: tuple[int, int]
    at: float
    is_silent: bool = False


class HeartbeatWatch:
    """Which nodes have fallen silent: from the change of their files, by one's own clock.

    A look costs one `stat` for each node and reads no file, so one supervisor watches thousands.
    Neither the nodes' clocks nor the storage's count, nor what a file says of its time.
    """

    def __init__(self, paths: AttemptPaths, heartbeat_s: float) -> None:
        self._directory = paths.heartbeats
        self._silence_s = BEATS_MISSED_MAX * heartbeat_s
        self._seen: dict[str, _Seen] = {}

    def look(self, now: float | None = None) -> tuple[list[str], list[str]]:
        """(newly silent, heard again): the nodes' names. `now` is monotonic seconds."""
        now = time.monotonic() if now is None else now
        silent, again = [], []
        for name, state in self._states():
            seen = self._seen.get(name)
            if seen is None:
                self._seen[name] = _Seen(state, now)
            elif state != seen.state:
                if seen.is_silent:
                    again.append(name)
                self._seen[name] = _Seen(state, now)
            elif not seen.is_silent and now - seen.at > self._silence_s:
                seen.is_silent = True
                silent.append(name)
        return silent, again

    def _states(self) -> list[tuple[str, tuple[int, int]]]:
        """(node, what changes with each beat) of every heartbeat file there is."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith("node-"):
                    with contextlib.suppress(OSError):
                        state = entry.stat()
                        name = entry.name.removesuffix(".json")
                        found.append((name, (state.st_ino, state.st_mtime_ns)))
        return found
