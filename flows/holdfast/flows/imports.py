"""Import weights of another program: a run without a program, with one committed checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.paths import IMPORTED, RunPaths, checkpoint_id, has_spec
from holdfast.contracts.errors import NotFoundError, RunConflictError, SpecError
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.states import RunState
from holdfast.flows.parameters import load_spec
from holdfast.flows.supervisor.flow_lock import FlowLock
from holdfast.workers.checkpoints import hub
from holdfast.workers.checkpoints.trainer_call import ask_trainer
from holdfast.workers.runs.run_folders import create_run, newest_generation

# Enough for a terabyte on a slow shared file system.
IMPORT_S_MAX: Final = 6 * 3600.0
MODULE: Final = "holdfast.trainer.importing"


class WeightsFormat(StrEnum):
    """The format of the weights to import."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    DCP = "dcp"
    DEEPSPEED = "deepspeed"


def import_run(
    source: Path | str,
    name: str,
    *,
    root: Path,
    by: str,
    form: WeightsFormat = WeightsFormat.AUTO,
    rename: Sequence[str] = (),
    exclude: Sequence[str] = (),
    python: str = "",
) -> dict[str, Any]:
    """Create the run `name` under `root` from the weights in `source`; return the facts for JSON.

    A source that begins with `hf://` is a repository of the Hugging Face Hub. The run appears
    complete, or not at all. `python` is the interpreter of the job's environment, by default this
    one. Raises `RunConflictError` for a name in use, `SpecError` for one that is
    not possible, `NotFoundError` for a source that does not exist, `CheckpointError` if it cannot
    be imported or written, and `PreflightError` if the environment cannot run.
    """
    place, origin = _fetch(source)
    # The spec must be valid, because the record is read like any other. Its command is never
    # started.
    spec = load_spec(
        {
            "name": name,
            "command": ["-m", MODULE, origin],
            "launch": {"python": python},
            "resources": {"executor": "local"},
        }
    )
    if not os.path.lexists(place):
        raise NotFoundError(f"{place}: no such file or folder; expected a source of weights")
    if newest_generation(root, name) is not None:
        raise RunConflictError(
            f"a run with the name {name} exists under {root}; choose another --name"
        )
    for rule in rename:
        _check_rule(rule)
    arguments = [str(place), "--form", form.value]
    arguments += [word for rule in rename for word in ("--rename", rule)]
    arguments += [word for key in exclude for word in ("--exclude", key)]
    found: dict[str, Any] = {}

    def fill(paths: RunPaths, uid: str) -> None:
        # A killed import of this name may have left a part of its checkpoint.
        shutil.rmtree(paths.checkpoint(IMPORTED), ignore_errors=True)
        run = ["--run", str(paths.directory), "--uid", uid]
        words = [python or sys.executable]
        found.update(ask_trainer(words, "importing", *arguments, *run, timeout_s=IMPORT_S_MAX))
        found["path"] = origin
        _record(paths, found, by)

    # The run's `spec.json` comes last, so the import appears complete or not at all, see
    # decision 78.
    paths = create_run(
        spec, root, created_by=by, imported_from=origin, fill=lambda *own: _alone(fill, *own)
    )
    record = read_document(RunRecord, paths.spec)
    return {
        **found,
        "run": paths.name,
        "uid": record.uid if record else "",
        "directory": str(paths.directory),
        "checkpoint": checkpoint_id(paths.name, found["checkpoint"]),
    }


def _fetch(source: Path | str) -> tuple[Path, str]:
    """Return the folder or file with the weights, and where they come from as text."""
    if isinstance(source, str) and source.startswith(hub.SCHEME):
        folder, commit = hub.fetch(hub.parse_place(source))
        return folder, str(commit)
    place = Path(source).expanduser().absolute()
    return place, str(place)


def _check_rule(rule: str) -> None:
    old, equals, new = rule.partition("=")
    if not (old and equals and new):
        raise SpecError(f"--rename {rule}: expected OLD=NEW, such as encoder.*=model.encoder.*")


def _alone(fill: Callable[[RunPaths, str], None], paths: RunPaths, uid: str) -> None:
    """Fill the run's folder under its lock. Remove the folder if that fails."""
    # Held until the folder is a run, or another import of the name would take it for abandoned.
    with FlowLock(paths.flow_lock) as lock:
        if not lock.try_take():
            raise RunConflictError(
                f"{paths.directory}: another process imports a run of this name; wait for it, or "
                "choose another --name"
            )
        try:
            fill(paths, uid)
        except BaseException:
            with contextlib.suppress(OSError):
                if not has_spec(paths.directory):
                    shutil.rmtree(paths.directory)
            raise


def _record(paths: RunPaths, facts: dict[str, Any], by: str) -> None:
    """Journal where the checkpoint came from, and that the run needs nothing more."""
    with JournalWriter(paths.journal_of("cli")) as journal:
        journal.append(
            EventKind.IMPORTED,
            checkpoint=facts["checkpoint"],
            by=by,
            format=facts["format"],
            path=facts["path"],
            bytes=facts["bytes"],
            tensors=facts["tensors"],
            digest=facts["digest"],
            left_out=facts["left_out"],
        )
        journal.append(
            EventKind.RUN_ENDED,
            state=RunState.COMPLETED,
            after_attempt=0,
            reason=f"imported from {facts['path']} ({facts['format']})",
        )
