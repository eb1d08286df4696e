"""`holdfast wait RUN...`: wait until runs have ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from holdfast.cli.shared.arguments import RunsArgument, locate_runs
from holdfast.cli.shared.exit_status import INTERRUPTED
from holdfast.cli.shared.index import look_at
from holdfast.cli.shared.output import AsJson, RootOption, answer, say, warn
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.states import RunState
from holdfast.flows.supervisor.summary import describe_progress, end_reason, summarize

POLL_S: Final = 1.0


class Goal(StrEnum):
    """What `holdfast wait` waits for."""

    ENDED = "ended"
    RUNNING = "running"


def wait(
    runs: RunsArgument,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Stop waiting after this time."),
    ] = None,
    goal: Annotated[
        Goal, typer.Option("--for", help="What to wait for: the run's end, or that it trains.")
    ] = Goal.ENDED,
    first: Annotated[
        bool, typer.Option("--any", help="Stop waiting as soon as one RUN is there.")
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Wait until every RUN has ended, or with --for running, until its ranks train.

    The exit status is 0 if all of them completed, and 1 if one failed, was cancelled, or is still
    live after --timeout. With --for running it is 0 if all were running, or had completed by then.
    With --any, only the runs that are there count. Ctrl-C stops waiting; the runs continue.
    """
    found = locate_runs(runs, root)
    try:
        histories = _wait(found, timeout, goal, is_any=first, show=not as_json)
    except KeyboardInterrupt:
        warn("holdfast: stopped waiting; the runs continue")
        raise typer.Exit(INTERRUPTED) from None
    facts = [_facts(history, goal) for history in histories]
    answer(facts, as_json, _render)
    wanted = {RunState.COMPLETED, *([RunState.RUNNING] if goal is Goal.RUNNING else [])}
    there = [history.state in wanted for history in histories if _is_there(history, goal)]
    if not all(there) or not there or (len(there) < len(histories) and not first):
        raise typer.Exit(1)


def _is_there(history: RunHistory, goal: Goal) -> bool:
    """Return True if there is nothing more to wait for. A run that has ended never runs."""
    is_running = goal is Goal.RUNNING and history.state is RunState.RUNNING
    return is_running or not history.state.is_live


def _wait(
    found: Sequence[RunPaths], timeout: float | None, goal: Goal, *, is_any: bool, show: bool
) -> list[RunHistory]:
    """Return the histories once all runs, or with `is_any` one, are there, or after `timeout`."""
    ends_at = None if timeout is None else time.monotonic() + timeout
    shown: dict[RunPaths, object] = {}
    ended: dict[RunPaths, RunHistory] = {}
    while True:
        histories = {paths: ended.get(paths) or look_at(paths) for paths in found}
        ended = {paths: one for paths, one in histories.items() if _is_there(one, goal)}
        for paths, history in histories.items():
            progress = describe_progress(history)
            if show and progress.key != shown.get(paths):
                warn(progress.text)
            shown[paths] = progress.key
        is_late = ends_at is not None and time.monotonic() >= ends_at
        if is_late or len(ended) == len(histories) or (is_any and ended):
            return list(histories.values())
        time.sleep(POLL_S)


def _facts(history: RunHistory, goal: Goal) -> dict[str, Any]:
    if not history.state.is_live:
        return summarize(history, end_reason(history))
    if goal is Goal.ENDED:
        return summarize(history, "it has not ended")
    is_there = _is_there(history, goal)
    return summarize(history, "its ranks train" if is_there else "its ranks do not train yet")


def _render(facts: Sequence[Mapping[str, Any]]) -> None:
    for one in facts:
        say(f"{one['run']} {one['state']}: {one['reason']}")
