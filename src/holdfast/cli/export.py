"""`holdfast export CHECKPOINT --to FORMAT`: write a checkpoint for use without Holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.checkpoints import CheckpointArgument, directory_of
from holdfast.cli.shared.output import AsJson, RootOption, answer, bytes_text, say
from holdfast.contracts.plain_text import counted
from holdfast.workers.checkpoints import exports
from holdfast.workers.checkpoints.exports import Dtype, ExportFormat


def export(
    checkpoint: CheckpointArgument,
    to: Annotated[
        ExportFormat,
        typer.Option(
            "--to", help="The format. torch and safetensors write a file, others a folder."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file or folder to write. It must not exist.")
    ],
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="A key or a prefix of keys, such as model. Repeatable."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="SAVED=WRITTEN",
            help="Rename keys, as in model.a.*=model.b.*. Repeatable.",
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option("--dtype", help="Convert floating-point tensors to this type.")
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as torch, safetensors, Hugging Face or plain DCP files.

    Every byte is compared with the manifest. By default, safetensors and hf contain the weights
    only, and torch and dcp also contain the optimizer. Use --include to choose the keys.
    """
    facts = exports.export(
        directory_of(checkpoint, root),
        to,
        output.expanduser(),
        writer="cli",
        include=include or (),
        rename=rename or (),
        dtype=dtype,
    )
    answer(facts, as_json, _render)


def _render(facts: dict[str, Any]) -> None:
    say(
        f"{facts['checkpoint']} → {facts['path']}: {counted(facts['tensors'], 'tensor')}, "
        f"{bytes_text(facts['bytes'])} ({facts['format']})"
    )
