"""`holdfast export CHECKPOINT --to FORM`: a checkpoint for those who do not use Holdfast."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from holdfast.cli.checkpoints import CheckpointArgument, directory_of
from holdfast.cli.output import AsJson, RootOption, answer, bytes_text
from holdfast.cli.trainer_call import ask_trainer
from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.history import load_history
from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.contracts.manifest import read_manifest
from holdfast.contracts.paths import RunPaths, checkpoint_id

# A terabyte at the speed of a slow shared file system.
EXPORT_S_MAX: Final = 6 * 3600.0


class Form(StrEnum):
    """What an export can be read by."""

    TORCH = "torch"
    SAFETENSORS = "safetensors"
    HF = "hf"
    DCP = "dcp"


def register(app: typer.Typer) -> None:
    """Add `export` to `app`."""
    app.command()(export)


def export(
    checkpoint: CheckpointArgument,
    to: Annotated[
        Form, typer.Option("--to", help="torch and safetensors: a file; others: a folder")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="What to write; must not exist.")],
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Keys, or their beginnings, such as model. Repeatable."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option("--rename", metavar="SAVED=WRITTEN", help="model.a.*=model.b.* Repeatable."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of all floating-point tensors: float32, bfloat16, …")
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as torch, safetensors, Hugging Face or plain DCP files.

    Every byte read is compared with the manifest. Weights alone go to safetensors and hf;
    torch and dcp take the optimizer too, unless --include says otherwise.
    """
    directory = directory_of(checkpoint, root)
    paths = RunPaths(directory.parent.parent)
    record = read_document(RunRecord, paths.spec)
    python = load_history(paths).spec.launch.python if record is not None else None
    arguments = [str(directory), "--to", to.value, "--output", str(output.expanduser())]
    arguments += [word for key in include or () for word in ("--include", key)]
    arguments += [word for rule in rename or () for word in ("--rename", rule)]
    arguments += ["--dtype", dtype] if dtype else []
    facts = ask_trainer(python or sys.executable, "export", *arguments, timeout_s=EXPORT_S_MAX)
    manifest = read_manifest(directory)
    facts["checkpoint"] = manifest.id if manifest else str(directory)
    if record is not None and manifest is not None and manifest.run_uid == record.uid:
        facts["checkpoint"] = checkpoint_id(paths.name, directory.name)
        with JournalWriter(paths.journal_of("cli")) as journal:
            journal.append(
                EventKind.EXPORTED,
                checkpoint=directory.name,
                format=facts["format"],
                path=facts["path"],
            )
    answer(facts, as_json, _render)


def _render(facts: dict[str, Any]) -> None:
    typer.echo(
        f"{facts['checkpoint']} → {facts['path']}: {facts['tensors']} tensors, "
        f"{bytes_text(facts['bytes'])} ({facts['format']})"
    )
