"""`holdfast drill`: inject faults into a run and check the invariants after each."""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.shared import index, output
from holdfast.cli.shared.arguments import refuse_unused
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.version import require_bench_package

if TYPE_CHECKING:
    from holdfast_bench.live_drills.results import DrillResult


class _Report:
    """The output of a drill: its result, and the report at `path` with earlier drills."""

    def __init__(self, path: Path | None, after: list[Path], as_json: bool) -> None:
        if path is not None:
            output.check_folder_of("--report", path)
        self.path, self._former = path, [_read(one) for one in after]
        self._as_json = as_json

    def write(self, result: DrillResult) -> None:
        """Write the report if there were faults, and print the result."""
        result.command = shlex.join(["holdfast", *sys.argv[1:]])
        if self.path is not None and result.faults:
            from holdfast_bench.drills.report import write_report

            write_report(self.path, [*self._former, result])
        output.answer(result.as_json(), self._as_json, _render)


def _read(path: Path) -> DrillResult:
    """Read the JSON output of an earlier drill. Raises `SpecError` if it is invalid."""
    from holdfast_bench.drills.report import read_result

    try:
        return read_result(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise NotFoundError(f"--after {path}: no such file") from None
    except (OSError, ValueError) as error:
        raise SpecError(
            f"{path}: {error}. Expected a file that `holdfast drill --json` wrote."
        ) from error


def drill(
    context: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run that is training. Default: a temporary run."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="The number of faults.")] = 6,
    seed: Annotated[int, typer.Option(help="The seed for the order and times of the faults.")] = 0,
    kinds: Annotated[
        str, typer.Option(help="The kinds of faults, separated by commas. Default: all possible.")
    ] = "",
    within: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Start no new fault after this many seconds.", metavar="SECONDS"
        ),
    ] = None,
    at_once: Annotated[
        int, typer.Option(min=1, max=64, help="The number of temporary runs at a time.")
    ] = 1,
    report: Annotated[
        Path | None, typer.Option(help="Also write a report in Markdown.", metavar="FILE")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            help="With --report: first train without faults, to predict the effective training "
            "time ratio (ETTR)."
        ),
    ] = True,
    after: Annotated[
        list[Path] | None,
        typer.Option(
            help="The JSON of an earlier drill, to include in the report. Repeatable.",
            metavar="FILE",
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            help="An existing folder for the temporary runs. Default: the system's.",
            metavar="DIR",
        ),
    ] = None,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Inject faults into a run and check the invariants. The exit status is 1 if one is broken."""
    require_bench_package("a drill")
    wanted = [name.strip() for name in kinds.split(",") if name.strip()]
    within_s = math.inf if within is None else within
    _check_options(context, run, report)
    if directory is not None and not directory.is_dir():
        raise NotFoundError(f"--directory {directory}: no such folder")
    page = _Report(report, after or [], as_json)
    if run is not None:
        result = _drill_live(run, root, wanted, count, seed, within_s)
        page.write(result)
    else:
        settings = {
            "count": count,
            "seed": seed,
            "within_s": within_s,
            "at_once": at_once,
            "calibrates": calibrate and report is not None,
        }
        result = _drill_temporary(wanted, settings, directory, page)
    if result.broken:
        raise typer.Exit(1)


def _check_options(context: typer.Context, run: str | None, report: Path | None) -> None:
    """Raise `SpecError` for options that this drill does not use."""
    if run is not None:
        why = "a drill of a run needs no temporary runs"
        refuse_unused(context, why, "at_once", "calibrate", "directory")
    else:
        refuse_unused(context, "temporary runs have a root of their own", "root")
    if report is None:
        refuse_unused(context, "there is no --report that it is for", "after", "calibrate")


def _drill_live(
    run: str, root: str | None, wanted: list[str], count: int, seed: int, within_s: float
) -> DrillResult:
    """Drill a run that is training. Log progress on standard error."""
    from holdfast_bench.live_drills.kinds import select_kinds
    from holdfast_bench.live_drills.runner import drill_live

    chosen = select_kinds(wanted, is_live=True, missing=())
    return drill_live(
        index.locate_run(run, root), chosen, count, seed, tell=output.warn, within_s=within_s
    )


def _drill_temporary(
    wanted: list[str], settings: dict[str, Any], directory: Path | None, page: _Report
) -> DrillResult:
    """Drill temporary runs. Log progress on standard error. Write the output in any case."""
    from holdfast_bench.drills.campaign import Plan, drill_throw_away
    from holdfast_bench.drills.testbed import find_missing
    from holdfast_bench.live_drills.kinds import select_kinds
    from holdfast_bench.live_drills.results import DrillResult

    # SIGTERM raises, so that the drill ends its processes and unmounts its file system.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    place = tempfile.TemporaryDirectory(
        prefix="holdfast-drill-", dir=directory, ignore_cleanup_errors=True
    )
    with place as name:
        folder = Path(name)
        missing = find_missing(folder)
        chosen = select_kinds(wanted, is_live=False, missing=missing)
        plan = Plan(kinds=chosen, **settings)
        result = DrillResult(seed=plan.seed, at_once=plan.at_once, refused=missing)
        try:
            kept = folder.with_name(f"{folder.name}-broken")
            drill_throw_away(plan, result, folder, output.warn, kept=kept)
        finally:
            page.write(result)
    return result


def _render(data: dict[str, Any]) -> None:
    rows = [
        (
            number,
            fault["kind"],
            "ok" if fault["ok"] else "broken",
            fault["steps_lost"],
            output.seconds_text(fault["first_step_s"]),
            fault["detail"],
        )
        for number, fault in enumerate(data["faults"], start=1)
    ]
    output.print_table(
        ("fault", "kind", "", "steps lost", "training again after", "fault details"), rows
    )
    for one in data["broken"]:
        output.say(f"broken: {one['invariant']}: {one['detail']}")
    for folder in data["kept"]:
        output.say(f"kept: {folder}")
    if not data["broken"]:
        output.say(f"{len(data['faults'])} faults, every invariant held (seed {data['seed']})")
