"""`holdfast supervise`: start supervisors for runs that have lost theirs, or be one for all."""

from __future__ import annotations

import logging
import os
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.shared.arguments import complete_run, locate_runs
from holdfast.cli.shared.index import existing_root, look_at
from holdfast.cli.shared.output import AsJson, RootOption, answer, echo, warn
from holdfast.contracts.disk.paths import RunPaths, default_root
from holdfast.contracts.disk.visits import own_runs, visit
from holdfast.contracts.errors import SpecError
from holdfast.contracts.records.consumers import needs_supervisor
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.supervision import is_supervised, lost_supervisor
from holdfast.contracts.states import RunState


def supervise(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...",
            help="The runs' names, folders or uids.",
            autocompletion=complete_run,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All your live runs under the root.")
    ] = False,
    stay: Annotated[
        bool,
        typer.Option(
            help="Stay, and supervise all your runs under the root in this process, also those "
            "submitted later."
        ),
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Start a supervisor for a live run that has none. A run that has one is not changed.

    A run that has ended also needs one while consumers of its checkpoints are open.

    With --stay, one process supervises all your runs: those of now, those whose supervisor ends,
    and those that you submit later. Run it as a service of systemd, and runs survive a restart of
    the host. SIGTERM ends it, and the jobs continue.
    """
    if stay:
        if runs or every:
            raise SpecError("supervise: expected --stay without RUNs and without --all")
        if as_json:
            raise SpecError("--json: with --stay there is no answer to print; leave it out")
        _serve(existing_root(root))
        return
    if bool(runs) == every:
        raise SpecError("supervise: expected RUNs, or --all for every live run under the root")
    if runs:
        facts = [_start(paths, look_at(paths)) for paths in locate_runs(runs, root)]
    else:
        facts = _start_all(existing_root(root))
    answer(facts, as_json, _render)


def supervisor_warning(paths: RunPaths) -> str | None:
    """Return a warning if a live run lost its supervisor, with the command that starts another.

    Returns None if it has one, and for another user's run, which only that user can supervise.
    """
    try:
        if not (paths.is_mine() and lost_supervisor(paths.flow_lock)):
            return None
    except OSError:
        return None
    start = command(paths.directory.parent, paths.name)
    return f"this host sees no supervisor of {paths.name}; `{start}` starts one"


def command(root: Path, *arguments: str) -> str:
    """Return the command line of `holdfast supervise` for runs under `root`."""
    named = () if root == default_root() else ("--root", str(root))
    return shlex.join(["holdfast", "supervise", *arguments, *named])


def _serve(root: Path) -> None:
    """Supervise all runs under `root` until a signal ends this process."""
    from holdfast.contracts.node.limits import raise_descriptor_limit
    from holdfast.flows.start import has_service
    from holdfast.flows.supervisor.service import SupervisorService
    from holdfast.lineage.index import Index

    if has_service():
        raise SpecError(
            "supervise --stay: PREFECT_API_URL is set, so Prefect's flows supervise the runs. "
            "Unset it, or start a worker with `prefect worker start`"
        )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_descriptor_limit()
    with Index() as index:
        service = SupervisorService(root, index, logging.getLogger("holdfast"))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop.set())
        warn(f"holdfast: supervising your runs under {root}")
        service.run()


def _start_all(root: Path) -> list[dict[str, Any]]:
    """Start supervisors for this user's live runs that need one; return the facts of each."""

    def start(paths: RunPaths) -> dict[str, Any] | None:
        if paths.directory.stat().st_uid != os.geteuid():
            return None
        history = look_at(paths)
        return _start(paths, history) if needs_supervisor(history) else None

    facts = []
    for one in visit(own_runs(root), start):
        if one.error is not None:
            warn(f"holdfast: {one.paths.name}: {one.reason}")
        elif one.result is not None:
            facts.append(one.result)
    return facts


def _start(paths: RunPaths, history: RunHistory) -> dict[str, Any]:
    from holdfast.flows.start import start_if_alone

    facts: dict[str, Any] = {"run": paths.name, "state": history.state.value}
    if not needs_supervisor(history) or is_supervised(paths.flow_lock):
        return {**facts, "started": False, "warning": None}
    started = start_if_alone(paths)
    return {**facts, "started": started.is_new, **started.as_json(), "warning": started.warning}


def _render(facts: list[dict[str, Any]]) -> None:
    for one in facts:
        waits = f"flow run {one['flow_run']} will supervise it" if one.get("flow_run") else ""
        done = "a supervisor was started" if one["started"] else waits or "needs no supervisor"
        if one["state"] == RunState.PAUSED and not one["started"]:
            done = f"needs no supervisor; `holdfast resume {one['run']}` continues it"
        echo(f"{one['run']} ({one['state']}): {done}")
        if one["warning"]:
            warn(f"holdfast: {one['warning']}")
    if not facts:
        echo("no live runs")
