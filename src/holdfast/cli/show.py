"""`holdfast show RUN...`: show the state of runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.shared import index, output
from holdfast.cli.shared.arguments import CLEAR, WATCH_S, RunsArgument
from holdfast.cli.supervise import supervisor_warning
from holdfast.cli.views import print_stretches, refreshed_directory
from holdfast.contracts.account.goodput import PARTS
from holdfast.contracts.disk.journal import Event
from holdfast.contracts.disk.paths import RunPaths, checkpoint_id, has_spec
from holdfast.contracts.errors import reading_run
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records import alerts, known_damage, saving
from holdfast.contracts.records.consumers import ConsumerState
from holdfast.contracts.records.history import load_events, load_history
from holdfast.contracts.records.orders import orders_of
from holdfast.contracts.records.protection import Lacking, unprotected_in
from holdfast.contracts.redaction import redact
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.written import settings_in, settings_of
from holdfast.contracts.states import RunState

if TYPE_CHECKING:
    from holdfast.lineage.database.transactions import Database

DIGEST_CHARACTERS: Final = 12
ADVICE: Final = "see docs/porting.md, or describe the program's own checkpoints in [program]"
ORDERS_MAX: Final = 5


def show(
    runs: RunsArgument,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show changes until every run has ended.")
    ] = False,
    spec: Annotated[
        bool, typer.Option("--spec", help="Show the value and the source of each key of the spec.")
    ] = False,
    diff: Annotated[
        bool,
        typer.Option("--diff", help="Show only the keys of the spec in which several runs differ."),
    ] = False,
    errors: Annotated[
        bool,
        typer.Option(
            "--errors",
            help="Show why the newest failed attempt failed: the errors of all its processes.",
        ),
    ] = False,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt",
            min=1,
            help="With --errors, the attempt. Default: the newest that has errors.",
        ),
    ] = None,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Show a run: its state, its attempts with their causes, and its use of time.

    With --json and several runs, print a list.
    """
    _check_options(runs, watch=watch, spec=spec, diff=diff, errors=errors, attempt=attempt)
    if errors:
        _show_errors(runs, attempt, root, as_json)
        return
    if spec or diff:
        settings = [_settings(run, root) for run in runs]
    if diff:
        differing = _differing(settings)
        names = [one["run"] for one in settings]
        output.answer({"runs": names, "keys": differing}, as_json, _render_differing)
        return
    if spec:
        found = settings if len(settings) > 1 else settings[0]
        output.answer(found, as_json, lambda _: _render_settings(settings))
        return
    if watch and as_json:
        raise typer.BadParameter("--watch prints text: leave --json out, or use `holdfast events`")
    shown = [_shown(run, root) for run in runs]
    if not watch:
        output.answer(shown if len(shown) > 1 else shown[0], as_json, lambda _: _render(shown))
        return
    _render(shown)
    while any(RunState(one["state"]).is_live for one in shown):
        time.sleep(WATCH_S)
        before, shown = shown, [_shown(run, root) for run in runs]
        if shown != before:
            print(CLEAR if sys.stdout.isatty() else "", end="")
            _render(shown)


def _check_options(
    runs: Sequence[str], *, watch: bool, spec: bool, diff: bool, errors: bool, attempt: int | None
) -> None:
    if errors and (watch or spec or diff):
        other = "--watch" if watch else "--spec" if spec else "--diff"
        raise typer.BadParameter(f"--errors and {other}: give one of them")
    if attempt is not None and not errors:
        raise typer.BadParameter("--attempt: expected it with --errors; add that")
    if watch and (spec or diff):
        other = "--spec" if spec else "--diff"
        raise typer.BadParameter(
            f"--watch and {other}: a spec never changes; leave one of them out"
        )
    if diff and (spec or len(runs) < 2):
        given = "--spec" if spec else "one run"
        raise typer.BadParameter(
            f"--diff and {given}: expected two or more runs, without --spec; `--diff` prints the "
            "keys in which they differ"
        )


def _show_errors(runs: Sequence[str], attempt: int | None, root: str | None, as_json: bool) -> None:
    from holdfast.cli.support.run_errors import errors_of, print_errors

    found = [errors_of(run, attempt, root) for run in runs]
    data = [one.model_dump(mode="json") for one in found]

    def render(_: object) -> None:
        for one in found:
            print_errors(one)

    output.answer(data if len(data) > 1 else data[0], as_json, render)


def _render(shown: Sequence[Mapping[str, Any]]) -> None:
    for number, one in enumerate(shown):
        if number:
            output.say("")
        _render_run(one)


def _shown(run: str, root: str | None) -> dict[str, Any]:
    from holdfast.lineage.queries import run_queries
    from holdfast.workers.nodes.heartbeats import live_step, trained_step
    from holdfast.workers.runs.restarts import waiting_facts

    def read(database: Database) -> dict[str, Any]:
        directory = refreshed_directory(run, root, database)
        with reading_run(directory):
            shown = run_queries.show_run(database, directory)
            paths = RunPaths(Path(directory))
            events = load_events(paths)
            history = load_history(paths, events)
            trained = saving.trained_in(history)
            is_running = shown["state"] == RunState.RUNNING
            unprotected = unprotected_in(events) if is_running else []
            found = {
                "failed_saves": alerts.failed_saves(events),
                "noticed": alerts.noticed(events),
                "committed_step": history.committed_step,
                "trained_step": trained_step(history),
                "live_step": live_step(paths) if is_running else None,
                "successor": waiting_facts(paths),
                "orders": [vars(order) for order in orders_of(history)],
                "saves_by_holdfast": saving.saves_by_holdfast(trained),
                "unprotected": unprotected,
                "warnings": [
                    *_warnings(shown),
                    *_unsaved(trained),
                    *_damaged(paths, events),
                    *map(_unprotected, unprotected),
                ],
            }
        return {**shown, **redact(found, index.secrets_in(paths))}

    return index.read_index(read)


def _settings(run: str, root: str | None) -> dict[str, Any]:
    directory = index.read_index(lambda database: refreshed_directory(run, root, database))
    with reading_run(directory):
        paths = RunPaths(Path(directory))
        history = load_history(paths)
        found = settings_of(history.spec, history.spec.sources)
        found |= settings_in(history.events)
        return {"run": paths.name, "settings": redact(found, index.secrets_in(paths))}


def _differing(settings: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any] | None]]:
    """Return the keys whose values differ, each with its value and source in every run.

    A key that a run does not have is None there.
    """
    keys = dict.fromkeys(key for one in settings for key in one["settings"])
    rows = {key: [one["settings"].get(key) for one in settings] for key in keys}

    def values(row: Sequence[Mapping[str, Any] | None]) -> set[str]:
        return {json.dumps(one and one["value"], sort_keys=True) for one in row}

    return {key: row for key, row in rows.items() if len(values(row)) > 1}


def _render_differing(facts: Mapping[str, Any]) -> None:
    rows = [
        (key, *("–" if one is None else _as_written(one["value"]) for one in row))
        for key, row in facts["keys"].items()
    ]
    if rows:
        output.print_table(("key", *facts["runs"]), rows)
    else:
        output.say(f"the specs of {' and '.join(facts['runs'])} have the same values")


def _as_written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _render_settings(settings: Sequence[Mapping[str, Any]]) -> None:
    for one in settings:
        output.say(f"run {one['run']}")
        rows = [
            (key, _as_written(found["value"]), found["source"])
            for key, found in one["settings"].items()
        ]
        output.print_table(("key", "value", "source"), rows)


def _warnings(run: Mapping[str, Any]) -> list[str]:
    """Return the warnings of a live run about its grace period, supervisor and submission.

    One that is paused or has ended needs a supervisor for its open consumers only.
    """
    from holdfast.workers.decisions.grace import warnings_of
    from holdfast.workers.runs.run_folders import read_record, why_not_submitted

    paths = RunPaths(Path(run["path"]))
    state = RunState(run["state"])
    if not state.is_live or state is RunState.PAUSED or not has_spec(paths.directory):
        is_open = any(ConsumerState(one["state"]).is_open for one in run["consumers"])
        return [warning for warning in [supervisor_warning(paths)] if warning and is_open]
    warnings = warnings_of(RunSpec.read(run["spec"]), paths)
    found = (supervisor_warning(paths), why_not_submitted(read_record(paths)))
    return warnings + [warning for warning in found if warning]


def _damaged(paths: RunPaths, events: Iterable[Event]) -> list[str]:
    """Return a warning for each checkpoint that is known to be damaged and was not deleted."""
    return [
        f"{checkpoint_id(paths.name, name)} is damaged, so nothing starts from it: {damage}"
        for name, damage in known_damage.damaged_checkpoints(events).items()
        if paths.checkpoint(name).is_dir()
    ]


def _unprotected(one: Lacking) -> str:
    """Return a warning of a running launch that the loss of a node would set back."""
    return f"unprotected against the loss of a node: {one['text']}. What helps: {one['action']}"


def _unsaved(trained: Sequence[saving.Trained]) -> list[str]:
    """Return a warning if the program is known to save nothing by Holdfast, or []."""
    if saving.saves_by_holdfast(trained) is not False:
        return []
    return [f"{saving.why_nothing_is_saved(trained)} by Holdfast; {ADVICE}"]


def _failures_text(failed: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the number of failed saves and the last error; None if there are none."""
    if not failed:
        return None
    last = failed[-1]
    count = (
        f"{alerts.FAILED_SAVES_MAX} or more"
        if len(failed) == alerts.FAILED_SAVES_MAX
        else str(len(failed))
    )
    return (
        f"{count}; the last at step {last['step']}, {output.time_text(last['at'])}: {last['error']}"
    )


def _render_run(run: Mapping[str, Any]) -> None:
    good = run["goodput"]
    output.print_facts(
        {
            "run": run["run"],
            "state": run["state"],
            "reason": run["reason"],
            "tags": ", ".join(run["tags"]) or None,
            "note": run["note"] and f"{run['note']} ({run['note_by'] or 'unknown'})",
            "newest attempt": newest_reason(run),
            "committed step": run["committed_step"],
            "trained step": run["trained_step"],
            "successor": _successor_text(run["successor"]),
            "folder": run["path"],
            "created": f"{output.time_text(run['created_at'], zone=True)} by {run['created_by']}",
            "forked from": run["forked_from"],
            "flow run": run["flow_run"],
            "spec digest": _short(run["spec_digest"]),
            "command digest": _short(run["command_digest"]),
            "ETTR": f"{good['ettr']:.3f}",
            "steps lost": good["steps_lost"] if run["saves_by_holdfast"] is not False else None,
            "failed saves": _failures_text(run["failed_saves"]),
            "time": ", ".join(
                f"{part} {output.seconds_text(good[f'{part}_s'])}"
                for part in PARTS
                if good[f"{part}_s"] > 0
            ),
            "GPU hours": f"{good['gpu_hours']:.2f}",
            **_cost_facts(good),
        }
    )
    if len(run["stretches"]) > 1:
        print_stretches(run["stretches"])
    headings = ("attempt", "state", "cause", "GPUs", "steps", "resumed from", "job", "started")
    output.print_table(headings, [_attempt_cells(attempt) for attempt in run["attempts"]])
    _print_orders(run["orders"])
    _print_consumers(run)
    for one in run["noticed"]:
        dumps = f" ({', '.join(one['dumps'])})" if one["dumps"] else ""
        output.say(f"attempt {one['attempt']}, {output.time_text(one['at'])}: {one['text']}{dumps}")
    _print_failures(run)
    for warning in run["warnings"]:
        output.say(f"warning: {warning}")


def _successor_text(one: Mapping[str, Any] | None) -> str | None:
    """Return what is known about the job that waits to become the next attempt, or None."""
    if one is None:
        return None
    job = f"job {one['job_id']}" if one["job_id"] else "a job without an answer of Slurm"
    return f"{job} waits in the queue to follow attempt {one['after_attempt']}"


def _print_orders(orders: Sequence[Mapping[str, Any]]) -> None:
    """Print the newest orders, and all that are not done yet."""
    shown = [one for one in orders[:-ORDERS_MAX] if one["state"].is_open]
    rows = []
    for one in [*shown, *orders[-ORDERS_MAX:]]:
        what = [
            one["action"],
            one["checkpoint"],
            one["gpus"] and f"at {counted(one['gpus'], 'GPU')}",
        ]
        text = " ".join(str(part) for part in what if part)
        facts = one["by"], output.time_text(one["at"]), one["state"], one["detail"]
        rows.append((one["number"], text, *facts))
    if rows:
        output.print_table(("order", "what", "by", "given", "state", "detail"), rows)


def _print_consumers(run: Mapping[str, Any]) -> None:
    """Print the consumers of checkpoints, each with its log in the run's folder."""
    folder = Path(run["path"])
    rows = [
        (
            *(one["name"], one["event"], one["checkpoint"].rpartition(":")[2]),
            *(one["state"].replace("_", " "), one["tries"], one["reason"]),
            one["log"] and Path(one["log"]).relative_to(folder),
        )
        for one in run["consumers"]
    ]
    if rows:
        headings = ("consumer", "event", "checkpoint", "state", "tries", "reason", "log")
        output.print_table(headings, rows)


def newest_reason(run: Mapping[str, Any]) -> str | None:
    """Return why a live run's newest attempt was submitted, and which hosts it does not use."""
    if len(run["attempts"]) < 2 or not RunState(run["state"]).is_live:
        return None
    reason: str | None = run["attempts"][-1]["reason"]
    return None if reason == run["reason"] else reason


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
    columns = ("number", "state", "cause", "gpus")
    origin = attempt["resumed_from"], attempt["job_id"], output.time_text(attempt["started_at"])
    return (*(attempt[name] for name in columns), steps, *origin)


def _print_failures(run: Mapping[str, Any]) -> None:
    """Print the evidence and traceback of the last failed attempt, without repetitions."""
    ended = [a for a in run["attempts"] if a["cause"] not in {None, "preemption", "operator"}]
    if not ended:
        return
    last = ended[-1]
    printed = run["reason"] or ""
    for line in last["evidence"]:
        if line not in printed:
            output.say(f"attempt {last['number']}: {line}")
            printed += f"\n{line}"
    if last["traceback"]:
        output.say(_frames(last["traceback"].rstrip(), printed))


def _frames(traceback: str, printed: str) -> str:
    """Return a traceback, without its last line, the error, if `printed` contains that."""
    frames, _, error = traceback.rpartition("\n")
    # An indented last line may belong to a message of several lines, so it stays.
    is_line = frames and not error.startswith(" ") and frames.rpartition("\n")[2].startswith(" ")
    return frames if is_line and error in printed else traceback


def _short(digest: str | None) -> str | None:
    return digest[:DIGEST_CHARACTERS] if digest else None
