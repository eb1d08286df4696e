"""`holdfast pin|unpin|prune|verify`: what is kept, and whether it is whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from holdfast.cli.index import locate_checkpoint, locate_run, look_at, user_name
from holdfast.cli.output import AsJson, RootOption, answer, bytes_text, print_table
from holdfast.contracts.attempt import RunRecord, read_document
from holdfast.contracts.errors import DamagedCheckpointError, NotFoundError
from holdfast.contracts.leases import reading
from holdfast.contracts.manifest import Manifest, find_damage, read_manifest
from holdfast.contracts.mirrors import read_record
from holdfast.contracts.paths import RunPaths, checkpoint_id

# A checkpoint in a mirror is read whole, over whatever lies in between.
MIRROR_TIMEOUT_S: Final = 6 * 3600.0
OVERTAKEN: Final = "a reader or a pin came in between, or another process deletes it"

if TYPE_CHECKING:
    from holdfast.workers.retention import Verdict

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="The checkpoint's id (run:step-…) or path.")
]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `app`."""
    for command in (pin, unpin, prune, verify):
        app.command()(command)


def pin(
    checkpoint: CheckpointArgument,
    note: Annotated[str, typer.Option("--note", help="Why, for the records.")] = "",
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Keep a checkpoint whatever the rules say."""
    from holdfast.workers import operator

    paths, name = locate_checkpoint(checkpoint, root)
    operator.pin(paths, name, by=user_name(), note=note)
    facts = {"checkpoint": checkpoint_id(paths.name, name), "pinned": True}
    answer(facts, as_json, lambda data: typer.echo(f"pinned {data['checkpoint']}"))


def unpin(checkpoint: CheckpointArgument, root: RootOption = None, as_json: AsJson = False) -> None:
    """Leave a checkpoint to the rules again."""
    from holdfast.workers import operator

    paths, name = locate_checkpoint(checkpoint, root)
    operator.unpin(paths, name, by=user_name())
    facts = {"checkpoint": checkpoint_id(paths.name, name), "pinned": False}
    answer(facts, as_json, lambda data: typer.echo(f"unpinned {data['checkpoint']}"))


def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name, folder or uid.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go; delete nothing.")
    ] = False,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Delete the checkpoints that no rule, pin or use keeps; their manifests stay."""
    from holdfast.workers import deletion, retention

    paths = locate_run(run, root)
    look_at(paths)
    plan = retention.plan_run(paths)
    gone = {one.name for one in plan if not one.is_kept}
    if not dry_run:
        gone = {one.name for one in deletion.apply(paths, by=user_name(), writer="cli")}
    deleted = [_verdict_facts(one, one.reason) for one in plan if one.name in gone]
    kept = [
        _verdict_facts(one, one.reason if one.is_kept else OVERTAKEN)
        for one in plan
        if one.name not in gone
    ]
    facts: dict[str, Any] = {
        "run": paths.name,
        "dry_run": dry_run,
        "deleted": deleted,
        "kept": kept,
        "bytes_deleted": sum(one["bytes"] for one in deleted),
        "bytes_kept": sum(one["bytes"] for one in kept),
    }
    answer(facts, as_json, _render_prune)


def verify(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|DIR", help="A checkpoint's id or its directory.")
    ],
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of a checkpoint and compare it with what was committed.

    Where the run's files went to the nodes' own disks, the copy in its mirror is read.
    """
    directory = _directory_of(checkpoint, root)
    record = read_record(directory)
    damaged: list[str] = []
    manifest: Manifest | None = None
    try:
        with reading(directory):
            manifest = read_manifest(directory)
            if manifest is None:
                damaged = ["manifest.json: missing: the checkpoint was never committed"]
            elif record is not None and _is_elsewhere(directory, manifest):
                damaged = _damage_in_mirror(record.url, manifest)
            else:
                damaged = _strangeness(directory, manifest)
                damaged += _damage(directory, manifest, show=not as_json)
    except DamagedCheckpointError as error:
        damaged = list(error.damaged)
    except OSError as error:
        damaged = [f"manifest.json: cannot be read: {error.strerror}"]
    facts: dict[str, Any] = {
        "ok": not damaged,
        "checkpoint": manifest.id if manifest else directory.name,
        "path": str(directory),
        "mirror": record.url if record else None,
        "files": len(manifest.files) if manifest else 0,
        "bytes": manifest.bytes if manifest else 0,
        "damaged": damaged,
    }
    answer(facts, as_json, _render_verify)
    if damaged:
        raise typer.Exit(1)


def _strangeness(directory: Path, manifest: Manifest) -> list[str]:
    """A line when the directory lies in a run and its manifest was written for another one."""
    record = read_document(RunRecord, RunPaths(directory.parent.parent).spec)
    if record is None or record.uid == manifest.run_uid:
        return []
    return [f"manifest.json: of another run, {manifest.run}; this one is {record.run}"]


def _directory_of(checkpoint: str, root: str | None) -> Path:
    """The directory meant; any that exists will do, for copies lie outside of runs."""
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path.resolve()
    paths, name = locate_checkpoint(checkpoint, root)
    directory = paths.checkpoint(name)
    if directory.is_dir():
        return directory
    if paths.tombstone(name).is_file():
        raise NotFoundError(
            f"{checkpoint}: deleted; {paths.tombstone(name)} is the manifest it had, and "
            f"`holdfast checkpoints {paths.name}` says why"
        )
    raise NotFoundError(
        f"{checkpoint}: no such directory ({directory}); `holdfast checkpoints {paths.name}` "
        "lists those there are"
    )


def _is_elsewhere(directory: Path, manifest: Manifest) -> bool:
    """True when nothing but the manifest is here: the files are on nodes and in the mirror."""
    return not any((directory / entry.path).exists() for entry in manifest.files)


def _damage_in_mirror(location: str, manifest: Manifest) -> list[str]:
    """The damaged files of the copy; raises `MirrorError` when the mirror cannot be asked."""
    from holdfast.workers import mirrors

    answer = mirrors.ask(location, "verify", manifest.name, timeout_s=MIRROR_TIMEOUT_S)
    return [f"in the mirror: {line}" for line in answer["damaged"]]


def _damage(directory: Path, manifest: Manifest, *, show: bool) -> list[str]:
    """The damaged files; reading gigabytes takes a while, so a person is shown how far it is."""
    if not show or not sys.stderr.isatty():
        return find_damage(directory, manifest)
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("verify", total=manifest.bytes)
        return find_damage(directory, manifest, progress=lambda count: progress.advance(bar, count))


def _verdict_facts(verdict: Verdict, reason: str) -> dict[str, Any]:
    return {
        "checkpoint": verdict.name,
        "step": verdict.step,
        "bytes": verdict.bytes,
        "reason": reason,
    }


def _render_prune(facts: dict[str, Any]) -> None:
    verb = "would be deleted" if facts["dry_run"] else "deleted"
    marked = [(one, verb) for one in facts["deleted"]] + [(one, "kept") for one in facts["kept"]]
    marked.sort(key=lambda pair: (pair[0]["step"], pair[0]["checkpoint"]))
    rows = [
        (one["checkpoint"], bytes_text(one["bytes"]), what, one["reason"]) for one, what in marked
    ]
    print_table(("checkpoint", "size", "", "reason"), rows)
    typer.echo(
        f"{len(facts['deleted'])} {verb} ({bytes_text(facts['bytes_deleted'])}), "
        f"{len(facts['kept'])} kept ({bytes_text(facts['bytes_kept'])})"
    )


def _render_verify(facts: dict[str, Any]) -> None:
    if facts["ok"]:
        size = bytes_text(facts["bytes"])
        typer.echo(f"{facts['checkpoint']}: {facts['files']} files, {size}: as committed")
        if facts["mirror"]:
            typer.echo(f"  also in {facts['mirror']}")
        return
    typer.echo(f"{facts['checkpoint']}: damaged")
    for line in facts["damaged"]:
        typer.echo(f"  {line}")
