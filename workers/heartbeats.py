"""Heartbeats: one small file per node, replaced every few seconds by the node's agent."""

from __future__ import annotations

import contextlib

from pydantic import ValidationError

from holdfast.contracts.attempt import Document
from holdfast.contracts.paths import AttemptPaths


class RankBeat(Document):
    """One rank as the agent last saw it. `age_s` is seconds since its last sign of life."""

    rank: int
    step: int
    phase: str
    age_s: float | None
    step_time_s: float
    pid: int
    rss_bytes: int | None = None
    cpu_percent: float | None = None


class NodeBeat(Document):
    """`heartbeats/node-NNNN.json`: a node's ranks. `time` is Unix seconds."""

    node: int
    host: str
    time: float
    attempt: int
    incarnation: int
    agent_pid: int
    ranks: tuple[RankBeat, ...] = ()
    memory_percent: float | None = None


def read_heartbeats(paths: AttemptPaths) -> list[NodeBeat]:
    """The newest heartbeat of every node that gave one, in order of node."""
    beats = []
    for path in sorted(paths.heartbeats.glob("node-*.json")):
        with contextlib.suppress(OSError, ValidationError):
            beats.append(NodeBeat.model_validate_json(path.read_bytes()))
    return beats


def newest_step(beats: list[NodeBeat]) -> int | None:
    """The last step that any rank finished, or None when none has said."""
    steps = [rank.step for beat in beats for rank in beat.ranks if rank.step >= 0]
    return max(steps, default=None)
