"""`holdfast supervise`: start supervisors for runs that have lost theirs, or be one for all."""

from __future__ import annotations

import logging
import os
import shlex
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.arguments import complete_run, locate_runs
from holdfast.cli.index import choose_root, look_at
from holdfast.cli.output import AsJson, RootOption, answer, warn
from holdfast.contracts.errors import HoldfastError, SpecError
from holdfast.contracts.paths import RunPaths, default_root, list_runs
from holdfast.contracts.supervision import is_supervised, lost_supervisor


def register(app: typer.Typer) -> None:
    """Add the command of this module to `app`."""
    app.command()(supervise)


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

    With --stay, one process supervises all your runs: those of now, those whose supervisor ends,
    and those that you submit later. Run it as a service of systemd, and runs survive a restart of
    the host. SIGTERM ends it, and the jobs continue.
    """
    if stay:
        if runs or every:
            raise SpecError("supervise: expected --stay without RUNs and without --all")
        _serve(choose_root(root))
        return
    if bool(runs) == every:
        raise SpecError("supervise: expected RUNs, or --all for every live run under the root")
    chosen = locate_runs(runs, root) if runs else _mine(list_runs(choose_root(root)))
    facts = [fact for paths in chosen if (fact := _start(paths, is_named=bool(runs)))]
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
    from holdfast.contracts.descriptors import raise_descriptor_limit
    from holdfast.flows.service import SupervisorService
    from holdfast.flows.start import has_service
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


def _mine(found: list[RunPaths]) -> list[RunPaths]:
    """Return the runs whose folder belongs to this user."""
    return [paths for paths in found if paths.directory.stat().st_uid == os.geteuid()]


def _start(paths: RunPaths, *, is_named: bool) -> dict[str, Any] | None:
    """Start a supervisor if the run needs one; return the facts.

    Unless the run `is_named`, returns None if it has ended or cannot be read.
    """
    from holdfast.flows.start import start_if_alone

    try:
        state = look_at(paths).state
        facts: dict[str, Any] = {"run": paths.name, "state": state.value}
        if not state.is_live:
            return {**facts, "started": False, "warning": None} if is_named else None
        if is_supervised(paths.flow_lock):
            return {**facts, "started": False, "warning": None}
        started = start_if_alone(paths)
    # With --all, a damaged run must not prevent supervision of the others.
    except (HoldfastError, OSError, ValueError, LookupError) as error:
        if is_named:
            raise
        warn(f"holdfast: {paths.name}: {error}")
        return None
    return {**facts, "started": True, **started.as_json(), "warning": started.warning}


def _render(facts: list[dict[str, Any]]) -> None:
    for one in facts:
        done = "a supervisor was started" if one["started"] else "needs no supervisor"
        typer.echo(f"{one['run']} ({one['state']}): {done}")
        if one["warning"]:
            warn(f"holdfast: {one['warning']}")
    if not facts:
        typer.echo("no live runs")
