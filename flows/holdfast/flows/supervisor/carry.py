"""Supervision of one run from its state on disk to its end. This module does not use Prefect."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import RunConflictError
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.history_cache import load_tallied
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.flows.parameters import load_spec
from holdfast.flows.supervisor.redactor import Redactor
from holdfast.flows.supervisor.submission import submit_next
from holdfast.flows.supervisor.summary import log_end
from holdfast.flows.supervisor.supervise import Supervisor
from holdfast.lineage.index import Index
from holdfast.workers.runs import run_folders


def carry(paths: RunPaths, log: logging.Logger, index: Index) -> RunHistory:
    """Supervise the run until it has ended, log its summary, and return its last history."""
    redactor = Redactor()
    with redactor.errors():
        history = Supervisor(
            paths=paths, index=index, log=log, submit=submit_next, redactor=redactor
        ).run()
    log_end(history, redactor.log(log))
    return history


def is_under_way(root: Path, spec: RunSpec, run: str | None) -> bool:
    """Return whether the run has had an attempt and has not ended.

    Such a run must be supervised even if checks for a new run would fail, for example because the
    scheduler or the database is unavailable.
    """
    paths = RunPaths(root / run) if run else run_folders.own_generation(root, spec.name)
    if paths is None or not paths.spec.is_file():
        return False
    history = load_tallied(paths)
    return bool(history.attempts) and history.state.is_live


def given_spec(
    spec: Mapping[str, Any] | str, overrides: Sequence[str], root: Path, run: str | None
) -> RunSpec:
    """Return the flow's spec. If it is the recorded spec of an existing run, do not validate it.

    Stricter rules of a newer version therefore do not prevent a run's supervision. Raises
    `SpecError`.
    """
    if run is not None and not overrides:
        record = read_document(RunRecord, RunPaths(root / run).spec)
        if record is not None and spec in (record.given, record.spec):
            return record.read_spec()
    return load_spec(spec, overrides)


def take_up(spec: RunSpec, root: Path, run: str | None, *, by: str = "flow") -> RunPaths:
    """Return the folder of `run`, or of the run that `spec` attaches to or creates.

    `by` is who creates it. Raises `RunConflictError` if `run` was created with another spec.
    """
    if run is None:
        return run_folders.attach_or_create(spec, root, created_by=by)[0]
    paths = run_folders.find_run(root, run)
    record = read_document(RunRecord, paths.spec)
    if record is None or not run_folders.is_same_spec(record, spec):
        raise RunConflictError(
            f"{run} was created with another spec than the given one ({spec.digest[:12]}). Leave "
            f"`run` out to create a new run, or use the spec in {paths.spec}."
        )
    return paths
