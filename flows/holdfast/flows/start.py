"""Start a supervisor for a run: a flow run of Prefect's deployment, or a local process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import NotFoundError, ServiceError
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.supervision import is_supervised
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.states import RunState
from holdfast.flows.loaded_supervisor import MODULE, LoadedSupervisor
from holdfast.flows.supervisor import flow_lock, secrets, submission
from holdfast.workers.runs import operator, run_folders
from holdfast.workers.runs.reconcile import reconcile

LOG_TAIL_BYTES: Final = 4096
# Files in which Prefect finds its settings, apart from the environment. The last two belong to
# other programs too.
PREFECT_FILES: Final = ("~/.prefect/profiles.toml", "prefect.toml")
SHARED_FILES: Final = (".env", "pyproject.toml")


@dataclass(frozen=True, kw_only=True)
class Started:
    """A supervisor: `flow_run` of Prefect's deployment, `process` on this machine, or a `service`.

    `service` says where the user's supervisor service runs, which takes up the run in a moment.
    A flow run that is not `is_new` was there before: it waits for a worker, or was suspended.
    """

    flow_run: str | None = None
    url: str | None = None
    warning: str | None = None
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    service: str | None = None
    is_new: bool = True

    def as_json(self) -> dict[str, Any]:
        return {
            "flow_run": self.flow_run,
            "url": self.url,
            "pid": self.process.pid if self.process else None,
            "log": str(self.log) if self.log else None,
            "service": self.service,
        }


def has_service() -> bool:
    """Return whether the environment or the active profile configures a Prefect API.

    Loading Prefect takes more than a second, so it is asked only if something configures it.
    """
    if os.environ.get("PREFECT_API_URL"):
        return True
    if not _is_prefect_configured():
        return False
    from holdfast.flows.deployments import api_url

    return bool(api_url())


def _is_prefect_configured() -> bool:
    """Return True if a variable or a file may contain a setting of Prefect."""
    if any(name.upper().startswith("PREFECT_") for name in os.environ):
        return True
    if any(Path(name).expanduser().exists() for name in PREFECT_FILES):
        return True
    shared = [path for path in map(Path, SHARED_FILES) if path.is_file()]
    return any(b"prefect" in path.read_bytes().lower() for path in shared)


def require_resumer() -> None:
    """Raise `ServiceError` if nothing would continue a run that is paused until capacity returns.

    Only a deployment of Prefect does, because a paused run has no supervisor.
    """
    if not has_service():
        raise ServiceError(
            "--until-capacity: only Prefect's deployment `resume/holdfast` continues such a run, "
            "and no Prefect API is configured. Set PREFECT_API_URL, or pause without the option "
            "and continue the run with `holdfast resume`"
        )
    from holdfast.flows.deployments import check_resumer

    check_resumer()


def load_supervisor(paths: RunPaths | None) -> LoadedSupervisor | None:
    """Start to load a supervisor for a run that a command is about to start.

    Returns None without a run, if something else than a process of this command may supervise it,
    or if no process can be started.
    """
    if paths is None or os.environ.get("PREFECT_API_URL") or _is_prefect_configured():
        return None
    if is_supervised(flow_lock.service_folder(paths.directory.parent) / flow_lock.LOCK):
        return None
    try:
        return LoadedSupervisor(paths)
    except OSError:
        # The command continues, and reports it if it persists.
        return None


def start_flow(
    paths: RunPaths, *, preflight: bool = True, loaded: LoadedSupervisor | None = None
) -> Started:
    """Start a supervisor for the run at `paths`, with the spec that it was created with.

    `loaded` is used if it is the run's and a process on this machine is to supervise it.
    A flow run that was suspended, because the run was paused, is resumed instead.
    Without `preflight`, Prefect's flow runs no checks before it submits. Other supervisors never
    run them.
    With a Prefect API, nothing is started for a run that is paused: it needs nobody, and a flow run
    that is resumed would continue it.
    Raises `ServiceError` if a Prefect API is configured and cannot be used.
    """
    # Without an API, Prefect would start a server for each flow, see decision 35.
    if not has_service():
        if where := flow_lock.hand_over(paths):
            return Started(service=where, log=paths.flow_log)
        return start_here(paths, loaded)
    history = load_history(paths)
    # Decision 69.
    if history.state is RunState.PAUSED:
        return Started(is_new=False)
    # A suspended flow run is still the run's own. A second one would only follow it.
    if (again := resume_if_suspended(paths)) is not None:
        return again
    from holdfast.flows.deployments import submit_to_prefect

    parameters = {**flow_parameters(paths), **({} if preflight else {"preflight": False})}
    uid = history.record.uid
    flow_run = submit_to_prefect(parameters, name=paths.name, uid=uid)
    return Started(
        flow_run=flow_run.id, url=flow_run.url, warning=flow_run.warning, is_new=flow_run.is_new
    )


def start_after(
    paths: RunPaths,
    *,
    goes_on: bool,
    refresh: bool = False,
    loaded: LoadedSupervisor | None = None,
) -> Started:
    """Start what a request to a run needs.

    A run that continues needs a supervisor, and so does one whose job could not be taken back,
    because the scheduler did not answer. A paused run that was cancelled or stopped has ended, and
    its suspended flow run is resumed, so that it ends too. Raises the errors of `start_if_alone`.
    """
    if goes_on:
        return start_if_alone(paths, refresh=refresh, loaded=loaded)
    history = reconcile(paths, writer=submission.JOURNAL)
    if history.state.is_live:
        is_alone = paths.is_mine() and not is_supervised(paths.flow_lock)
        # No secret is needed to end an attempt, so none is recorded.
        return start_flow(paths) if is_alone and not operator.has_agent(history) else Started()
    try:
        return resume_if_suspended(paths) or Started()
    except ServiceError as error:
        return Started(warning=f"Prefect still shows the run as paused: {error}")


def resume_if_suspended(paths: RunPaths) -> Started | None:
    """Resume the flow run that supervised the run last, if it is suspended; else return None.

    Raises `ServiceError` if a Prefect API is configured and cannot be used.
    """
    if not has_service():
        return None
    from holdfast.flows.deployments import resume_flow_run
    from holdfast.flows.supervisor.cancellation import last_supervisor

    before = last_supervisor(paths)
    if not before:
        return None

    again = resume_flow_run(before)
    if again is None:
        return None
    return Started(flow_run=again.id, url=again.url, warning=again.warning, is_new=again.is_new)


def start_if_alone(
    paths: RunPaths,
    *,
    preflight: bool = True,
    refresh: bool = False,
    loaded: LoadedSupervisor | None = None,
) -> Started:
    """Start a supervisor for a run that is to continue, unless it has one.

    The values of secrets are recorded first. With `refresh`, the caller's environment replaces
    recorded values. Raises `SpecError` for another user's run, whose command would run as the
    caller, and `SecretError` if a secret has no value.
    """
    if paths.is_mine():
        # Before the lock is checked: the supervisor that is running may relaunch with them.
        secrets.record(paths, refresh=refresh)
    if is_supervised(paths.flow_lock):
        return Started()
    run_folders.require_own(paths)
    return start_flow(paths, preflight=preflight, loaded=loaded)


def flow_parameters(paths: RunPaths) -> dict[str, Any]:
    """Return the parameters of the flow `train` for an existing run.

    They contain the spec as it was written, for people, unless Prefect would refuse it: a recorded
    spec may have keys of another version.
    """
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise NotFoundError(f"{paths.directory}: no run here (no spec.json)")
    given = {"root": str(paths.directory.parent), "run": paths.name}
    written = record.spec if record.given is None else record.given
    try:
        RunSpec.model_validate(written)
    except ValidationError:
        return given
    return {"spec": written, **given}


def start_here(paths: RunPaths, loaded: LoadedSupervisor | None = None) -> Started:
    """Start a supervisor in its own session, so that it outlives this process and its terminal."""
    with open(paths.flow_log, "ab") as log:
        process = loaded.begin(paths.directory) if loaded is not None else None
        if process is None:
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(paths.directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    return Started(process=process, log=paths.flow_log)


def log_tail(path: Path) -> str:
    """Return the last `LOG_TAIL_BYTES` bytes of a supervisor's log, for a message."""
    if not path.exists():
        return ""
    with open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return stream.read().decode(errors="replace").strip()
