"""The Prefect flow `train`: supervise one run over all of its attempts.

Prefect schedules and displays the flow, but holds no state of the run. A flow run with the same
parameters, started by hand, by an automation or after a crash, continues from the state on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import deployment as current_deployment
from prefect.runtime import flow_run as current_flow_run
from prefect.states import Cancelled

from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.errors import RunFailedError, SpecError
from holdfast.contracts.records.attempt import RunRecord, read_document
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.states import RunState
from holdfast.flows.blocks import root_of
from holdfast.flows.deployments import api_url
from holdfast.flows.flow_run_link import FlowRunLink, take_up_requests
from holdfast.flows.givers import giver
from holdfast.flows.prefect_events import PREFECT, PrefectEvents
from holdfast.flows.spec_form import SpecParameter
from holdfast.flows.supervisor.cancellation import (
    cancel_on_signal,
    cancel_run_of_flow,
    home_of,
    last_supervisor,
)
from holdfast.flows.supervisor.carry import given_spec, is_under_way, take_up
from holdfast.flows.supervisor.redactor import Log, Redactor
from holdfast.flows.supervisor.secrets import require
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.summary import end_reason, log_end, summarize
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs import run_folders
from holdfast.workers.runs.preflight import check


@task(
    name="submit attempt",
    task_run_name="attempt, GPUs: {gpus}",
    retries=0,
    # A relaunch with the same arguments is another attempt, so results must not be cached.
    cache_policy=NO_CACHE,
    persist_result=False,
)
def submit_attempt(
    paths: RunPaths,
    *,
    gpus: int,
    reason: str,
    exclude: Sequence[str],
    place: int = 0,
    seen: int | None = None,
) -> AttemptPaths:
    """Submit one attempt. It is a task so that Prefect's UI shows it; Prefect never retries it."""
    redactor = Redactor()
    record = read_document(RunRecord, paths.spec)
    if record is not None:
        redactor.learn(record.spec, paths)
    with redactor.errors():
        return submit_next(paths, gpus=gpus, reason=reason, exclude=exclude, place=place, seen=seen)


@flow(name="train", retries=0, on_cancellation=[cancel_run_of_flow], persist_result=False)
def train(
    spec: SpecParameter = None,
    overrides: list[str] | None = None,
    root: str | None = None,
    run: str | None = None,
    preflight: bool = True,
    by: str | None = None,
) -> dict[str, Any] | State[Any]:
    """Supervise a run until its end and return its summary.

    Raises `RunFailedError` if the run failed, and `SpecError` for a wrong spec. A cancelled run
    returns the state Cancelled.

    Args:
        spec: What to run: a run spec, or the absolute path of one. Not needed with `run`.
        overrides: Keys of the spec to change, such as `resources.nodes=2`.
        root: The folder that contains the runs. By default that of the worker's environment.
        run: The folder name of an existing run, to resume its supervision.
        preflight: Whether checks run before the first attempt is queued.
        by: Who asks, for the records. By default what Prefect knows: the flow run.
    """
    redactor = Redactor()
    log = redactor.log(get_run_logger())
    home = home_of(root)
    with redactor.errors(), Index() as index:
        if spec is None:
            if run is None or overrides:
                raise SpecError("spec: nothing given; expected a run spec, the path of one, or run")
            return supervise_here(run_folders.find_run(home, run), index, redactor)
        run_spec = given_spec(spec, overrides or (), home, run)
        if root is None and run is None:
            home = root_of(run_spec.blocks.storage) or home
        redactor.learn(run_spec.given)
        if (again := _own_run(home, run_spec.name)) is not None:
            return supervise_here(again, index, redactor)
        if not is_under_way(home, run_spec, run):
            index.open()
            # A run that is under way was checked before, and its program may have changed since.
            if preflight:
                check(run_spec, home)
            known = run_folders.own_generation(home, run_spec.name) if run is None else None
            for warning in require(run_spec, known if run is None else RunPaths(home / run)):
                log.warning("%s", warning)
        return supervise_here(take_up(run_spec, home, run, by=giver(by)), index, redactor)


def _own_run(root: Path, name: str) -> RunPaths | None:
    """Return the run that this flow run supervised before it was started again, or None."""
    paths = run_folders.own_generation(root, name)
    if paths is None or not current_flow_run.id:
        return None
    return paths if last_supervisor(paths) == str(current_flow_run.id) else None


def supervise_here(
    paths: RunPaths, index: Index, redactor: Redactor
) -> dict[str, Any] | State[Any]:
    """Supervise the run in the current flow run, as `train` does, and return the same."""
    log, flow_run = redactor.log(get_run_logger()), str(current_flow_run.id or "")
    link = None
    if flow_run and api_url():
        link = FlowRunLink(paths, flow_run, log, redactor)
        take_up_requests(paths, flow_run, log)
    supervisor = Supervisor(
        paths=paths,
        index=index,
        log=log,
        submit=submit_attempt,
        flow_run=flow_run,
        redactor=redactor,
        services={PREFECT: _events(paths, redactor)},
        companion=link,
    )
    try:
        # The order follows the signal: a cancellation by Prefect becomes the run's own.
        with cancel_on_signal(paths, supervisor, log):
            history = supervisor.run()
        # After the supervisor has released its lock, see decision 69.
        if link is not None and supervisor.is_leaving:
            link.leave()
    finally:
        if link is not None:
            link.close()
    return conclude(history, log, redactor)


def _events(paths: RunPaths, redactor: Redactor) -> PrefectEvents:
    return PrefectEvents(
        load_tallied(paths).record,
        redactor,
        flow_run=str(current_flow_run.id or ""),
        deployment=str(current_deployment.id or ""),
    )


def conclude(history: RunHistory, log: Log, redactor: Redactor) -> dict[str, Any] | State[Any]:
    """Log how the run ended, and return its summary, or the state Cancelled, to Prefect."""
    log_end(history, redactor.log(log))
    reason = redactor.text(end_reason(history))
    if history.state is RunState.COMPLETED:
        return summarize(history, reason)
    if history.state is RunState.CANCELLED:
        return Cancelled(message=f"{history.paths.name}: {reason}")
    raise RunFailedError(f"{history.paths.name} {history.state}: {reason}")
