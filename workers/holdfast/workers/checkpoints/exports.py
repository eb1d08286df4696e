"""Export a checkpoint for programs without Holdfast, in the job's environment."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.disk.manifest import read_manifest, require_readable
from holdfast.contracts.disk.paths import RunPaths, checkpoint_id
from holdfast.contracts.errors import OutputExistsError
from holdfast.contracts.records.documents import RunRecord, read_document
from holdfast.contracts.records.history import load_history
from holdfast.contracts.records.known_damage import refuse_damaged
from holdfast.workers.checkpoints import hub
from holdfast.workers.checkpoints.trainer_call import ask_trainer, interpreter_of

# Enough for a terabyte on a slow shared file system.
EXPORT_S_MAX: Final = 6 * 3600.0


class ExportFormat(StrEnum):
    """The format of an export."""

    TORCH = "torch"
    SAFETENSORS = "safetensors"
    HF = "hf"
    DCP = "dcp"


class Dtype(StrEnum):
    """The type of floating-point tensors in an export."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


# The file name suffix of each format.
SUFFIXES: Final = {
    ExportFormat.TORCH: ".pt",
    ExportFormat.SAFETENSORS: ".safetensors",
    ExportFormat.HF: ".hf",
    ExportFormat.DCP: ".dcp",
}


def export(
    directory: Path,
    form: ExportFormat,
    output: Path,
    *,
    writer: str,
    include: Sequence[str] = (),
    rename: Sequence[str] = (),
    dtype: str | None = None,
    look: Callable[[], object] = lambda: None,
    is_recorded: bool = True,
) -> dict[str, Any]:
    """Write the checkpoint in `directory` to the new path `output`; return the facts for JSON.

    If the checkpoint's run belongs to the caller, its journal gets a line by `writer`, unless
    `is_recorded` is False. `look` is called during the export, and an exception in it ends the
    export. Raises `OutputExistsError` if `output` exists, `CheckpointError` if the checkpoint
    cannot be exported or written, and `PreflightError` if the job's environment cannot run.
    """
    manifest = read_manifest(directory)
    if manifest is not None:
        require_readable(manifest, "export it")
    paths = RunPaths(directory.parent.parent)
    # Refused before anything is written, see decision 91.
    refuse_damaged(paths, directory.name, "export it")
    target = output.expanduser().absolute()
    if os.path.lexists(target):
        raise OutputExistsError(
            f"{target}: exists already and is not overwritten; give another --output, or delete it"
        )
    record = read_document(RunRecord, paths.spec)
    python = [sys.executable]
    if record is not None:
        # `torch` is in the job's environment, which may differ from this command's.
        python = interpreter_of(paths, load_history(paths).spec)
    arguments = [str(directory.absolute()), "--to", form.value, "--output", str(target)]
    arguments += [word for key in include for word in ("--include", key)]
    arguments += [word for rule in rename for word in ("--rename", rule)]
    arguments += ["--dtype", dtype] if dtype else []
    facts = ask_trainer(python, "export", *arguments, timeout_s=EXPORT_S_MAX, look=look)
    facts["checkpoint"] = manifest.id if manifest else str(directory)
    if record is not None and manifest is not None and manifest.run_uid == record.uid:
        # A checkpoint keeps the id of its run, even if its manifest was written under another name.
        facts["checkpoint"] = checkpoint_id(paths.name, directory.name)
        if is_recorded:
            _record(paths, directory.name, facts, writer)
    return facts


def export_to_hub(
    directory: Path,
    repository: str,
    output: Path | None,
    *,
    private: bool,
    writer: str,
    include: Sequence[str] = (),
    rename: Sequence[str] = (),
    dtype: str | None = None,
) -> dict[str, Any]:
    """Export a checkpoint in the form of Hugging Face, and push it to a repository of the Hub.

    Without `output`, the export is written to a temporary folder and deleted afterwards. Raises
    like `export` and `hub.create`.
    """
    hub.create(hub.check_repository(repository), private=private)
    with tempfile.TemporaryDirectory(prefix="holdfast-export-") as folder:
        target = Path(folder) / "weights" if output is None else output
        facts = export(
            directory,
            ExportFormat.HF,
            target,
            writer=writer,
            include=include,
            rename=rename,
            dtype=dtype,
            is_recorded=output is not None,
        )
        pushed = hub.push(target, repository, message=f"Checkpoint {facts['checkpoint']}")
    facts |= {"pushed_to": str(pushed), "path": facts["path"] if output else str(pushed)}
    paths = RunPaths(directory.parent.parent)
    if facts["checkpoint"] == checkpoint_id(paths.name, directory.name):
        _record(paths, directory.name, {**facts, "path": str(pushed)}, writer)
    return facts


def _record(paths: RunPaths, checkpoint: str, facts: dict[str, Any], writer: str) -> None:
    """Journal an export, in a run of the caller."""
    if not paths.is_mine():
        # Reading another user's checkpoint does not justify a write to that run's folder.
        return
    with JournalWriter(paths.journal_of(writer)) as journal:
        journal.append(
            EventKind.EXPORTED,
            checkpoint=checkpoint,
            format=facts["format"],
            path=facts["path"],
        )
