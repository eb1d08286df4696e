"""Routes about the ranks and the GPUs of an attempt over time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from holdfast.api.access import AS_READER
from holdfast.api.routes.filters import Moment, refuse_reversed
from holdfast.api.routes.runs import Number, RunId
from holdfast.api.series.gpus import read_gpus
from holdfast.api.series.heat import BUCKETS_MAX, RANKS_MAX, read_heat_map
from holdfast.api.series.models import GpuSeries, HeatMap, HeatValue, TimeRange
from holdfast.api.services import services_of
from holdfast.contracts.disk.bounds import NODES_MAX
from holdfast.contracts.disk.bounds import RANKS_MAX as RANK_MAX
from holdfast.contracts.disk.rank_logs import choose_attempt
from holdfast.contracts.errors import QueryError

Buckets = Annotated[
    int, Query(ge=1, le=BUCKETS_MAX, description="The largest number of buckets of time")
]

router = APIRouter(prefix="/runs/{run}", tags=["runs"], dependencies=[AS_READER])


@router.get("/heat-map")
def show_heat_map(
    request: Request,
    run: RunId,
    attempt: Number = None,
    value: HeatValue = HeatValue.STEP,
    rank_from: Annotated[int, Query(ge=0, lt=RANK_MAX, description="The first rank")] = 0,
    rank_to: Annotated[
        int | None,
        Query(ge=0, lt=RANK_MAX, description=f"The last rank, at most {RANKS_MAX} in an answer"),
    ] = None,
    time_from: Moment = None,
    time_to: Moment = None,
    buckets: Buckets = 500,
) -> HeatMap:
    """Return one value of each rank of an attempt over time, and the ranks that were slow."""
    refuse_reversed("time", time_from, time_to)
    refuse_reversed("rank", rank_from, rank_to)
    last = rank_from + RANKS_MAX - 1 if rank_to is None else rank_to
    if last - rank_from >= RANKS_MAX:
        raise QueryError(
            f"rank_from {rank_from} to rank_to {last} are {last - rank_from + 1} ranks; an answer "
            f"has at most {RANKS_MAX}, so ask for them in parts"
        )
    paths = services_of(request).store.folder_of(run)
    within = TimeRange(time_from, time_to, buckets)
    wanted = range(rank_from, last + 1)
    return read_heat_map(paths.name, choose_attempt(paths, attempt), value, within, wanted)


@router.get("/gpus")
def show_gpus(
    request: Request,
    run: RunId,
    attempt: Number = None,
    node: Annotated[
        int | None,
        Query(ge=0, lt=NODES_MAX, description="The node's number; by default the first with data"),
    ] = None,
    time_from: Moment = None,
    time_to: Moment = None,
    buckets: Buckets = 500,
) -> GpuSeries:
    """Return the use, memory, temperature, power and errors of a node's GPUs over time."""
    refuse_reversed("time", time_from, time_to)
    paths = services_of(request).store.folder_of(run)
    within = TimeRange(time_from, time_to, buckets)
    return read_gpus(paths.name, choose_attempt(paths, attempt), node, within)
