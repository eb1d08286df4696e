"""The current state of an attempt's ranks and nodes, from the nodes' heartbeats."""

from __future__ import annotations

import time

from holdfast.api.schemas import AttemptNode, Heartbeats, RankRow
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.rank_logs import choose_attempt
from holdfast.lineage.queries.views import iso_time
from holdfast.workers.nodes.heartbeats import NodeBeat, clock_problems, read_heartbeats


def read_nodes(paths: RunPaths, number: int | None) -> Heartbeats:
    """Return the heartbeats of attempt `number`, or of the newest attempt."""
    attempt = choose_attempt(paths, number)
    beats, now = read_heartbeats(attempt), time.time()
    return Heartbeats(
        run=paths.name,
        attempt=attempt.number,
        nodes=[_node(beat, now) for beat in beats],
        clock_problems=clock_problems(beats, now),
    )


def _node(beat: NodeBeat, now: float) -> AttemptNode:
    return AttemptNode(
        node=beat.node,
        host=beat.host,
        time=iso_time(beat.time),
        age_s=now - beat.time,
        launch=beat.launch,
        memory_percent=beat.memory_percent,
        gpus=[gpu.model_dump(mode="json") for gpu in beat.gpus],
        ranks=[
            RankRow(node=beat.node, **rank.model_dump(include=set(RankRow.model_fields)))
            for rank in beat.ranks
        ],
    )
