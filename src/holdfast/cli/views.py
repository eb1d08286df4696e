"""`holdfast runs|checkpoints|lineage`: list runs, their checkpoints and their lineage."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.shared import index, output
from holdfast.cli.shared.arguments import CLEAR, WATCH_S, RunArgument, SinceOption
from holdfast.cli.supervise import supervisor_warning
from holdfast.contracts.disk.mirrors import read_record
from holdfast.contracts.disk.paths import RunPaths, has_spec, list_runs
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.plain_text import unix_time
from holdfast.contracts.spec.tags import problem_with_tags
from holdfast.contracts.states import RunState

if TYPE_CHECKING:
    from holdfast.lineage.database.transactions import Database
    from holdfast.lineage.queries.views import CheckpointView


# The table of a run's stretches: its time and cost at each place of `resources`.

HEADINGS = ("place", "attempts", "time", "ETTR", "lost", "GPU hours", "cost", "on demand")


def print_stretches(stretches: Sequence[Mapping[str, Any]]) -> None:
    """Print a row for each stretch, as `Stretch.as_json` gives it."""
    output.print_table(HEADINGS, [_cells(one) for one in stretches])


def _cells(one: Mapping[str, Any]) -> tuple[object, ...]:
    is_single = one["first"] == one["last"]
    return (
        one["name"],
        one["first"] if is_single else f"{one['first']}–{one['last']}",
        output.seconds_text(one["ended_at"] - one["began_at"]),
        f"{one['ettr']:.1%}",
        one["steps_lost"],
        f"{one['gpu_hours']:.2f}",
        _price(one, "cost"),
        _price(one, "on_demand_cost"),
    )


def _price(one: Mapping[str, Any], key: str) -> str | None:
    return None if one[key] is None else f"{one[key]:,.2f} {one['currency']}"


# Which runs `holdfast runs` lists, and in which order.


class RunSort(StrEnum):
    """The order of the listed runs."""

    CREATED = "created"
    ENDED = "ended"
    NAME = "name"
    STATE = "state"
    STEP = "step"


@dataclass(frozen=True)
class RunChoice:
    """The wanted runs by state, user, patterns of names, all of `tags`, and Unix time `since`."""

    states: tuple[RunState, ...] = ()
    user: str | None = None
    names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    since: float | None = None
    sort: RunSort = RunSort.CREATED

    @property
    def is_all(self) -> bool:
        """True if every run is wanted, newest first."""
        return self == RunChoice()

    def of(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the wanted rows in their order. `rows` are newest first."""
        found = [row for row in rows if self._wants(row)]
        keys: dict[RunSort, Callable[[dict[str, Any]], Any]] = {
            RunSort.NAME: itemgetter("run"),
            RunSort.STATE: itemgetter("state"),
            RunSort.STEP: lambda row: -1 if row["step"] is None else -row["step"] - 2,
            RunSort.ENDED: lambda row: -(unix_time(row["ended_at"]) or 0.0),
        }
        return sorted(found, key=keys[self.sort]) if self.sort in keys else found

    def _wants(self, row: Mapping[str, Any]) -> bool:
        own = (row["run"], row["name"])
        return (
            (not self.states or RunState(row["state"]) in self.states)
            and self.user in {None, row["created_by"]}
            and (not self.names or any(fnmatchcase(n, p) for n in own for p in self.names))
            and set(self.tags) <= set(row["tags"] or ())
            and (self.since is None or (unix_time(row["created_at"]) or 0.0) >= self.since)
        )


# `holdfast checkpoints --best METRIC`: a run's checkpoints by a logged metric.


class Mode(StrEnum):
    """Which values of a metric are better."""

    MIN = "min"
    MAX = "max"


def best_first(
    found: Sequence[CheckpointView], metric: str, mode: Mode | None, spec: Mapping[str, Any]
) -> list[CheckpointView]:
    """Return the committed checkpoints with a metric, the best first.

    Without `mode`, that of the spec's `checkpoint.keep.best` counts, if it is for this metric.
    Raises `NotFoundError` if no checkpoint has the metric, with the names of those there are.
    """
    rule = ((spec.get("checkpoint") or {}).get("keep") or {}).get("best") or {}
    given = rule.get("mode") if rule.get("metric") == metric else None
    branch = [one for one in found if one["state"] == "committed" and not one["rolled_back"]]
    rows = [(value, one) for one in branch if _is_number(value := one["metrics"].get(metric))]
    if not rows:
        known = sorted({name for one in branch for name in one["metrics"]})
        raise NotFoundError(
            f"no committed checkpoint has a finite metric {metric!r}; logged metrics: "
            f"{', '.join(known) or 'none'}"
        )
    rows.sort(key=lambda row: row[0], reverse=(mode or given) == Mode.MAX)
    return [one for _, one in rows]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


# The state shown for a run whose folder cannot be read.
UNREADABLE = "unreadable"


class StateFilter(StrEnum):
    """The state of a checkpoint in the index."""

    COMMITTED = "committed"
    DAMAGED = "damaged"
    DELETED = "deleted"


class LineageFormat(StrEnum):
    """The output format of `lineage`."""

    JSON = "json"
    MERMAID = "mermaid"
    DOT = "dot"
    OPENLINEAGE = "openlineage"


def runs(
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="The maximum number of runs. Default: all.")
    ] = None,
    states: Annotated[
        list[RunState] | None,
        typer.Option("--state", help="List runs in this state only. Repeatable."),
    ] = None,
    user: Annotated[
        str | None, typer.Option("--user", help="List runs that this user created only.")
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="PATTERN",
            help="List runs with this name only, as in gpt-*. Repeatable.",
        ),
    ] = None,
    tags: Annotated[
        list[str] | None,
        typer.Option("--tag", help="List runs with this tag only. Repeatable: with all of them."),
    ] = None,
    since: SinceOption = None,
    sort: Annotated[
        RunSort, typer.Option("--sort", help="The order. Steps and times come newest first.")
    ] = RunSort.CREATED,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show changes until no listed run is live.")
    ] = False,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """List the runs under the root and in the index, newest first.

    --since leaves out the runs that were created before.
    """
    if watch and as_json:
        raise typer.BadParameter("--watch prints text: leave --json out")
    if problem := problem_with_tags(tags or ()):
        raise SpecError(f"--tag: {problem}")
    home = index.existing_root(root)
    wanted = tuple(states or ()), user, tuple(names or ()), tuple(tags or ())
    chosen = RunChoice(*wanted, since, sort)
    list_them = partial(_listed, home, chosen, limit, is_alone=root is not None)
    show = partial(_render_runs, home=home)
    shown = list_them()
    output.answer(shown, as_json, show)
    while watch and any(_is_live(row) for row in shown):
        time.sleep(WATCH_S)
        before, shown = shown, list_them()
        if shown != before:
            print(CLEAR if sys.stdout.isatty() else "", end="")
            show(shown)


def _is_live(row: Mapping[str, Any]) -> bool:
    return row["state"] != UNREADABLE and RunState(row["state"]).is_live


def _listed(
    home: Path, chosen: RunChoice, limit: int | None, *, is_alone: bool
) -> list[dict[str, Any]]:
    """Return the rows of the chosen runs, and those of the unreadable ones if all are wanted."""
    # The state and the user of a run are known once it is read, so a choice reads all runs.
    most = limit if chosen.is_all else None
    found, unreadable = index.read_index(
        lambda database: _refreshed_runs(database, home, most, is_alone=is_alone)
    )
    named = {row["path"] for row in found}
    broken = [
        _unreadable_row(paths, reason)
        for paths, reason in unreadable.items()
        if str(paths.directory.resolve()) not in named
    ]
    wanted = chosen.of(found)
    readable = [{**row, "warnings": _lost(row)} for row in wanted[:limit]]
    # Of an unreadable run, only the folder is known.
    return [*readable, *(broken if chosen.is_all else [])][:limit]


def _refreshed_runs(
    database: Database, home: Path, most: int | None, *, is_alone: bool
) -> tuple[list[dict[str, Any]], dict[RunPaths, str]]:
    """Refresh the newest `most` runs; return their rows, and the reasons of the unreadable ones.

    Runs of other roots that the index has are included unless `home` `is_alone`.
    """
    from holdfast.lineage.queries import pages, views
    from holdfast.lineage.queries.cursors import PAGE_MAX

    where = pages.RunFilter(root=home if is_alone else None)
    limit = most if most and most <= PAGE_MAX else None
    if most is None:
        unreadable = index.refresh_all(list_runs(home), database)
    else:
        unreadable = index.refresh_newest(home, database, most)
    elsewhere = [
        RunPaths(index.choose_root(row["path"]))
        for row in pages.list_runs(database, where, limit=limit).items[:most]
        if RunState(row["state"]).is_live and row["root"] != str(home.resolve())
    ]
    index.refresh_all([one for one in elsewhere if has_spec(one.directory)], database)
    found = pages.list_runs(database, where, limit=limit).items
    summaries = [
        {name: value for name, value in row.items() if name in views.RunSummary.__annotations__}
        for row in found
    ]
    return summaries, unreadable


def _lost(row: Mapping[str, Any]) -> list[str]:
    state = RunState(row["state"])
    if not state.is_live or state is RunState.PAUSED:
        return []
    warning = supervisor_warning(RunPaths(Path(row["path"])))
    return [warning] if warning else []


def _unreadable_row(paths: RunPaths, reason: str) -> dict[str, Any]:
    """Return the row of an unreadable run: the reason, and None for the other columns."""
    from holdfast.lineage.queries import views

    return {
        **dict.fromkeys(views.RunSummary.__annotations__),
        "run": paths.name,
        "name": paths.name,
        "state": UNREADABLE,
        "reason": reason,
        "root": str(paths.directory.parent),
        "path": str(paths.directory),
        "warnings": [],
    }


def checkpoints(
    run: RunArgument,
    best: Annotated[
        str | None,
        typer.Option(
            "--best",
            metavar="METRIC",
            help="Only those with this logged metric, the best first. The smallest is the best, "
            "unless checkpoint.keep.best or --mode says otherwise.",
        ),
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option("--mode", help="For --best: which values are better.")
    ] = None,
    states: Annotated[
        list[StateFilter] | None,
        typer.Option("--state", help="List checkpoints in this state only. Repeatable."),
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="List pinned checkpoints only.")] = False,
    since: SinceOption = None,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """List a run's checkpoints, oldest first, and why each one is kept.

    --since leaves out the checkpoints that were committed before.
    """
    from holdfast.lineage.queries import pages, run_queries

    if mode is not None and best is None:
        raise SpecError("checkpoints: --mode is for --best METRIC")

    def read(database: Database) -> list[CheckpointView]:
        directory = refreshed_directory(run, root, database)
        found = pages.list_checkpoints(database, directory, newest_first=False, limit=None).items
        if best is not None:
            found = best_first(found, best, mode, run_queries.read_spec(database, directory))
        return found

    rows = [
        _with_mirror(row)
        for row in index.read_index(read)
        if (not states or row["state"] in states)
        and (row["pinned"] or not pinned)
        and (since is None or (unix_time(row["committed_at"]) or 0.0) >= since)
    ]
    output.answer(rows, as_json, partial(_render_checkpoints, metric=best))


def _with_mirror(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with the URL of the checkpoint's copy in the mirror, read from disk."""
    record = read_record(Path(row["path"]))
    return {**row, "mirror": record.url if record else None}


def lineage(
    run: RunArgument,
    form: Annotated[
        LineageFormat | None,
        typer.Option("--format", help="The output format. Default: a tree."),
    ] = None,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Show a run's lineage: its attempts and checkpoints, their origins and descendants."""
    from holdfast.lineage.queries import run_queries

    of = partial(refreshed_directory, run, root)
    if form is LineageFormat.OPENLINEAGE:
        from holdfast.lineage.queries.openlineage import export_run

        output.answer(
            index.read_index(lambda index: export_run(index, of(index))), True, output.echo
        )
        return
    if as_json and form in {LineageFormat.MERMAID, LineageFormat.DOT}:
        raise typer.BadParameter(
            f"--json and --format {form}: only one of them can be printed; leave one of them out"
        )
    graph = index.read_index(lambda index: run_queries.lineage_graph(index, of(index)))
    if form is None or form is LineageFormat.JSON:
        output.answer(graph, as_json or form is LineageFormat.JSON, render_lineage)
        return
    from holdfast.lineage.queries.formats import dot, mermaid

    graph = output.plain_values(graph)
    output.echo(mermaid(graph) if form is LineageFormat.MERMAID else dot(graph), nl=False)


def refreshed_directory(run: str, root: str | None, database: Any) -> str:
    """Refresh the rows of a run from disk and scheduler, and return its folder."""
    paths = index.locate_known(run, root, database)
    if has_spec(paths.directory):
        index.refresh(paths, database)
    else:
        output.warn(f"holdfast: {paths.directory} no longer exists; showing the rows in the index")
    return str(paths.directory)


def _render_runs(found: Sequence[Mapping[str, Any]], home: Path) -> None:
    if not found:
        is_new = "" if home.is_dir() else ", which does not exist yet"
        output.say(f"no runs that match under {home}{is_new}; `holdfast submit SPEC` starts one")
        return
    columns = ("run", "state", "step", "attempts", "world_size", "cause")
    has_tags = any(row["tags"] for row in found)
    rows = [
        (
            *(row[name] for name in columns),
            *([", ".join(row["tags"] or ())] if has_tags else []),
            output.time_text(row["created_at"]),
            row["root"],
        )
        for row in found
    ]
    headings = ("run", "state", "step", "attempts", "ranks", "cause")
    output.print_table((*headings, *(["tags"] if has_tags else []), "created", "root"), rows)
    for warning in (one for row in found for one in row["warnings"]):
        output.say(f"warning: {warning}")


def _render_checkpoints(found: list[Mapping[str, Any]], metric: str | None = None) -> None:
    columns = ("id", "step", "state", "reason", "world_size")
    has_tags = any(row["tags"] for row in found)
    rows = [
        (
            *([f"{row['metrics'][metric]:.6g}"] if metric else []),
            *(row[name] for name in columns),
            output.bytes_text(row["bytes"]),
            output.seconds_text(row["blocked_s"]),
            output.seconds_text(row["flush_s"]),
            output.time_text(row["committed_at"]),
            "yes" if row["mirror"] else "",
            *([", ".join(row["tags"])] if has_tags else []),
        )
        for row in found
    ]
    headings = ("checkpoint", "step", "state", "kept because", "ranks", "size", "blocked", "flush")
    more = ("committed", "mirrored", *(["tags"] if has_tags else []))
    output.print_table((*([metric] if metric else []), *headings, *more), rows)


def render_lineage(graph: Mapping[str, Any]) -> None:
    """Print the graph as a tree: the run, its attempts and their checkpoints."""
    from rich.console import Console

    from holdfast.cli.shared.lineage_tree import lineage_tree

    Console(highlight=False, markup=False, emoji=False, soft_wrap=True).print(
        lineage_tree(output.plain_values(graph))
    )
