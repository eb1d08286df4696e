"""Routes about more than one run: machines, storage, goodput and comparisons."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from holdfast.api import audit, schemas
from holdfast.api.access import AS_READER, Operator
from holdfast.api.routes.filters import NO_NUL, SortAs, Where
from holdfast.api.routes.runs import After, Limit, run_line
from holdfast.api.routes.tables import TABLE_ANSWERS, TableFormat, run_facts, table_of
from holdfast.api.services import services_of
from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.records.annotations import require_note
from holdfast.lineage.queries import reports, totals, views
from holdfast.lineage.queries.cursors import PAGE_DEFAULT
from holdfast.lineage.queries.pages import FilterValues, RunSort
from holdfast.lineage.queries.views import iso_time

Side = Annotated[str, Query(max_length=250, description="A checkpoint's id, `<run>:<directory>`")]

router = APIRouter(tags=["overview"], dependencies=[AS_READER])


@router.get("/compare")
def compare(request: Request, a: Side, b: Side) -> reports.Comparison:
    """Compare two checkpoints: their facts, their runs' specs and their metrics."""
    return services_of(request).store.compare(a, b)


@router.get("/attention")
def list_attention(request: Request) -> list[schemas.AttentionItem]:
    """List the live runs and the roots that need a person, the most severe first.

    It has runs without a supervisor, without heartbeats, that hang, fail again and again at one
    step, cannot save, save late, are pending or waiting for too long or lag behind in the mirror,
    silent and slow nodes, passed limits of `alerts`, and roots that are nearly full.
    """
    return services_of(request).attention.items()


@router.post("/attention/acknowledge")
def acknowledge(
    request: Request, body: schemas.AskAcknowledge, caller: Operator
) -> schemas.AttentionItem:
    """Acknowledge a problem of the list. Its run's journal records who did, and the note.

    The first acknowledgement counts. A problem of a root is recorded by this server.
    """
    services = services_of(request)
    require_note(body.note)
    item = services.attention.find(body.id)
    if item.acknowledged is not None:
        return item
    if item.uid is not None:
        paths = services.store.folder_of(item.uid)
        with (
            audit.audited(paths, "acknowledge", caller, alert=item.id),
            JournalWriter(paths.journal_of(audit.WRITER)) as journal,
        ):
            kind, note = EventKind.ALERT_ACKNOWLEDGED, body.note
            journal.append(kind, alert=item.id, by=caller.name, note=note)
        services.watch.touch(paths)
    done = schemas.Acknowledged(by=caller.name, at=iso_time(time.time()), note=body.note)
    return services.attention.acknowledge(item, done)


@router.get("/filters")
def list_filters(request: Request) -> FilterValues:
    """List the users, causes, partitions, accounts and tags by which runs can be filtered."""
    return services_of(request).store.filter_values()


@router.get("/tables/runs", response_class=Response, responses=TABLE_ANSWERS)
def download_runs(
    request: Request,
    where: Where,
    sort: RunSort = "created",
    order: SortAs = None,
    table_format: Annotated[TableFormat, Query(alias="format")] = "csv",
) -> Response:
    """Return all matching runs as one CSV or JSON file."""
    services = services_of(request)
    rows = services.store.list_all_runs(where, sort, order)
    lines = [run_line(row, services.watch.pace(row["uid"])) for row in rows]
    return table_of("runs", map(run_facts, lines), table_format)


@router.get("/nodes")
def list_nodes(
    request: Request, after: After = None, limit: Limit = PAGE_DEFAULT
) -> schemas.Page[reports.NodeRow]:
    """List the machines that attempts ran on, sorted by name, with their faults by cause."""
    return services_of(request).store.list_nodes(after, limit)


@router.get("/nodes/{host}")
def show_node(
    request: Request, host: Annotated[str, Path(max_length=255, pattern=NO_NUL)]
) -> schemas.NodeDetail:
    """Return the newest failures of attempts that are attributed to a machine."""
    faults = services_of(request).store.node_faults(host)
    return schemas.NodeDetail(host=host, faults=faults)


@router.get("/storage")
def list_storage(
    request: Request,
    where: Where,
    sort: RunSort = "created",
    order: SortAs = None,
    after: After = None,
    limit: Limit = PAGE_DEFAULT,
) -> schemas.Page[views.StorageRow]:
    """List the storage of each run's checkpoints, and what the next prune would delete."""
    return services_of(request).store.list_storage(where, sort, after, limit, order)


@router.get("/storage/totals")
def show_storage_totals(request: Request, where: Where) -> totals.StorageTotals:
    """Return the total storage of the checkpoints of all matching runs."""
    return services_of(request).store.storage_totals(where)


@router.get("/goodput")
def show_goodput_totals(request: Request, where: Where) -> totals.GoodputTotals:
    """Return the total goodput of all matching runs, and their cost by currency."""
    return services_of(request).store.goodput_totals(where)


@router.get("/goodput/groups")
def list_goodput_groups(
    request: Request,
    where: Where,
    by: Annotated[totals.GroupBy, Query(description="What the runs are grouped by")] = "user",
) -> list[totals.GoodputGroup]:
    """Return the goodput and cost of all matching runs by user, partition, account or tag.

    A run with several tags counts in the group of each, so these groups may add up to more than
    the total.
    """
    return services_of(request).store.goodput_groups(where, by)


@router.get("/queue")
def list_queue(request: Request) -> list[schemas.WaitingRun]:
    """List the runs that wait for GPUs, longest first, with the reason and the forecast."""
    return services_of(request).attention.queue()
