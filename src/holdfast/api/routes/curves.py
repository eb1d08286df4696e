"""Routes about several runs side by side: their differences, and their curves as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request, Response
from pydantic import StringConstraints

from holdfast.api.access import AS_READER
from holdfast.api.routes.filters import NO_NUL
from holdfast.api.routes.runs import MetricName
from holdfast.api.routes.tables import TABLE_ANSWERS, TableFormat, table_of
from holdfast.api.services import services_of
from holdfast.lineage.queries import reports

RUNS_MAX: Final = 8
POINTS_MAX: Final = 10_000
# The name of the rate beside the metrics that programs report.
RATE: Final = "steps_per_s"
CURVE_COLUMNS: Final = (
    *("run", "attempt", "launch", "step", "time", "time_s", "metric", "last", "low", "high"),
)

RunNames = Annotated[
    list[Annotated[str, StringConstraints(max_length=120, pattern=NO_NUL)]],
    Query(
        alias="run",
        min_length=1,
        max_length=RUNS_MAX,
        description="The runs' uids, folder names or names; repeat it for each run",
    ),
]

router = APIRouter(tags=["curves"], dependencies=[AS_READER])


@router.get("/compare/runs")
def compare_runs(request: Request, names: RunNames) -> reports.RunsComparison:
    """Compare runs: arguments, settings, code, environment and outcome."""
    return services_of(request).store.compare_runs(names)


@router.get("/tables/curves", response_class=Response, responses=TABLE_ANSWERS)
def download_curves(
    request: Request,
    names: RunNames,
    name: Annotated[
        list[MetricName] | None,
        Query(description=f"Only these metrics; `{RATE}` is the rate", max_length=50),
    ] = None,
    points: Annotated[
        int, Query(ge=1, le=POINTS_MAX, description="The approximate number of points of each run")
    ] = POINTS_MAX,
    table_format: Annotated[TableFormat, Query(alias="format")] = "csv",
) -> Response:
    """Return the curves of runs as one CSV or JSON file, with a line for each value.

    A value covers a range of steps, as in `metrics`. Steps that a later launch repeated are
    included.
    """
    store = services_of(request).store
    rows = [
        row
        for run in names
        for row in _rows(run, store.metrics(run, tuple(name or ()), points), name)
    ]
    return table_of("curves", rows, table_format, CURVE_COLUMNS)


def _rows(
    run: str, series: Sequence[reports.Series], wanted: Sequence[str] | None
) -> Iterator[dict[str, Any]]:
    for one in series:
        for point in one["points"]:
            values: dict[str, dict[str, Any]] = {k: dict(v) for k, v in point["values"].items()}
            if not wanted or RATE in wanted:
                rate = point["steps_per_s"]
                values.setdefault(RATE, {"last": rate, "low": rate, "high": rate})
            for metric, spread in values.items():
                facts = (run, one["attempt"], one["launch"], point["step"])
                when = (point["time"], point["time_s"], metric)
                spreads = (spread["last"], spread["low"], spread["high"])
                yield dict(zip(CURVE_COLUMNS, (*facts, *when, *spreads), strict=True))
