"""Starting a flow for a run: by Prefect's deployment, or a supervisor here as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.errors import NotFoundError, SpecError
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.reading import is_mine
from holdfast.contracts.supervision import is_supervised
from holdfast.flows import secrets

LOG_TAIL_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class Started:
    """A flow on its way: `flow_run` of Prefect's deployment, or `process` on this machine."""

    flow_run: str | None = None
    url: str | None = None
    warning: str | None = None
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def as_json(self) -> dict[str, Any]:
        """The facts for `--json`."""
        return {
            "flow_run": self.flow_run,
            "url": self.url,
            "pid": self.process.pid if self.process else None,
            "log": str(self.log) if self.log else None,
        }


def has_service() -> bool:
    """True when a Prefect API is configured, by the environment or the active profile."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    from holdfast.flows.deployments import api_url

    return bool(api_url())


def start_flow(paths: RunPaths, *, preflight: bool = True) -> Started:
    """Start a flow that carries the run at `paths` on, with the spec it was created with.

    Without `preflight` Prefect's flow checks nothing before it submits. A supervisor that is
    started here never checks.
    Raises `ServiceError` when a Prefect API is configured and cannot be used.
    """
    if not has_service():
        return start_here(paths)
    from holdfast.flows.deployments import submit_to_prefect

    parameters = {**flow_parameters(paths), **({} if preflight else {"preflight": False})}
    flow_run = submit_to_prefect(parameters, name=paths.name)
    return Started(flow_run=flow_run.id, url=flow_run.url, warning=flow_run.warning)


def start_if_alone(paths: RunPaths, *, preflight: bool = True, refresh: bool = False) -> Started:
    """Start a flow for a run that is to go on, unless one is there: then its word suffices.

    The values of secrets are recorded first; with `refresh` the caller's environment replaces
    earlier ones. Raises `SpecError` for another user's run, whose command would run as the caller,
    and `SecretError` when a secret has no value.
    """
    is_own = is_mine(paths.directory.resolve()) and is_mine(paths.spec)
    if is_own:
        secrets.record(paths, refresh=refresh)
    if is_supervised(paths.flow_lock):
        return Started()
    if not is_own:
        raise SpecError(
            f"run {paths.name} belongs to another user, whose command would run as you; its owner "
            "relaunches it, or fork one of its checkpoints after a look at its spec "
            f"(`holdfast show {paths.name} --json`)"
        )
    return start_flow(paths, preflight=preflight)


def flow_parameters(paths: RunPaths) -> dict[str, Any]:
    """The parameters of the flow `train` for a run that exists."""
    record = read_document(RunRecord, paths.spec)
    if record is None:
        raise NotFoundError(f"{paths.directory}: no run here (no spec.json)")
    return {"spec": record.spec, "root": str(paths.directory.parent), "run": paths.name}


def start_here(paths: RunPaths) -> Started:
    """Start a supervisor in a session of its own, which outlives this process and its terminal."""
    with open(paths.flow_log, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.flows.detached", str(paths.directory)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Started(process=process, log=paths.flow_log)


def log_tail(path: Path) -> str:
    """The last `LOG_TAIL_BYTES` bytes of a flow's log, for a message."""
    if not path.exists():
        return ""
    with open(path, "rb") as stream:
        stream.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return stream.read().decode(errors="replace").strip()
