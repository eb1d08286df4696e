"""`holdfast import SOURCE --name RUN`: make weights of another program a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli.shared.index import choose_root, user_name
from holdfast.cli.shared.output import AsJson, RootOption, answer, bytes_text, say, warn
from holdfast.contracts.plain_text import counted
from holdfast.flows import imports
from holdfast.flows.imports import WeightsFormat


def import_(
    source: Annotated[
        str,
        typer.Argument(
            help="The folder or file with the weights, or hf://OWNER/NAME@REVISION.",
            metavar="SOURCE",
        ),
    ],
    name: Annotated[str, typer.Option("--name", help="The name of the run to create.")],
    form: Annotated[
        WeightsFormat, typer.Option("--form", help="The format of the weights.")
    ] = WeightsFormat.AUTO,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            "--rename",
            metavar="OLD=NEW",
            help="Rename tensors, as in encoder.*=model.encoder.*. Repeatable.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="A tensor or a prefix of names to leave out. Repeatable."),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", help="Python of the job's environment. Default: this one.")
    ] = "",
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Make weights of another program the first checkpoint of a new run.

    Reads a Hugging Face folder of safetensors, a torch file, or a directory of DCP or DeepSpeed,
    and runs no code from it. The run has no program. Start one from its checkpoint with
    `fork --spec`.
    """
    facts = imports.import_run(
        source,
        name,
        root=choose_root(root),
        by=user_name(),
        form=form,
        rename=rename or (),
        exclude=exclude or (),
        python=python,
    )
    if facts["left_out"]:
        warn(f"holdfast: not imported, because only weights are: {', '.join(facts['left_out'])}")
    answer(facts, as_json, _render)


def _render(facts: dict[str, Any]) -> None:
    say(
        f"{facts['path']} → {facts['checkpoint']}: {counted(facts['tensors'], 'tensor')}, "
        f"{bytes_text(facts['bytes'])} ({facts['format']})"
    )
    say(f"train from it with `holdfast fork {facts['checkpoint']} --spec run.toml`")
