"""Routes about more than one run: machines, storage, goodput and comparisons."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request

from holdfast.api.access import AS_READER
from holdfast.api.routes.runs import NO_NUL, After, Limit, Search, SortAs, States
from holdfast.api.schemas import NodeDetail, Page
from holdfast.api.services import services_of
from holdfast.lineage.queries import reports, totals, views
from holdfast.lineage.queries.cursors import PAGE_DEFAULT
from holdfast.lineage.queries.pages import RunFilter, RunSort

Side = Annotated[str, Query(max_length=250, description="A checkpoint's id, `<run>:<directory>`")]

router = APIRouter(tags=["overview"], dependencies=[AS_READER])


@router.get("/compare")
def compare(request: Request, a: Side, b: Side) -> reports.Comparison:
    """Compare two checkpoints: their facts, their runs' specs and their metrics."""
    return services_of(request).store.compare(a, b)


@router.get("/nodes")
def list_nodes(
    request: Request, after: After = None, limit: Limit = PAGE_DEFAULT
) -> Page[reports.NodeRow]:
    """List the machines that attempts ran on, sorted by name, with their faults by cause."""
    return services_of(request).store.list_nodes(after, limit)


@router.get("/nodes/{host}")
def show_node(
    request: Request, host: Annotated[str, Path(max_length=255, pattern=NO_NUL)]
) -> NodeDetail:
    """Return the newest failures of attempts that are attributed to a machine."""
    faults = services_of(request).store.node_faults(host)
    return NodeDetail(host=host, faults=faults)


@router.get("/storage")
def list_storage(
    request: Request,
    state: States = None,
    search: Search = None,
    sort: RunSort = "created",
    order: SortAs = None,
    after: After = None,
    limit: Limit = PAGE_DEFAULT,
) -> Page[views.StorageRow]:
    """List the storage of each run's checkpoints, and what the next prune would delete."""
    where = RunFilter(states=tuple(state or ()), search=search)
    return services_of(request).store.list_storage(where, sort, after, limit, order)


@router.get("/storage/totals")
def show_storage_totals(
    request: Request, state: States = None, search: Search = None
) -> totals.StorageTotals:
    """Return the total storage of the checkpoints of all matching runs."""
    where = RunFilter(states=tuple(state or ()), search=search)
    return services_of(request).store.storage_totals(where)


@router.get("/goodput")
def show_goodput_totals(
    request: Request, state: States = None, search: Search = None
) -> totals.GoodputTotals:
    """Return the total goodput of all matching runs, and their cost by currency."""
    where = RunFilter(states=tuple(state or ()), search=search)
    return services_of(request).store.goodput_totals(where)
