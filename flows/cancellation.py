"""From a cancelled flow run to a cancelled training run, within the seconds that Prefect gives.

Prefect cancels by SIGTERM, and SIGKILL 30 s later; a worker's host that shuts down sends the
same. Only the API tells which it is. A cancelled flow leaves a request on disk and goes: the job
flushes in its own time. On a shutdown the job is left running, and the next flow takes it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import UUID

from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import TerminationSignal
from prefect.logging import get_logger

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.history import load_events, load_history
from holdfast.contracts.journal import EventKind
from holdfast.contracts.paths import RunPaths, default_root, list_runs
from holdfast.flows.redactor import Log
from holdfast.flows.supervise import JOURNAL
from holdfast.workers import operator

ASK_S_MAX: Final = 8.0
BY: Final = "prefect"


class Supervision(Protocol):
    """What the signal needs to know of a supervisor."""

    @property
    def flow_run(self) -> str: ...

    @property
    def is_acting(self) -> bool: ...


@contextmanager
def cancel_on_signal(paths: RunPaths, supervision: Supervision, log: Log) -> Iterator[None]:
    """Turn SIGTERM into a request to cancel the run, when Prefect's API says that it is one."""
    try:
        yield
    except TerminationSignal:
        if not supervision.is_acting:
            log.info("%s is supervised by another flow, which goes on", paths.name)
        elif is_cancelling(supervision.flow_run):
            log.info("%s", cancel_run(paths))
        else:
            log.warning(
                "this flow ends; %s is left as it is, and the same parameters take it up again",
                paths.name,
            )
        raise


def is_cancelling(flow_run: str) -> bool:
    """True when Prefect's API says that somebody cancelled this flow run.

    An API that does not answer within `ASK_S_MAX` says nothing; the hook of the worker then does
    what is needed.
    """
    if not flow_run:
        return False
    try:
        with get_client(sync_client=True, httpx_settings={"timeout": ASK_S_MAX}) as client:
            state = client.read_flow_run(UUID(flow_run)).state
    # The process is about to be killed: no kind of failure to ask may stop it from leaving.
    except Exception as error:
        get_logger("holdfast").warning("cannot ask Prefect why this flow ends: %s", error)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


def cancel_run(paths: RunPaths) -> str:
    """Ask for the run's end, unless it has ended or somebody has asked; returns what was done."""
    history = load_history(paths)
    if not history.state.is_live:
        return f"{paths.name} has ended already: {history.state}"
    pending = history.pending_request
    if pending and pending["action"] == "cancel":
        return f"{paths.name} is being cancelled already"
    return operator.request(paths, "cancel", by=BY, writer=JOURNAL)


def cancel_run_of_flow(flow: Flow[Any, Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Prefect's hook, run by the worker when the flow's process is gone: the same, once more."""
    log = get_logger("holdfast")
    root = flow_run.parameters.get("root")
    home = Path(root).expanduser().absolute() if root else default_root()
    paths = find_supervised(home, str(flow_run.id))
    if paths is None:
        log.info("flow run %s supervised no run under %s", flow_run.name, home)
        return
    try:
        log.info("%s", cancel_run(paths))
    except HoldfastError as error:
        log.error("%s could not be cancelled: %s", paths.name, error)


def find_supervised(root: Path, flow_run: str) -> RunPaths | None:
    """The run under `root` that the flow run was the last to take up, or None."""
    for paths in list_runs(root):
        taken = [e for e in load_events(paths) if e.kind is EventKind.SUPERVISED]
        if taken and taken[-1].data.get("flow_run") == flow_run:
            return paths
    return None
