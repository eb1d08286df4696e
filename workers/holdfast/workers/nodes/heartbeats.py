"""Heartbeats: every few seconds, each node reports the state of its ranks to node 0.

Node 0's agent writes the heartbeats of all nodes into two files, in turn. It overwrites them in
place, which costs shared storage no metadata. Readers take the newest file that is whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import xxhash
from pydantic import Field, ValidationError

from holdfast.contracts.disk import bounds, durable, filesystems, reading
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths, folder_of
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.documents import Document
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.states import RunState
from holdfast.workers.nodes.calibration import PhaseTimes
from holdfast.workers.nodes.gpus import GpuBeat

# A node is silent after this many missed heartbeats.
BEATS_MISSED_MAX: Final = 3
# With a thousand nodes, a heartbeat every ten seconds costs node 0 little.
BEAT_S_PER_NODE: Final = 0.01
_START: Final = b'{"digest":"'
_DIGEST_END: Final = len(_START) + 16
# The clocks of a cluster agree to far less than this. More is a configuration error.
CLOCK_SKEW_S: Final = 30.0


class RankBeat(Document):
    """One rank as the agent last saw it. `age_s` is the seconds since its last sign of life.

    `own_s` is the part of a step in which it did not wait for others. A value of None means that
    the kernel does not report it.
    """

    rank: bounds.Number
    step: bounds.Step
    phase: bounds.Name
    age_s: bounds.Seconds | None
    step_time_s: bounds.Seconds
    pid: bounds.Number
    step_p50_s: bounds.Seconds = 0.0
    step_p99_s: bounds.Seconds = 0.0
    own_s: bounds.Seconds = 0.0
    rss_bytes: bounds.ByteCount | None = None
    cpu_percent: bounds.Percent | None = None
    threads: bounds.Number | None = None
    read_bytes: bounds.Count | None = None
    write_bytes: bounds.Count | None = None


class NodeBeat(Document):
    """The heartbeat of a node and its ranks.

    `time` is Unix seconds, for display only. `monotonic_s`, of the boot `boot_id`, does not change
    with the clock. `every_s` is the time between two heartbeats. `phases` is how long each phase is
    silent in normal operation.
    """

    node: bounds.Number
    host: bounds.Name
    time: bounds.Moment
    attempt: bounds.Number
    launch: bounds.Number
    agent_pid: bounds.Number
    monotonic_s: bounds.Seconds = 0.0
    every_s: bounds.Seconds = 0.0
    boot_id: bounds.Name = ""
    world_size: bounds.Ranks = 0
    ranks: tuple[RankBeat, ...] = ()
    gpus: tuple[GpuBeat, ...] = ()
    phases: dict[str, PhaseTimes] = Field(default_factory=dict)
    memory_percent: bounds.Percent | None = None


def interval_s(heartbeat_s: float, nodes: int) -> float:
    """Return the seconds between two heartbeats of a node: `heartbeat_s`, or more at many nodes."""
    return max(heartbeat_s, BEAT_S_PER_NODE * nodes)


class HeartbeatWriter:
    """Writes the heartbeats of all nodes of an attempt; only the lead's agent has one."""

    def __init__(self, paths: AttemptPaths) -> None:
        self._paths = paths
        self._handles: list[int] = []
        self._sizes = [0, 0]
        self._sequence = 0

    def write(self, beats: Sequence[Mapping[str, Any]]) -> None:
        """Write the newest heartbeat of each node. Raises `OSError` if storage fails."""
        if not self._handles:
            self._open()
        self._sequence += 1
        facts = {"sequence": self._sequence, "beats": beats}
        rest = json.dumps(facts, separators=(",", ":")).encode()[1:]
        content = b'%b%b",%b' % (_START, _digest(rest), rest)
        # In turn, so one of the two files is always whole while the other is overwritten.
        which = self._sequence % 2
        # A shorter text is padded, because cutting the file would be a change of its metadata.
        self._sizes[which] = max(len(content), self._sizes[which])
        padded = content.ljust(self._sizes[which])
        if os.pwrite(self._handles[which], padded, 0) != len(padded):
            raise OSError(f"{_files(self._paths)[which]}: only a part was written")

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def _open(self) -> None:
        durable.make_directory(self._paths.heartbeats)
        # A power cut may take the last heartbeats, which does no harm.
        # Without the flag, an NFS client would send a heartbeat half a minute late.
        flags = os.O_RDWR | os.O_CREAT | filesystems.send_flag(self._paths.heartbeats)
        for path in _files(self._paths):
            self._handles.append(
                reading.open_beneath(path, flags, below=folder_of(self._paths.outcome))
            )
        self._sizes = [os.fstat(handle).st_size for handle in self._handles]
        # Another node may have written before this one, and readers take the highest number.
        self._sequence = max((int(one["sequence"]) for one in _read_files(self._paths)), default=0)


def read_heartbeats(paths: AttemptPaths) -> list[NodeBeat]:
    """Return the newest heartbeat of every node, in order of node."""
    beats = []
    for raw in _read_newest(paths):
        # An invalid heartbeat counts as a missed one.
        with contextlib.suppress(ValidationError):
            beats.append(NodeBeat.model_validate(raw))
    return sorted(beats, key=lambda beat: beat.node)


def heartbeat_stamp(paths: AttemptPaths) -> tuple[object, ...]:
    """Return a value that changes when node 0 writes heartbeats. Costs a listing and two `stat`."""
    stamps: list[object] = []
    for path in _present_files(paths):
        with contextlib.suppress(OSError):
            filesystems.fetch_attributes(path)
            facts = path.stat()
            stamps.append((facts.st_mtime_ns, facts.st_ino))
    return tuple(stamps)


def _present_files(paths: AttemptPaths) -> list[Path]:
    """Return the files that the folder lists. No others are looked up, see `is_there`."""
    try:
        names = os.listdir(paths.heartbeats)
    except OSError:
        return []
    return [path for path in _files(paths) if path.name in names]


def _files(paths: AttemptPaths) -> tuple[Path, Path]:
    return paths.heartbeats / "nodes-0.json", paths.heartbeats / "nodes-1.json"


def _read_newest(paths: AttemptPaths) -> list[Any]:
    """Return the heartbeats in the newest whole file, as they were written."""
    found = max(_read_files(paths), key=lambda one: int(one["sequence"]), default=None)
    return list(found["beats"]) if found else []


def _read_files(paths: AttemptPaths) -> list[dict[str, Any]]:
    """Return the contents of the files that exist and are whole."""
    return [found for path in _present_files(paths) if (found := _read_file(path)) is not None]


def _read_file(path: Path) -> dict[str, Any] | None:
    """Return the content of one file; None if it is missing, foreign, or being written now."""
    try:
        with open(reading.open_regular(path, below=folder_of(path)), "rb") as stream:
            # The cached size and bytes may be those of an earlier heartbeat, see decision 48.
            filesystems.fetch_attributes(stream.fileno())
            content = stream.read(reading.DOCUMENT_BYTES_MAX).rstrip()
        # A reader may see the bytes of two writes, because the file is overwritten in place. The
        # digest tells.
        digest = content[len(_START) : _DIGEST_END]
        if not content.startswith(_START) or digest != _digest(content[_DIGEST_END + 2 :]):
            return None
        found = json.loads(content)
    except (OSError, HoldfastError, ValueError, RecursionError):
        return None
    is_valid = isinstance(found.get("sequence"), int) and isinstance(found.get("beats"), list)
    return found if is_valid else None


def _digest(content: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(content).encode()


def live_step(paths: RunPaths) -> int | None:
    """Return the last step that any rank of the newest attempt finished, from its heartbeats."""
    attempts = paths.list_attempts()
    return newest_step(read_heartbeats(attempts[-1])) if attempts else None


def trained_step(history: RunHistory) -> int | None:
    """Return the last step that any rank finished: by heartbeats while it runs, else by endings."""
    live = live_step(history.paths) if history.state is RunState.RUNNING else None
    ended = (one.last_step for one in reversed(history.attempts) if one.last_step is not None)
    return next(ended, None) if live is None else live


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


class _Mark(Document):
    """The part of a heartbeat that tells it from the one before."""

    node: bounds.Number
    launch: bounds.Number
    time: bounds.Moment
    monotonic_s: bounds.Seconds = 0.0
    every_s: bounds.Seconds = 0.0


@dataclass
class _Seen:
    """The last heartbeat of a node, and when this process saw it (counted monotonic seconds)."""

    mark: _Mark
    at: float
    is_silent: bool = False


class HeartbeatWatch:
    """Finds silent nodes by changes of their heartbeats and this process's own clock.

    While nothing changes, a check costs a listing and two `stat` calls. Neither the nodes' clocks
    nor the storage's clock matter. Of the time between two looks, only so much counts that a node
    is never silent at the first look after this process, and perhaps the node, was suspended.
    """

    def __init__(self, paths: AttemptPaths, heartbeat_s: float) -> None:
        self._paths = paths
        self._every_s = heartbeat_s
        self._stamp: tuple[object, ...] = ()
        self._seen: dict[str, _Seen] = {}
        self._looked_at, self._asleep_s = math.inf, 0.0

    def look(self, now: float | None = None) -> tuple[list[str], list[str]]:
        """Return the nodes that fell silent and that returned. `now` is monotonic seconds."""
        # Only the monotonic clock of this process counts, see decision 56.
        now = time.monotonic() if now is None else now
        counted_s = (BEATS_MISSED_MAX - 1) * self._every_s
        self._asleep_s += max(0.0, now - self._looked_at - counted_s)
        self._looked_at, now = now, now - self._asleep_s
        returned = self._take_changes(now)
        silent = [
            name
            for name, seen in self._seen.items()
            if not seen.is_silent and now - seen.at > BEATS_MISSED_MAX * self._every_s
        ]
        for name in silent:
            self._seen[name].is_silent = True
        return silent, returned

    def _take_changes(self, now: float) -> list[str]:
        """Record which nodes have new heartbeats; return those that were silent before."""
        if (stamp := heartbeat_stamp(self._paths)) == self._stamp:
            return []
        self._stamp, returned = stamp, []
        for raw in _read_newest(self._paths):
            with contextlib.suppress(ValidationError):
                mark = _Mark.model_validate(raw)
                self._every_s = max(self._every_s, mark.every_s)
                returned += self._take(f"node-{mark.node:04d}", mark, now)
        return returned

    def _take(self, name: str, mark: _Mark, now: float) -> list[str]:
        """Keep a node's mark if it is new. Return [name] if the node was silent before."""
        seen = self._seen.get(name)
        if seen is not None and seen.mark == mark:
            return []
        self._seen[name] = _Seen(mark, now)
        return [name] if seen is not None and seen.is_silent else []
