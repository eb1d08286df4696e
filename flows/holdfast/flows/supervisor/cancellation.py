"""Cancel the training run when Prefect cancels its flow run, within the time that Prefect allows.

Prefect cancels with SIGTERM, and SIGKILL 30 s later. A worker's host that shuts down sends the
same signals, and only the API can distinguish the two. A cancelled flow writes a request to disk
and exits; the job then saves in its own time. On a shutdown, the job keeps running, and the next
flow continues its supervision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import TerminationSignal
from prefect.logging import get_logger
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths, default_root, given_folder
from holdfast.contracts.disk.visits import own_runs, visit
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.flows.flow_run_states import cancelled_by
from holdfast.flows.supervisor.redactor import Log
from holdfast.flows.supervisor.submission import JOURNAL
from holdfast.workers.runs import operator

if TYPE_CHECKING:
    from holdfast.flows.supervisor.supervise import Supervisor

ASK_S_MAX: Final = 8.0


@contextmanager
def cancel_on_signal(paths: RunPaths, supervision: Supervisor, log: Log) -> Iterator[None]:
    """Turn SIGTERM into a request to cancel the run, if Prefect's API confirms a cancellation."""
    try:
        yield
    except TerminationSignal:
        if not supervision.is_acting:
            log.info("%s is supervised by another flow, which continues", paths.name)
        elif (found := find_cancelling(supervision.flow_run)) is not None:
            log.info("%s", cancel_run(paths, found))
        else:
            log.warning(
                "this flow ends; %s does not change; a flow run with the same parameters resumes "
                "its supervision",
                paths.name,
            )
        raise


def find_cancelling(flow_run: str) -> FlowRun | None:
    """Return this flow run if Prefect's API reports that it was cancelled.

    Returns None if the API does not respond within `ASK_S_MAX` seconds. The worker's hook then
    cancels the run.
    """
    if not flow_run:
        return None
    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings={"timeout": ASK_S_MAX}) as client,
        ):
            found = client.read_flow_run(UUID(flow_run))
    # The process is about to be killed, so no error may prevent its exit.
    except Exception as error:
        get_logger("holdfast").warning("Prefect did not report why this flow ends: %s", error)
        return None
    state = found.state
    return found if state and (state.is_cancelling() or state.is_cancelled()) else None


def cancel_run(paths: RunPaths, flow_run: FlowRun, state: State[Any] | None = None) -> str:
    """Request that the run of `flow_run` be cancelled, unless it has ended or that is pending.

    Returns a message about what was done.
    """
    history = load_tallied(paths)
    if not history.state.is_live:
        return f"{paths.name} has already ended: {history.state}"
    pending = history.pending_request
    if pending and pending["action"] == "cancel":
        return f"{paths.name} is already being cancelled"
    by, reason = cancelled_by(flow_run, state)
    return operator.request(paths, "cancel", by=by, reason=reason, writer=JOURNAL)


def cancel_run_of_flow(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Cancel the flow's run. Prefect's worker calls this hook after the flow's process is gone."""
    log = get_logger("holdfast")
    home = home_of(flow_run.parameters.get("root"))
    paths = find_supervised(home, str(flow_run.id))
    if paths is None:
        log.info("flow run %s supervised no run under %s", flow_run.name, home)
        return
    try:
        log.info("%s", cancel_run(paths, flow_run, state))
    except HoldfastError as error:
        log.error("%s could not be cancelled: %s", paths.name, error)


def home_of(root: str | None) -> Path:
    """Return the folder of the runs that the parameter `root` of a flow names."""
    return given_folder(root, "root") if root else default_root()


def find_supervised(root: Path, flow_run: str) -> RunPaths | None:
    """Return this user's run under `root` whose last supervisor was this flow run, or None.

    Flows supervise own runs only, so what other users' journals say does not count.
    """
    log = get_logger("holdfast")
    for one in visit(own_runs(root), last_supervisor):
        if one.error is not None:
            log.warning("%s: skipped: %s", one.paths.name, one.reason)
        elif one.result == flow_run:
            return one.paths
    return None


def last_supervisor(paths: RunPaths) -> str:
    """Return the flow run that supervised the run last; '' if that was not a flow run."""
    taken = last_supervision(paths)
    return str(taken.data.get("flow_run") or "") if taken else ""


def last_supervision(paths: RunPaths) -> Event | None:
    """Return the event with which a supervisor took up the run last, or None."""
    taken = [event for event in load_tallied(paths).events if event.kind is EventKind.SUPERVISED]
    return taken[-1] if taken else None
