"""`holdfast drill`: faults rehearsed against a run, and the invariants checked after each."""

from __future__ import annotations

import math
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.index import locate_run
from holdfast.cli.output import AsJson, RootOption, answer, print_table, seconds_text, warn

if TYPE_CHECKING:
    from holdfast.flows.drills.results import DrillResult


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(drill)


def drill(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run that trains; a throw-away one if left out."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="How many faults.")] = 6,
    seed: Annotated[int, typer.Option(help="Orders the faults and their moments.")] = 0,
    kinds: Annotated[
        str, typer.Option(help="Which, with commas between; all that can be rehearsed if left out.")
    ] = "",
    within: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Begin no other fault after so many seconds.", metavar="SECONDS"
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Also write the report as a page.", metavar="FILE")
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where the throw-away run lies; a temporary one.", metavar="DIR"),
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Rehearse faults on a run and check what must always hold; status 1 when it does not."""
    wanted = [name.strip() for name in kinds.split(",") if name.strip()]
    within_s = math.inf if within is None else within
    if run is not None:
        result = _drill_live(run, root, wanted, count, seed, within_s)
    else:
        calibrates = report is not None
        result = _drill_throw_away(wanted, count, seed, directory, within_s, calibrates)
    if report is not None:
        from holdfast.flows.drills.report import write_report

        write_report(report, result, shlex.join(["holdfast", *sys.argv[1:]]))
    answer(result.as_json(), as_json, _render)
    if result.broken:
        raise typer.Exit(1)


def _drill_live(
    run: str, root: str | None, wanted: list[str], count: int, seed: int, within_s: float
) -> DrillResult:
    """A drill on a run that trains, told on standard error as it goes."""
    from holdfast.flows.drills.conduct import drill_live
    from holdfast.flows.drills.kinds import select_kinds

    chosen = select_kinds(wanted, is_live=True, missing=())
    return drill_live(locate_run(run, root), chosen, count, seed, tell=warn, within_s=within_s)


def _drill_throw_away(
    wanted: list[str],
    count: int,
    seed: int,
    directory: Path | None,
    within_s: float,
    calibrates: bool,
) -> DrillResult:
    """A drill on runs of its own, told on standard error as it goes."""
    from holdfast.flows.drills.conduct import drill_throw_away
    from holdfast.flows.drills.kinds import select_kinds
    from holdfast.flows.drills.stand import find_missing

    # Ended by a signal, it still has processes to end and a file system to give back.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    place = tempfile.TemporaryDirectory(
        prefix="holdfast-drill-", dir=directory, ignore_cleanup_errors=True
    )
    with place as folder:
        missing = find_missing(Path(folder))
        chosen = select_kinds(wanted, is_live=False, missing=missing)
        result = drill_throw_away(
            chosen,
            count,
            seed,
            folder=Path(folder),
            tell=warn,
            within_s=within_s,
            calibrates=calibrates,
        )
    result.refused |= missing
    return result


def _render(data: dict[str, Any]) -> None:
    rows = [
        (
            number,
            fault["kind"],
            "ok" if fault["ok"] else "broken",
            fault["steps_lost"],
            seconds_text(fault["first_step_s"]),
            fault["detail"],
        )
        for number, fault in enumerate(data["faults"], start=1)
    ]
    print_table(("fault", "kind", "", "steps lost", "trains again after", "what was done"), rows)
    for one in data["broken"]:
        typer.echo(f"broken: {one['invariant']}: {one['detail']}")
    if not data["broken"]:
        typer.echo(f"{len(data['faults'])} faults, every invariant held (seed {data['seed']})")
