"""`holdfast runs|show|checkpoints|lineage`: list runs and show their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.index import (
    choose_root,
    locate_known,
    open_index,
    refresh,
    refresh_all,
    refresh_newest,
    secrets_in,
)
from holdfast.cli.operate import RunArgument
from holdfast.cli.output import (
    AsJson,
    RootOption,
    answer,
    bytes_text,
    plain_values,
    print_facts,
    print_table,
    say,
    seconds_text,
    time_text,
    warn,
)
from holdfast.cli.supervise import supervisor_warning
from holdfast.contracts.alerts import FAILED_SAVES_MAX, failed_saves, noticed
from holdfast.contracts.errors import reading_run
from holdfast.contracts.goodput import PARTS
from holdfast.contracts.history import load_events
from holdfast.contracts.mirrors import read_record
from holdfast.contracts.paths import RunPaths, has_spec, list_runs
from holdfast.contracts.redaction import redact
from holdfast.contracts.spec import RunSpec
from holdfast.contracts.states import RunState

DIGEST_CHARACTERS = 12
# The state shown for a run whose folder cannot be read.
UNREADABLE = "unreadable"


class Form(StrEnum):
    """The output format of `lineage`."""

    JSON = "json"
    MERMAID = "mermaid"
    DOT = "dot"
    OPENLINEAGE = "openlineage"


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    for command in (runs, show, checkpoints, lineage):
        app.command()(command)


def runs(
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="The maximum number of runs. Default: all.")
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """List the runs under the root and in the index, newest first."""
    from holdfast.lineage import queries

    home = choose_root(root)
    with open_index() as database:
        if limit is None:
            unreadable = refresh_all(list_runs(home), database)
        else:
            unreadable = refresh_newest(home, database, limit)
        known = queries.list_runs(database, root=home if root else None, limit=limit)
        elsewhere = [
            RunPaths(choose_root(row["path"]))
            for row in known
            if RunState(row["state"]).is_live and row["root"] != str(home.resolve())
        ]
        refresh_all([one for one in elsewhere if has_spec(one.directory)], database)
        found = queries.list_runs(database, root=home if root else None, limit=limit)
    named = {row["path"] for row in found}
    broken = [
        _unreadable_row(paths, reason)
        for paths, reason in unreadable.items()
        if str(paths.directory.resolve()) not in named
    ]
    readable = [{**row, "warnings": _lost(row)} for row in found]
    answer([*readable, *broken][:limit], as_json, _render_runs)


def _lost(row: Mapping[str, Any]) -> list[str]:
    """Return a warning if the run is live and its supervisor is gone."""
    if not RunState(row["state"]).is_live:
        return []
    warning = supervisor_warning(RunPaths(Path(row["path"])))
    return [warning] if warning else []


def _unreadable_row(paths: RunPaths, reason: str) -> dict[str, Any]:
    """Return the row of an unreadable run: the reason, and None for the other columns."""
    from holdfast.lineage import views

    return {
        **dict.fromkeys(views.RunSummary.__required_keys__),
        "run": paths.name,
        "name": paths.name,
        "state": UNREADABLE,
        "reason": reason,
        "root": str(paths.directory.parent),
        "path": str(paths.directory),
        "warnings": [],
    }


def show(run: RunArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Show a run: its state, its attempts with their causes, and its use of time."""
    from holdfast.lineage import queries

    with open_index() as database:
        directory = _refreshed_directory(run, root, database)
        with reading_run(directory):
            shown = queries.show_run(database, directory)
            paths = RunPaths(Path(directory))
            events = load_events(paths)
            found = {
                "failed_saves": failed_saves(events),
                "noticed": noticed(events),
                "live_step": _live_step(shown),
                "warnings": _warnings(shown),
            }
        answer({**shown, **redact(found, secrets_in(paths))}, as_json, _render_run)


def _live_step(run: Mapping[str, Any]) -> int | None:
    """Return the newest step in the heartbeats of a running run. It may not be committed yet."""
    from holdfast.workers.heartbeats import newest_step, read_heartbeats

    attempts = RunPaths(Path(run["path"])).list_attempts()
    if not attempts or run["state"] != RunState.RUNNING:
        return None
    return newest_step(read_heartbeats(attempts[-1]))


def _warnings(run: Mapping[str, Any]) -> list[str]:
    """Return the warnings of a live run about its grace period, supervisor and submission."""
    from holdfast.workers.grace import warnings_of
    from holdfast.workers.runs import read_record, why_not_submitted

    paths = RunPaths(Path(run["path"]))
    if not RunState(run["state"]).is_live or not has_spec(paths.directory):
        return []
    warnings = warnings_of(RunSpec.read(run["spec"]), paths)
    found = (supervisor_warning(paths), why_not_submitted(read_record(paths)))
    return warnings + [warning for warning in found if warning]


def checkpoints(run: RunArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """List a run's checkpoints, oldest first, and why each one is kept."""
    from holdfast.lineage import queries

    with open_index() as database:
        directory = _refreshed_directory(run, root, database)
        found = [_with_mirror(row) for row in queries.list_checkpoints(database, directory)]
        answer(found, as_json, _render_checkpoints)


def _with_mirror(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with the URL of the checkpoint's copy in the mirror, read from disk."""
    record = read_record(Path(row["path"]))
    return {**row, "mirror": record.url if record else None}


def _failures_text(failed: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the number of failed saves and the last error; None if there are none."""
    if not failed:
        return None
    last = failed[-1]
    count = f"{FAILED_SAVES_MAX} or more" if len(failed) == FAILED_SAVES_MAX else str(len(failed))
    return f"{count}; the last at step {last['step']}, {time_text(last['at'])}: {last['error']}"


def lineage(
    run: RunArgument,
    form: Annotated[
        Form | None,
        typer.Option("--format", help="The output format. Default: a tree."),
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's lineage: its attempts and checkpoints, their origins and descendants."""
    from holdfast.lineage import queries

    with open_index() as database:
        directory = _refreshed_directory(run, root, database)
        if form is Form.OPENLINEAGE:
            from holdfast.lineage.openlineage import export_run

            answer(export_run(database, directory), True, typer.echo)
            return
        graph = queries.lineage_graph(database, directory)
    if form is None or form is Form.JSON:
        answer(graph, as_json or form is Form.JSON, render_lineage)
        return
    from holdfast.cli.lineage_formats import dot, mermaid

    graph = plain_values(graph)
    typer.echo(mermaid(graph) if form is Form.MERMAID else dot(graph), nl=False)


def _refreshed_directory(run: str, root: str | None, database: Any) -> str:
    """Refresh the rows of a run from disk and scheduler, and return its folder."""
    paths = locate_known(run, root, database)
    if has_spec(paths.directory):
        refresh(paths, database)
    else:
        warn(f"holdfast: {paths.directory} no longer exists; showing the rows in the index")
    return str(paths.directory)


def _render_runs(found: list[Mapping[str, Any]]) -> None:
    rows = [
        (
            row["run"],
            row["state"],
            row["step"],
            row["attempts"],
            row["world_size"],
            row["cause"],
            time_text(row["created_at"]),
            row["root"],
        )
        for row in found
    ]
    print_table(("run", "state", "step", "attempts", "GPUs", "cause", "created", "root"), rows)
    for warning in (one for row in found for one in row["warnings"]):
        say(f"warning: {warning}")


def _render_run(run: Mapping[str, Any]) -> None:
    good = run["goodput"]
    print_facts(
        {
            "run": run["run"],
            "state": run["state"],
            "reason": run["reason"],
            "step": run["step"],
            "live step": run["live_step"],
            "folder": run["path"],
            "created": f"{time_text(run['created_at'])} by {run['created_by']}",
            "forked from": run["forked_from"],
            "flow run": run["flow_run"],
            "spec digest": _short(run["spec_digest"]),
            "command digest": _short(run["command_digest"]),
            "ETTR": f"{good['ettr']:.3f}",
            "steps lost": good["steps_lost"],
            "failed saves": _failures_text(run["failed_saves"]),
            "time": ", ".join(
                f"{part} {seconds_text(good[f'{part}_s'])}"
                for part in PARTS
                if good[f"{part}_s"] > 0
            ),
            "GPU hours": f"{good['gpu_hours']:.2f}",
            **_cost_facts(good),
        }
    )
    headings = ("attempt", "state", "cause", "GPUs", "steps", "resumed from", "job", "started")
    print_table(headings, [_attempt_cells(attempt) for attempt in run["attempts"]])
    for one in run["noticed"]:
        dumps = f" ({', '.join(one['dumps'])})" if one["dumps"] else ""
        say(f"attempt {one['attempt']}, {time_text(one['at'])}: {one['text']}{dumps}")
    _print_failures(run)
    for warning in run["warnings"]:
        say(f"warning: {warning}")


def _cost_facts(good: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's cost, the share of preemptions, the on-demand price and the saving."""
    hours = good["preemption_gpu_hours"]
    facts = {
        "cost": good["cost"],
        f"preemptions ({hours:.2f} GPU hours)": good["preemption_cost"],
        "on demand": good["on_demand_cost"],
        "saved": good["saved"],
    }
    known = {name: price for name, price in facts.items() if price is not None}
    return {name: f"{price:.2f} {good['currency']}" for name, price in known.items()}


def _attempt_cells(attempt: Mapping[str, Any]) -> tuple[object, ...]:
    steps = None
    if attempt["first_step"] is not None:
        steps = f"{attempt['first_step']}–{attempt['last_step'] or ''}"
    return (
        attempt["number"],
        attempt["state"],
        attempt["cause"],
        attempt["world_size"],
        steps,
        attempt["resumed_from"],
        attempt["job_id"],
        time_text(attempt["started_at"]),
    )


def _print_failures(run: Mapping[str, Any]) -> None:
    """Print the evidence and traceback of the last failed attempt, without repetitions."""
    ended = [a for a in run["attempts"] if a["cause"] not in {None, "preemption", "operator"}]
    if not ended:
        return
    last = ended[-1]
    printed = run["reason"] or ""
    for line in last["evidence"]:
        if line not in printed:
            say(f"attempt {last['number']}: {line}")
            printed += f"\n{line}"
    if last["traceback"]:
        say(_frames(last["traceback"].rstrip(), printed))


def _frames(traceback: str, printed: str) -> str:
    """Return a traceback, without its last line, the error, if `printed` contains that."""
    frames, _, error = traceback.rpartition("\n")
    # An indented last line may belong to a message of several lines, so it stays.
    is_line = frames and not error.startswith(" ") and frames.rpartition("\n")[2].startswith(" ")
    return frames if is_line and error in printed else traceback


def _render_checkpoints(found: list[Mapping[str, Any]]) -> None:
    rows = [
        (
            row["id"],
            row["step"],
            row["state"],
            row["reason"],
            row["world_size"],
            bytes_text(row["bytes"]),
            seconds_text(row["blocked_s"]),
            seconds_text(row["flush_s"]),
            time_text(row["committed_at"]),
            "yes" if row["mirror"] else "",
        )
        for row in found
    ]
    headings = ("checkpoint", "step", "state", "kept because", "GPUs", "size", "blocked", "flush")
    print_table((*headings, "committed", "mirrored"), rows)


def render_lineage(graph: Mapping[str, Any]) -> None:
    """Print the graph as a tree: the run, its attempts and their checkpoints."""
    from rich.console import Console

    from holdfast.cli.lineage_tree import lineage_tree

    Console(highlight=False, markup=False, emoji=False, soft_wrap=True).print(
        lineage_tree(plain_values(graph))
    )


def _short(digest: str | None) -> str | None:
    return digest[:DIGEST_CHARACTERS] if digest else None
