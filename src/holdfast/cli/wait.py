"""`holdfast wait RUN...`: wait until runs have ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer

from holdfast.cli.arguments import RunsArgument, locate_runs
from holdfast.cli.exit_status import INTERRUPTED
from holdfast.cli.index import look_at
from holdfast.cli.output import AsJson, RootOption, answer, say, warn
from holdfast.contracts.history import RunHistory
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.states import RunState
from holdfast.flows.progress import describe_progress
from holdfast.flows.summary import end_reason, summarize

POLL_S: Final = 1.0


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(wait)


def wait(
    runs: RunsArgument,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Stop waiting after this time."),
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Wait until every RUN has ended.

    The exit status is 0 if all of them completed, and 1 if one failed, was cancelled, or is still
    live after --timeout. Ctrl-C stops waiting; the runs continue.
    """
    found = locate_runs(runs, root)
    try:
        histories = _wait(found, timeout, show=not as_json)
    except KeyboardInterrupt:
        warn("holdfast: stopped waiting; the runs continue")
        raise typer.Exit(INTERRUPTED) from None
    facts = [_facts(history) for history in histories]
    answer(facts, as_json, _render)
    if any(one["state"] != RunState.COMPLETED for one in facts):
        raise typer.Exit(1)


def _wait(found: Sequence[RunPaths], timeout: float | None, *, show: bool) -> list[RunHistory]:
    """Return the histories of the runs once all have ended, or after `timeout` seconds."""
    ends_at = None if timeout is None else time.monotonic() + timeout
    shown: dict[RunPaths, object] = {}
    ended: dict[RunPaths, RunHistory] = {}
    while True:
        histories = {paths: ended.get(paths) or look_at(paths) for paths in found}
        ended = {paths: one for paths, one in histories.items() if not one.state.is_live}
        for paths, history in histories.items():
            progress = describe_progress(history)
            if show and progress.key != shown.get(paths):
                warn(progress.text)
            shown[paths] = progress.key
        is_late = ends_at is not None and time.monotonic() >= ends_at
        if is_late or len(ended) == len(histories):
            return list(histories.values())
        time.sleep(POLL_S)


def _facts(history: RunHistory) -> dict[str, Any]:
    reason = "it has not ended" if history.state.is_live else end_reason(history)
    return summarize(history, reason)


def _render(facts: Sequence[Mapping[str, Any]]) -> None:
    for one in facts:
        say(f"{one['run']} {one['state']}: {one['reason']}")
