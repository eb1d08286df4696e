"""Routes about runs: the list, one run, and its attempts, checkpoints, events and logs."""

from __future__ import annotations

import pathlib
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Path, Query, Request
from pydantic import StringConstraints

from holdfast.api import access, findings, schemas, vitals
from holdfast.api.logs.parts import PART_BYTES_MAX, Stream, list_logs, read_log
from holdfast.api.routes.filters import NO_NUL, SortAs, Where, refuse_reversed
from holdfast.api.services import services_of
from holdfast.api.steering import read_supervision, refusals, requests_in
from holdfast.api.store import STEERING
from holdfast.api.watch import LivePace, Watch, declared_steps
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.disk.rank_logs import choose_attempt
from holdfast.contracts.errors import QueryError
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.records import protection, saving, trackers
from holdfast.contracts.records.alerts import KINDS, crashes, failed_saves, noticed
from holdfast.contracts.records.topology import SavedTopology
from holdfast.contracts.spec.part import section
from holdfast.contracts.spec.run_spec import steps_total
from holdfast.contracts.states import RunState
from holdfast.lineage.database.states import CheckpointState
from holdfast.lineage.queries import cursors, pages, reports, views
from holdfast.lineage.queries.durability import CheckpointRow
from holdfast.lineage.queries.find import spec_of
from holdfast.workers.checkpoints import deletion
from holdfast.workers.decisions.sizes import allowed_sizes
from holdfast.workers.nodes.heartbeats import live_step
from holdfast.workers.runs.feasibility import Feasibility
from holdfast.workers.runs.restarts import waiting_facts

RunId = Annotated[str, Path(max_length=120, description="The run's uid, folder name or name")]
After = Annotated[
    str | None, Query(max_length=4096, description="The value of `next` from the previous page")
]
Limit = Annotated[int, Query(ge=1, le=cursors.PAGE_MAX, description="The largest number of items")]
# Which part of a log a request wants.
FirstByte = Annotated[
    int | None,
    Query(ge=0, le=2**62, description="First byte to return; by default the end of the log"),
]
EndByte = Annotated[
    int | None,
    Query(ge=0, le=2**62, description="End here: the `offset` of the part that follows"),
]
PartBytes = Annotated[
    int, Query(ge=1, le=PART_BYTES_MAX, description="The largest number of bytes")
]
PART_BYTES: Final = 64 * 1024

Number = Annotated[int | None, Query(ge=1, le=1_000_000, description="The attempt's number")]
Step = Annotated[int | None, Query(ge=0, le=2**62)]
MetricName = Annotated[str, StringConstraints(max_length=100, pattern=NO_NUL)]

SIZES_SHOWN_MAX = 64
# The groups of events that the page of one run describes.
SHOWN_EVENTS: Final = (KINDS, STEERING, findings.PROTECTION, (EventKind.TRACKED,))

router = APIRouter(prefix="/runs", tags=["runs"], dependencies=[access.AS_READER])


@router.get("")
def list_runs(
    request: Request,
    where: Where,
    sort: pages.RunSort = "created",
    order: SortAs = None,
    after: After = None,
    limit: Limit = cursors.PAGE_DEFAULT,
) -> schemas.RunPage:
    """List runs, newest first by default."""
    services = services_of(request)
    page = services.store.list_runs(where, sort, after, limit, order)
    lines = [run_line(row, services.watch.pace(row["uid"])) for row in page.items]
    # Nothing but the names of unreadable runs is known, so no other filter can match them.
    is_first = after is None and where == pages.RunFilter(search=where.search)
    broken = _unreadable(services.watch, where.search) if is_first else []
    return schemas.RunPage(items=lines, next=page.next, unreadable=broken)


@router.get("/{run}")
def show_run(request: Request, run: RunId) -> schemas.RunDetail:
    """Return one run, with its attempts, their causes and its goodput."""
    services = services_of(request)
    shown, events, newest = services.store.read_run(run, SHOWN_EVENTS)
    alerts, steering, launches, tracked = events
    uid, is_live = shown["uid"], RunState(shown["state"]).is_live
    paths, pace = RunPaths(pathlib.Path(shown["path"])), services.watch.pace(uid)
    signs = services.watch.signs(uid)
    seen_at = signs.supervised_at if signs else None
    is_running = shown["state"] == RunState.RUNNING
    detail: dict[str, Any] = {
        **shown,
        "on_disk": paths.spec.is_file(),
        "failed_saves": failed_saves(alerts),
        "noticed": noticed(alerts),
        "steps_total": steps_total(section(shown["spec"], "config")) or declared_steps(paths),
        "live_step": live_step(paths) if is_live else None,
        "step_s": pace.step_s if pace else None,
        "supervision": (
            read_supervision(paths, steering, shown["created_at"], seen_at)
            if is_live and shown["state"] != RunState.PAUSED
            else None
        ),
        "requests": requests_in(steering, shown),
        "unprotected": protection.unprotected_in(launches) if is_running else [],
        "saves_by_holdfast": saving.saves_by_holdfast(saving.trained_in_view(shown)),
        "successor": waiting_facts(paths) if is_live else None,
        **_gpu_range(shown["spec"], newest),
        "refusals": refusals(shown, is_on_disk=paths.spec.is_file()),
        "crashes": crashes(alerts),
        "trackers": trackers.trackers_in(tracked),
    }
    return cast(schemas.RunDetail, detail)


@router.get("/{run}/attempts")
def list_attempts(request: Request, run: RunId) -> list[views.AttemptView]:
    """List all attempts of a run, oldest first."""
    return services_of(request).store.show_run(run)["attempts"]


@router.get("/{run}/checkpoints")
def list_checkpoints(
    request: Request,
    run: RunId,
    state: Annotated[list[CheckpointState] | None, Query(description="Any of these states")] = None,
    pinned: bool | None = None,
    step_from: Step = None,
    step_to: Step = None,
    newest_first: bool = False,
    after: After = None,
    limit: Limit = cursors.PAGE_DEFAULT,
) -> schemas.Page[CheckpointRow]:
    """List a run's checkpoints, oldest first, each with the reason it is kept or was deleted."""
    refuse_reversed("step", step_from, step_to)
    where = pages.CheckpointFilter(
        states=tuple(state or ()), pinned=pinned, step_from=step_from, step_to=step_to
    )
    return services_of(request).store.list_checkpoints(
        run, where, newest_first=newest_first, after=after, limit=limit
    )


@router.get("/{run}/events")
def list_events(
    request: Request,
    run: RunId,
    kind: Annotated[
        list[EventKind] | None, Query(description="Any of these kinds", max_length=100)
    ] = None,
    attempt: Number = None,
    newest_first: bool = True,
    after: After = None,
    limit: Limit = cursors.PAGE_DEFAULT,
) -> schemas.Page[views.EventView]:
    """List a run's journal lines, newest first by default; `attempt` selects those of one."""
    store = services_of(request).store
    where = pages.EventFilter(kinds=tuple(kind or ()), attempt=attempt)
    return store.list_events(run, where, newest_first=newest_first, after=after, limit=limit)


@router.get("/{run}/lineage")
def show_lineage(
    request: Request,
    run: RunId,
    folded: Annotated[
        bool, Query(description="Replace each long chain of equal checkpoints by a node `fold`")
    ] = False,
    opened: Annotated[
        list[Annotated[str, StringConstraints(max_length=500, pattern=NO_NUL)]] | None,
        Query(description="Ids of folds to open, which become smaller folds", max_length=50),
    ] = None,
) -> views.Graph:
    """Return the lineage graph of a run: where it came from and what was derived from it."""
    store = services_of(request).store
    if opened and not folded:
        raise QueryError("opened names folds; add folded=true")
    return store.folded_lineage(run, opened or ()) if folded else store.lineage(run)


@router.get("/{run}/openlineage")
def show_openlineage(request: Request, run: RunId) -> list[dict[str, Any]]:
    """Return the run's attempts as OpenLineage events."""
    return services_of(request).store.openlineage(run)


@router.get("/{run}/metrics")
def show_metrics(
    request: Request,
    run: RunId,
    name: Annotated[
        list[MetricName] | None, Query(description="Only these metrics", max_length=50)
    ] = None,
    points: Annotated[
        int, Query(ge=1, le=10_000, description="The approximate total number of points")
    ] = 1000,
) -> list[reports.Series]:
    """Return the run's metrics by launch.

    Each point covers a range of steps and has the last, lowest and highest value.
    """
    return services_of(request).store.metrics(run, tuple(name or ()), points)


@router.get("/{run}/goodput")
def show_goodput(request: Request, run: RunId) -> dict[str, Any]:
    """Return the run's goodput: the seconds of each part, and the cost."""
    return services_of(request).store.show_run(run)["goodput"]


@router.get("/{run}/timeline")
def show_timeline(request: Request, run: RunId) -> list[reports.Segment]:
    """Return what each attempt did and when, in order, with the same parts as `goodput`."""
    return services_of(request).store.timeline(run)


@router.get("/{run}/heartbeats")
def show_heartbeats(request: Request, run: RunId, attempt: Number = None) -> schemas.Heartbeats:
    """Return the nodes and ranks of an attempt, by default the newest, from its heartbeats."""
    return vitals.read_nodes(services_of(request).store.folder_of(run), attempt)


@router.get("/{run}/storage")
def show_storage(request: Request, run: RunId) -> schemas.Prune:
    """Return which checkpoints the next prune would keep and delete, with the reasons."""
    paths = services_of(request).store.folder_of(run)
    return schemas.Prune.model_validate(deletion.prune(paths, by="", dry_run=True))


@router.get("/{run}/capacity")
def show_capacity(request: Request, run: RunId) -> schemas.Capacity:
    """Return the GPUs that are free now for the run, as its scheduler answers."""
    services = services_of(request)
    spec = spec_of(services.store.read_spec(services.store.find_run(run).uid))
    if spec is None:
        problem = "this version of Holdfast cannot read the run's spec"
        return schemas.Capacity(gpus_free=None, where="", problem=problem)
    return services.free_gpus.ask(spec.resources)


@router.get("/{run}/logs")
def list_run_logs(request: Request, run: RunId, attempt: Number = None) -> list[schemas.LogFile]:
    """List the ranks' log files of an attempt, by default the newest."""
    return list_logs(choose_attempt(services_of(request).store.folder_of(run), attempt))


@router.get("/{run}/logs/{rank}")
def show_log(
    request: Request,
    run: RunId,
    rank: Annotated[int, Path(ge=0, le=10_000_000)],
    attempt: Number = None,
    stream: Stream = "stdout",
    launch: Annotated[
        int | None, Query(ge=0, le=1_000_000, description="By default the newest launch")
    ] = None,
    offset: FirstByte = None,
    before: EndByte = None,
    limit: PartBytes = PART_BYTES,
) -> schemas.LogPart:
    """Return a part of a rank's log. To follow the log, repeat with `offset` = `next_offset`."""
    store = services_of(request).store
    paths = store.folder_of(run)
    return read_log(
        paths,
        choose_attempt(paths, attempt),
        rank,
        stream=stream,
        launch=launch,
        offset=offset,
        before=before,
        limit=limit,
        secrets=store.secrets(run),
    )


def _unreadable(watch: Watch, search: str | None) -> list[schemas.UnreadableRun]:
    """Return the runs that cannot be read, sorted by name: at most `PAGE_MAX`."""
    wanted = (search or "").lower()
    found = sorted(watch.unreadable().items(), key=lambda one: (one[0].name, one[0]))
    return [
        schemas.UnreadableRun(run=plain_line(path.name), path=plain_line(path), reason=reason)
        for path, reason in found
        if wanted in path.name.lower()
    ][: cursors.PAGE_MAX]


def run_line(row: views.RunRow, pace: LivePace | None) -> schemas.RunLine:
    if pace is None:
        return schemas.RunLine(**row, live_step=None, step_s=None)
    total = row["steps_total"] or pace.steps_total
    line = schemas.RunLine(**row, live_step=pace.step, step_s=pace.step_s)
    line["steps_total"] = total
    return line


def _gpu_range(spec: dict[str, Any], newest: SavedTopology | None) -> dict[str, Any]:
    """Return the GPU counts that the run allows; None if the spec cannot be parsed.

    `gpus_fitting` are those that the newest checkpoint fits, or None if it fits all.
    """
    parsed = spec_of(spec)
    if parsed is None:
        return dict.fromkeys(("gpus_min", "gpus_max", "gpus_allowed", "gpus_fitting"))
    sizes = allowed_sizes(parsed)
    fitting = list(filter(Feasibility(newest, parsed.ranks).allows, sizes))
    return {
        "gpus_min": parsed.gpus_min,
        "gpus_max": parsed.gpus_max,
        "gpus_allowed": sizes if len(sizes) <= SIZES_SHOWN_MAX else None,
        "gpus_fitting": None if len(fitting) == len(sizes) else fitting[:SIZES_SHOWN_MAX],
    }
