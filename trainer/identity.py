"""Who a rank is: the facts that every file it writes and every message it sends bear."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Identity:
    """One rank of one incarnation. Numbers count from 0, but for `attempt` and `incarnation`."""

    run_uid: str
    run: str
    attempt: int
    incarnation: int
    rank: int
    local_rank: int
    local_ranks: int
    world_size: int
    node: int
    nodes: int
    command_digest: str
