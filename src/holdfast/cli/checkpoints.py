"""`holdfast pin|unpin|metric|prune|verify|export`: commands for checkpoints, and `delete`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.shared import output
from holdfast.cli.shared.arguments import RunArgument, complete_checkpoint, confirm, refuse_unused
from holdfast.cli.shared.index import forget, locate_checkpoint, locate_run, look_at, user_name
from holdfast.contracts.disk.damage import find_damage, word_for
from holdfast.contracts.disk.journal import JournalWriter
from holdfast.contracts.disk.manifest import Manifest
from holdfast.contracts.disk.paths import checkpoint_id, has_spec, plain_checkpoint
from holdfast.contracts.errors import ForeignFileError, NotFoundError, SpecError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.reported import read_number, report, require_metrics
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.workers.checkpoints import exports
from holdfast.workers.checkpoints.exports import Dtype, ExportFormat

CheckpointArgument = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="The checkpoint's id (run:step-…, run:latest, run:best) or path.",
        autocompletion=complete_checkpoint,
    ),
]

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be deleted, and delete nothing.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")]


def pin(
    checkpoint: CheckpointArgument,
    note: Annotated[str, typer.Option("--note", help="The reason, for the records.")] = "",
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Keep a checkpoint regardless of the keep rules."""
    from holdfast.workers.runs import operator

    paths, name = locate_checkpoint(checkpoint, root)
    operator.pin(paths, name, by=user_name(), note=note)
    facts = {"checkpoint": checkpoint_id(paths.name, name), "pinned": True}
    output.answer(facts, as_json, lambda data: output.say(f"pinned {data['checkpoint']}"))


def unpin(
    checkpoint: CheckpointArgument, root: output.RootOption = None, as_json: output.AsJson = False
) -> None:
    """Remove a checkpoint's pin, so that the keep rules apply to it again."""
    from holdfast.workers.runs import operator

    paths, name = locate_checkpoint(checkpoint, root)
    operator.unpin(paths, name, by=user_name())
    facts = {"checkpoint": checkpoint_id(paths.name, name), "pinned": False}
    output.answer(facts, as_json, lambda data: output.say(f"unpinned {data['checkpoint']}"))


def metric(
    checkpoint: CheckpointArgument,
    metrics: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="A metric and its number.")
    ],
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Record metrics of a committed checkpoint, such as the results of an evaluation.

    They count like those that the program logs: for the keep rules, `run:best`, `checkpoints
    --best` and the web UI. A new value replaces the former one.
    """
    values = require_metrics(_metrics_in(metrics))
    paths, name = locate_checkpoint(checkpoint, root)
    with JournalWriter(paths.journal_of("cli")) as journal:
        report(paths, name, values, by=user_name(), journal=journal)
    shown = {key: value if isfinite(value) else str(value) for key, value in values.items()}
    facts = {"checkpoint": checkpoint_id(paths.name, name), "metrics": shown}
    output.answer(facts, as_json, lambda data: output.say(f"recorded for {data['checkpoint']}"))


def _metrics_in(words: Sequence[str]) -> dict[str, float]:
    """Return the numbers by name. Raises `SpecError` for a name that is there twice."""
    found: dict[str, float] = {}
    for word in words:
        name, value = _metric_in(word)
        if name in found:
            raise SpecError(f"{word!r}: {name} is given twice; expected one value")
        found[name] = value
    return found


def _metric_in(word: str) -> tuple[str, float]:
    """Return the name and the number of an argument such as `accuracy=0.91`."""
    name, equals, text = word.partition("=")
    try:
        value = read_number(text)
    except SpecError:
        raise
    except ValueError:
        equals, value = "", 0.0
    if not equals:
        raise SpecError(f"{word!r}: expected NAME=NUMBER, such as accuracy=0.91")
    return name, value


def _check_options(context: typer.Context, dry_run: bool) -> None:
    """Raise `SpecError` for `--yes` to a question that is not asked."""
    if dry_run:
        refuse_unused(context, "--dry-run deletes nothing and asks nothing", "yes")


def prune(
    context: typer.Context,
    run: RunArgument,
    dry_run: DryRun = False,
    yes: Yes = False,
    keep_last: Annotated[
        int | None,
        typer.Option(
            "--keep-last",
            metavar="N",
            min=1,
            help="This time, keep the N newest instead of what the spec's keep rules say.",
        ),
    ] = None,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Delete the checkpoints that no keep rule, pin or use keeps. Their manifests remain.

    Asks before it deletes, unless --yes is given.
    """
    from holdfast.workers.checkpoints import deletion

    _check_options(context, dry_run)
    paths = locate_run(run, root)
    look_at(paths)
    rules = Keep(last=keep_last) if keep_last else None
    work = partial(deletion.prune, paths, by=user_name(), keep=rules)
    if not (dry_run or yes):
        facts = work(dry_run=True)
        if facts["deleted"]:
            what = f"{counted(len(facts['deleted']), 'checkpoint')} of {facts['run']}"
            confirm("prune", what, as_json, lambda: _render_prune(facts), has_dry_run=True)
    output.answer(work(dry_run=dry_run), as_json, _render_prune)


def delete(
    context: typer.Context,
    run: RunArgument,
    dry_run: DryRun = False,
    yes: Yes = False,
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Delete a run that has ended, with its folder and all its checkpoints.

    Asks before it deletes, unless --yes is given. Copies in a mirror remain.
    """
    from holdfast.workers.runs.run_deletion import delete_run

    _check_options(context, dry_run)
    paths = locate_run(run, root)
    look_at(paths)
    if not (dry_run or yes):
        facts = delete_run(paths, dry_run=True)
        what = f"run {facts['run']} with {counted(facts['checkpoints'], 'checkpoint')}"
        confirm("delete", what, as_json, lambda: _render_delete(facts), has_dry_run=True)
    facts = delete_run(paths, dry_run=dry_run)
    if not dry_run:
        forget(facts["uid"])
    output.answer(facts, as_json, _render_delete)


def verify(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|DIR",
            help="A checkpoint's id (run:step-…, run:latest, run:best) or directory.",
            autocompletion=complete_checkpoint,
        ),
    ],
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Read every byte of a checkpoint and compare it with the manifest.

    If the run saves to the nodes' own disks, the copy in its mirror is read.
    """
    from holdfast.workers.checkpoints import verification

    directory = directory_of(checkpoint, root)
    facts = verification.verify(directory, partial(_damage, show=not as_json))
    try:
        verification.record(directory, facts, by=user_name())
    except (OSError, ForeignFileError) as error:
        output.warn(f"holdfast: the result could not be recorded in the run's journal: {error}")
    output.answer(facts, as_json, _render_verify)
    if not facts["ok"]:
        raise typer.Exit(1)


def export(
    checkpoint: CheckpointArgument,
    to: Annotated[
        ExportFormat,
        typer.Option(
            "--to", help="The format. torch and safetensors write a file, others a folder."
        ),
    ],
    destination: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The file or folder to write. It must not exist. Optional with --push.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="OWNER/NAME",
            help="With --to hf: push the export to this repository of the Hugging Face Hub.",
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: a new repository is private.")
    ] = False,
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
    root: output.RootOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Write a checkpoint as torch, safetensors, Hugging Face or plain DCP files.

    Every byte is compared with the manifest. By default, safetensors and hf contain the weights
    only, and torch and dcp also contain the optimizer. Use --include to choose the keys.
    """
    if push is None and private:
        raise typer.BadParameter("--private: acts only with --push; leave it out")
    if push is not None and to is not ExportFormat.HF:
        raise typer.BadParameter(f"--push and --to {to.value}: the Hub gets --to hf")
    if push is None and destination is None:
        raise typer.BadParameter("--output: expected the file or folder to write, or --push")
    directory = directory_of(checkpoint, root)
    given: dict[str, Any] = {"include": include or (), "rename": rename or (), "dtype": dtype}
    place = destination.expanduser() if destination else None
    if push is not None:
        facts = exports.export_to_hub(
            directory, push, place, private=private, writer="cli", **given
        )
    else:
        assert place is not None
        facts = exports.export(directory, to, place, writer="cli", **given)
    output.answer(facts, as_json, _render_export)


def directory_of(checkpoint: str, root: str | None) -> Path:
    """Return the directory of a checkpoint, given as an id or a path.

    The directory may be a copy outside of any run. Raises `NotFoundError` if it does not exist,
    with the reason if that is known.
    """
    path = plain_checkpoint(checkpoint)
    if has_spec(path):
        raise NotFoundError(
            f"{checkpoint}: the folder of run {path.name}, not a checkpoint; `holdfast checkpoints "
            f"{path}` lists its checkpoints, and {path.name}:latest is the newest one"
        )
    if path.is_dir():
        return path
    from holdfast.workers.checkpoints.verification import directory_to_verify

    return directory_to_verify(*locate_checkpoint(checkpoint, root))


def _damage(directory: Path, manifest: Manifest, *, show: bool) -> list[str]:
    """Return the damaged files. On a terminal, show a progress bar if `show` is set."""
    if not show or not sys.stderr.isatty():
        return find_damage(directory, manifest)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("verify", total=manifest.bytes)
        return find_damage(directory, manifest, progress=lambda count: progress.advance(bar, count))


def _render_prune(facts: dict[str, Any]) -> None:
    verb = "would be deleted" if facts["dry_run"] else "deleted"
    marked = [(one, verb) for one in facts["deleted"]] + [(one, "kept") for one in facts["kept"]]
    marked.sort(key=lambda pair: (pair[0]["step"], pair[0]["checkpoint"]))
    rows = [
        (one["checkpoint"], output.bytes_text(one["bytes"]), what, one["reason"])
        for one, what in marked
    ]
    output.print_table(("checkpoint", "size", "", "reason"), rows)
    output.say(
        f"{len(facts['deleted'])} {verb} ({output.bytes_text(facts['bytes_deleted'])}), "
        f"{len(facts['kept'])} kept ({output.bytes_text(facts['bytes_kept'])})"
    )


def _render_delete(facts: dict[str, Any]) -> None:
    verb = "would be deleted" if facts["dry_run"] else "deleted"
    output.say(
        f"run {facts['run']} {verb}: {facts['directory']}, with "
        f"{counted(facts['checkpoints'], 'checkpoint')} ({output.bytes_text(facts['bytes'])})"
    )
    if facts["mirror"]:
        output.say(f"  the copies in {facts['mirror']} remain")


def _render_verify(facts: dict[str, Any]) -> None:
    if facts["ok"]:
        size = output.bytes_text(facts["bytes"])
        output.say(
            f"{facts['checkpoint']}: {counted(facts['files'], 'file')}, {size}: matches the "
            f"manifest"
        )
        if facts["copy_of"]:
            output.say(f"  a copy of {facts['copy_of']}")
        if facts["mirror"]:
            output.say(f"  also in {facts['mirror']}")
        return
    output.say(f"{facts['checkpoint']}: {word_for(facts['damaged'])}")
    for line in facts["damaged"]:
        output.say(f"  {line}")
    if facts["checkpoint"] != facts["path"]:
        output.say(f"  in {facts['path']}")


def _render_export(facts: dict[str, Any]) -> None:
    output.say(
        f"{facts['checkpoint']} → {facts['path']}: {counted(facts['tensors'], 'tensor')}, "
        f"{output.bytes_text(facts['bytes'])} ({facts['format']})"
    )
