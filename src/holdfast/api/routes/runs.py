"""Routes about runs: the list, one run, and its attempts, checkpoints, events and logs."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Path, Query, Request
from pydantic import StringConstraints

from holdfast.api.access import AS_READER
from holdfast.api.logs import PART_BYTES_MAX, Stream, list_logs, read_log
from holdfast.api.schemas import (
    CheckpointRow,
    Heartbeats,
    LogFile,
    LogPart,
    Page,
    Prune,
    RunDetail,
    RunLine,
    RunPage,
    UnreadableRun,
)
from holdfast.api.services import services_of
from holdfast.api.steering import read_supervision, requests_in
from holdfast.api.vitals import read_nodes
from holdfast.api.watch import LivePace, Watch
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.rank_logs import choose_attempt
from holdfast.contracts.errors import QueryError
from holdfast.contracts.plain_text import plain_line
from holdfast.contracts.records.alerts import failed_saves, noticed
from holdfast.contracts.records.saving import saves_by_holdfast, trained_in_view
from holdfast.contracts.records.topology import SavedTopology
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.steps_total import steps_total
from holdfast.contracts.states import RunState
from holdfast.lineage.database.states import CheckpointState
from holdfast.lineage.queries import reports, views
from holdfast.lineage.queries.cursors import PAGE_DEFAULT, PAGE_MAX
from holdfast.lineage.queries.pages import (
    CheckpointFilter,
    EventFilter,
    RunFilter,
    RunSort,
    SortOrder,
)
from holdfast.workers.checkpoints import deletion
from holdfast.workers.decisions.sizes import allowed_sizes
from holdfast.workers.nodes.heartbeats import live_step
from holdfast.workers.runs.feasibility import Feasibility
from holdfast.workers.runs.restarts import waiting_facts

NO_NUL: Final = r"^[^\x00]*$"

RunId = Annotated[str, Path(max_length=120, description="The run's uid, folder name or name")]
After = Annotated[
    str | None, Query(max_length=4096, description="The value of `next` from the previous page")
]
Limit = Annotated[int, Query(ge=1, le=PAGE_MAX, description="The largest number of items")]
Number = Annotated[int | None, Query(ge=1, le=1_000_000, description="The attempt's number")]
States = Annotated[list[RunState] | None, Query(description="Any of these states")]
Search = Annotated[
    str | None,
    Query(max_length=200, pattern=NO_NUL, description="Text in the name or folder, or the uid"),
]
Moment = Annotated[float | None, Query(ge=0, le=1e12, description="Unix seconds")]
Step = Annotated[int | None, Query(ge=0, le=2**62)]
SortAs = Annotated[
    SortOrder | None,
    Query(description="By default ascending for `name` and `state`, descending for all others"),
]
MetricName = Annotated[str, StringConstraints(max_length=100, pattern=NO_NUL)]

SIZES_SHOWN_MAX = 64

router = APIRouter(prefix="/runs", tags=["runs"], dependencies=[AS_READER])


@router.get("")
def list_runs(
    request: Request,
    state: States = None,
    search: Search = None,
    created_from: Moment = None,
    created_to: Moment = None,
    sort: RunSort = "created",
    order: SortAs = None,
    after: After = None,
    limit: Limit = PAGE_DEFAULT,
) -> RunPage:
    """List runs, newest first by default."""
    _refuse_reversed("created", created_from, created_to)
    where = RunFilter(
        states=tuple(state or ()), search=search, created_from=created_from, created_to=created_to
    )
    services = services_of(request)
    page = services.store.list_runs(where, sort, after, limit, order)
    lines = [_line(row, services.watch.pace(row["uid"])) for row in page.items]
    is_first = after is None and not state and created_from is None and created_to is None
    broken = _unreadable(services.watch, search) if is_first else []
    return RunPage(items=lines, next=page.next, unreadable=broken)


@router.get("/{run}")
def show_run(request: Request, run: RunId) -> RunDetail:
    """Return one run, with its attempts, their causes and its goodput."""
    services = services_of(request)
    store, shown = services.store, services.store.show_run(run)
    uid, is_live = shown["uid"], RunState(shown["state"]).is_live
    paths, pace = store.find_run(uid).paths, services.watch.pace(uid)
    alerts, steering = store.alert_events(uid), store.steering_events(uid)
    detail: dict[str, Any] = {
        **shown,
        "on_disk": paths.spec.is_file(),
        "failed_saves": failed_saves(alerts),
        "noticed": noticed(alerts),
        "steps_total": steps_total(shown["spec"].get("config") or {}),
        "live_step": live_step(paths) if is_live else None,
        "step_s": pace.step_s if pace else None,
        "supervision": read_supervision(paths, steering, shown["created_at"]) if is_live else None,
        "requests": requests_in(steering, shown),
        "saves_by_holdfast": saves_by_holdfast(trained_in_view(shown)),
        "successor": waiting_facts(paths) if is_live else None,
        **_gpu_range(shown["spec"]),
        "gpus_fitting": _fitting(shown["spec"], services.store.newest_on_branch(uid)),
    }
    return cast(RunDetail, detail)


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
    limit: Limit = PAGE_DEFAULT,
) -> Page[CheckpointRow]:
    """List a run's checkpoints, oldest first, each with the reason it is kept or was deleted."""
    _refuse_reversed("step", step_from, step_to)
    where = CheckpointFilter(
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
        list[EventKind] | None, Query(description="Any of these kinds", max_length=50)
    ] = None,
    attempt: Number = None,
    newest_first: bool = True,
    after: After = None,
    limit: Limit = PAGE_DEFAULT,
) -> Page[views.EventView]:
    """List a run's journal lines, newest first by default; `attempt` selects those of one."""
    store = services_of(request).store
    where = EventFilter(kinds=tuple(kind or ()), attempt=attempt)
    return store.list_events(run, where, newest_first=newest_first, after=after, limit=limit)


@router.get("/{run}/lineage")
def show_lineage(request: Request, run: RunId) -> views.Graph:
    """Return the lineage graph of a run: where it came from and what was derived from it."""
    return services_of(request).store.lineage(run)


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
def show_heartbeats(request: Request, run: RunId, attempt: Number = None) -> Heartbeats:
    """Return the nodes and ranks of an attempt, by default the newest, from its heartbeats."""
    return read_nodes(services_of(request).store.folder_of(run), attempt)


@router.get("/{run}/storage")
def show_storage(request: Request, run: RunId) -> Prune:
    """Return which checkpoints the next prune would keep and delete, with the reasons."""
    paths = services_of(request).store.folder_of(run)
    return Prune.model_validate(deletion.prune(paths, by="", dry_run=True))


@router.get("/{run}/logs")
def list_run_logs(request: Request, run: RunId, attempt: Number = None) -> list[LogFile]:
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
    offset: Annotated[
        int | None,
        Query(ge=0, le=2**62, description="First byte to return; by default the end of the log"),
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=PART_BYTES_MAX, description="The largest number of bytes")
    ] = 64 * 1024,
) -> LogPart:
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
        limit=limit,
        secrets=store.secrets(run),
    )


def _refuse_reversed(name: str, first: float | None, last: float | None) -> None:
    """Raise `QueryError` for a range that contains nothing."""
    if first is not None and last is not None and first > last:
        raise QueryError(
            f"{name}_from {first:g} is after {name}_to {last:g}, so nothing can match; swap them"
        )


def _unreadable(watch: Watch, search: str | None) -> list[UnreadableRun]:
    """Return the runs that cannot be read, sorted by name: at most `PAGE_MAX`."""
    wanted = (search or "").lower()
    found = sorted(watch.unreadable().items(), key=lambda one: (one[0].name, one[0]))
    return [
        UnreadableRun(run=plain_line(path.name), path=plain_line(path), reason=reason)
        for path, reason in found
        if wanted in path.name.lower()
    ][:PAGE_MAX]


def _line(row: views.RunRow, pace: LivePace | None) -> RunLine:
    return RunLine(
        **row, live_step=pace.step if pace else None, step_s=pace.step_s if pace else None
    )


def _gpu_range(spec: dict[str, Any]) -> dict[str, int | None]:
    """Return the smallest and largest GPU count of the run; None if the spec cannot be parsed."""
    try:
        parsed = RunSpec.read(spec)
    except ValueError:
        return {"gpus_min": None, "gpus_max": None}
    return {"gpus_min": parsed.gpus_min, "gpus_max": parsed.gpus_max}


def _fitting(spec: dict[str, Any], newest: SavedTopology | None) -> list[int] | None:
    """Return the allowed GPU counts that the newest checkpoint fits; None if it fits all."""
    with contextlib.suppress(ValueError):
        parsed = RunSpec.read(spec)
        allowed = allowed_sizes(parsed)
        fitting = list(filter(Feasibility(newest, parsed.ranks).allows, allowed))
        return None if len(fitting) == len(allowed) else fitting[:SIZES_SHOWN_MAX]
    return None
