"""`holdfast export CHECKPOINT --to FORM`: a checkpoint for those who do not use Holdfast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.checkpoints import CheckpointArgument, directory_of
from holdfast.cli.output import AsJson, RootOption, answer, bytes_text, say
from holdfast.workers import exports
from holdfast.workers.exports import Form


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
        f"{facts['checkpoint']} → {facts['path']}: {facts['tensors']} tensors, "
        f"{bytes_text(facts['bytes'])} ({facts['format']})"
    )
