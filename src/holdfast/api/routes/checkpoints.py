"""Routes about one checkpoint: its details, its ancestors and the operator actions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, cast

import orjson
from fastapi import APIRouter, Path, Request, Response
from isal import isal_zlib

from holdfast.api import audit, schemas, watch
from holdfast.api.access import AS_READER, Operator
from holdfast.api.jobs import Job
from holdfast.api.problems import LOG, Refusal
from holdfast.api.routes.actions import annotate_part
from holdfast.api.services import Services, services_of
from holdfast.contracts.disk import damage, digests, mirrors
from holdfast.contracts.disk.journal import JournalWriter
from holdfast.contracts.disk.manifest import Manifest, read_manifest
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import DamagedCheckpointError, SpecError
from holdfast.contracts.records import reported
from holdfast.contracts.records.known_damage import refuse_damaged
from holdfast.contracts.spec.checkpoint import Keep
from holdfast.contracts.spec.sections import Cost
from holdfast.lineage.queries import reports
from holdfast.workers.checkpoints import exports, verification
from holdfast.workers.runs import operator

CheckpointId = Annotated[
    str,
    Path(
        max_length=250,
        description="The checkpoint's id: `<run>:` and its directory, `latest`, `best` or `step-N`",
    ),
]
# The spec keys that a fork over HTTP may change: sizes, times and rules. Programs, paths and
# addresses can be changed only by `holdfast fork --set`, which needs access to the files.
_FORK_CHANGES = {
    "resources": ("nodes", "gpus_per_node", "time_limit_min"),
    "elastic": ("min_gpus", "max_gpus"),
    "checkpoint": ("interval", "budget"),
    "checkpoint.keep": tuple(set(Keep.model_fields) - {"best"}),
    "cost": tuple(Cost.model_fields),
}
FORK_KEYS = frozenset(f"{part}.{key}" for part, keys in _FORK_CHANGES.items() for key in keys)

router = APIRouter(prefix="/checkpoints", tags=["checkpoints"], dependencies=[AS_READER])


@router.get("/{checkpoint}")
def show_checkpoint(request: Request, checkpoint: CheckpointId) -> schemas.CheckpointDetail:
    """Return a checkpoint: shards, digests, topology, and the commands that continue from it."""
    row = services_of(request).store.show_checkpoint(checkpoint)
    # The path of the row and not one of the client's.
    directory = FilePath(row["path"])
    manifest = _manifest(directory)
    record = mirrors.read_record(directory)
    more: dict[str, Any] = {
        "on_disk": directory.is_dir(),
        "mirror": record.url if record else None,
        "has_mirror": services_of(request).store.has_mirror(checkpoint),
        "manifest": manifest.model_dump(mode="json", exclude={"files"}) if manifest else None,
        "manifest_files": services_of(request).store.list_files(checkpoint),
        "consumers": services_of(request).store.consumers_of(checkpoint),
        "commands": {
            "fork": f"holdfast fork {row['id']} --name NAME",
            "verify": f"holdfast verify {row['id']}",
            "load": f'holdfast.trainer.load_checkpoint("{row["path"]}")',
        },
    }
    return cast(schemas.CheckpointDetail, {**row, **more})


@router.get("/{checkpoint}/ancestry", response_model=list[reports.Ancestor])
def show_ancestry(request: Request, checkpoint: CheckpointId) -> Response:
    """List a checkpoint and all its ancestors, across forks, newest first."""
    return long_answer(request, services_of(request).store.ancestry(checkpoint))


@router.post("/{checkpoint}/pin")
def pin(
    request: Request, checkpoint: CheckpointId, body: schemas.AskPin, caller: Operator
) -> schemas.Pinned:
    """Pin a checkpoint: it is kept whatever the keep rules say."""
    services = services_of(request)
    paths, name = _on_disk(services, checkpoint)
    with audit.audited(paths, "pin", caller, checkpoint=name):
        identity = operator.pin(paths, name, by=caller.name, note=body.note, writer=watch.WRITER)
    services.watch.touch(paths)
    return schemas.Pinned(checkpoint=identity, pinned=True)


@router.post("/{checkpoint}/unpin")
def unpin(
    request: Request, checkpoint: CheckpointId, _: schemas.Empty, caller: Operator
) -> schemas.Pinned:
    """Unpin a checkpoint: the keep rules apply to it again."""
    services = services_of(request)
    paths, name = _on_disk(services, checkpoint)
    with audit.audited(paths, "unpin", caller, checkpoint=name):
        identity = operator.unpin(paths, name, by=caller.name, writer=watch.WRITER)
    services.watch.touch(paths)
    return schemas.Pinned(checkpoint=identity, pinned=False)


@router.post("/{checkpoint}/annotate")
def annotate(
    request: Request, checkpoint: CheckpointId, body: schemas.AskAnnotate, caller: Operator
) -> schemas.AnnotationDone:
    """Change the tags and the note of a committed checkpoint."""
    return annotate_part(request, *_on_disk(services_of(request), checkpoint), body, caller)


@router.post("/{checkpoint}/metrics")
def report_metrics(
    request: Request, checkpoint: CheckpointId, body: schemas.AskMetrics, caller: Operator
) -> schemas.Reported:
    """Record metrics of a committed checkpoint, such as the results of an evaluation."""
    services = services_of(request)
    paths, name = _on_disk(services, checkpoint)
    values = reported.require_metrics(body.metrics)
    with (
        audit.audited(paths, "metric", caller, checkpoint=name),
        JournalWriter(paths.journal_of(watch.WRITER)) as journal,
    ):
        reported.report(paths, name, values, by=caller.name, journal=journal)
    services.watch.touch(paths)
    return schemas.Reported(checkpoint=f"{paths.name}:{name}", metrics=body.metrics)


@router.post("/{checkpoint}/verify", status_code=202)
def verify(
    request: Request, checkpoint: CheckpointId, _: schemas.Empty, caller: Operator
) -> schemas.JobRow:
    """Start a job that reads every byte of a checkpoint and compares it with its manifest."""
    services = services_of(request)
    paths, name = _on_disk(services, checkpoint)
    directory = verification.directory_to_verify(paths, name)
    manifest = _manifest(directory)
    job = Job(
        kind="verify",
        about=f"{paths.name}:{name}",
        by=caller.name,
        total_bytes=manifest.bytes if manifest else None,
    )
    with audit.audited(paths, "verify", caller, checkpoint=name):
        started = services.jobs.start(job, lambda advance: _verify(directory, caller.name, advance))
    return schemas.JobRow.model_validate(vars(started))


@router.post("/{checkpoint}/export", status_code=202)
def export(
    request: Request, checkpoint: CheckpointId, body: schemas.AskExport, caller: Operator
) -> schemas.JobRow:
    """Start a job that exports a checkpoint into the `exports` folder of its run."""
    services = services_of(request)
    paths, name = _on_disk(services, checkpoint)
    # A spec's interpreter would run as the server's user, and links could direct its writes.
    _refuse_foreign(paths, "export it with `holdfast export --output` as a user who can read it")
    directory = verification.directory_to_verify(paths, name)
    refuse_damaged(paths, name, "export it")
    output = paths.exports / export_name(name, body)
    about = f"{paths.name}:{name} as {output.name}"
    with audit.audited(paths, "export", caller, checkpoint=name, output=output.name):
        started = services.jobs.start(
            Job(kind="export", about=about, by=caller.name),
            lambda advance: _export(directory, output, body, advance),
        )
    return schemas.JobRow.model_validate(vars(started))


@router.post("/{checkpoint}/fork", status_code=201)
def fork(
    request: Request, checkpoint: CheckpointId, body: schemas.AskFork, caller: Operator
) -> schemas.Forked:
    """Start a new run, under another name, from a committed checkpoint."""
    services = services_of(request)
    # A program or a path from a request would run anything as the server's user.
    refused = sorted(body.set.keys() - FORK_KEYS)
    if refused:
        raise SpecError(
            f"{', '.join(refused)}: cannot be changed over HTTP; expected "
            f"{', '.join(sorted(FORK_KEYS))}; use `holdfast fork --set` for other keys"
        )
    paths, name = _on_disk(services, checkpoint)
    _refuse_foreign(paths, "check its spec, then use `holdfast fork`, which runs it as your user")
    overrides = [f"{key}={_text(value)}" for key, value in body.set.items()]
    with audit.audited(paths, "fork", caller, checkpoint=name, into=body.name):
        facts = services.fork(paths, name, body.name, overrides, caller.name)
    services.watch.touch(paths)
    return schemas.Forked.model_validate({**facts, "forked_from": f"{paths.name}:{name}"})


def export_name(checkpoint: str, body: schemas.AskExport) -> str:
    """Return the name of an export. Each selection of keys has its own export."""
    kind = f"-{body.dtype}" if body.dtype else ""
    kind += f"-{digests.document_digest(sorted(body.include))[:8]}" if body.include else ""
    # A digest of the keys, because their names are too long for a file name.
    return f"{checkpoint}{kind}{exports.SUFFIXES[body.to]}"


def _verify(directory: FilePath, by: str, advance: Callable[[int], None]) -> dict[str, Any]:
    """Verify a checkpoint, and record the result in the run's journal if it is writable."""
    facts = verification.verify(
        directory, lambda where, what: damage.find_damage(where, what, progress=advance)
    )
    try:
        verification.record(directory, facts, by=by, writer=watch.WRITER)
    except OSError as error:
        LOG.warning("%s: the result of the verification was not recorded: %s", directory, error)
    return facts


def _export(
    directory: FilePath, output: FilePath, body: schemas.AskExport, advance: Callable[[int], None]
) -> dict[str, Any]:
    return exports.export(
        directory,
        body.to,
        output,
        writer=watch.WRITER,
        include=body.include,
        dtype=body.dtype,
        look=lambda: advance(0),
    )


def _refuse_foreign(paths: RunPaths, instead: str) -> None:
    """Raise `SpecError` if the run belongs to another user than the server's.

    Its spec would otherwise run as the server's user, and its symbolic links could direct where
    the server writes.
    """
    if not paths.is_mine():
        raise SpecError(
            f"run {paths.name} belongs to another user than the one this server runs as; {instead}"
        )


def _on_disk(services: Services, checkpoint: str) -> tuple[RunPaths, str]:
    run, name = services.store.find_checkpoint(checkpoint)
    return services.store.folder_of(run.uid), name


def _manifest(directory: FilePath) -> Manifest | None:
    """Return the checkpoint's manifest, or None if it is missing or damaged."""
    try:
        return read_manifest(directory)
    except (DamagedCheckpointError, OSError):
        return None


def _text(value: object) -> str:
    """Return a value in the form that `--set` takes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    if "\n" in text or "\0" in text:
        raise Refusal(422, "a value in `set` has more than one line or a NUL; expected one line")
    return text


# Smaller output than zlib's fastest level, in a fifth of the time.
LEVEL: Final = 1
_GZIP: Final = 16 + isal_zlib.MAX_WBITS


def long_answer(request: Request, value: Any) -> Response:
    """Return `value` as a JSON response without validation: it must already match its model."""
    # Without FastAPI's validation and encoding, which take longer than the query for such results.
    content = orjson.dumps(value)
    headers = {}
    if "gzip" in request.headers.get("accept-encoding", ""):
        content = isal_zlib.compress(content, LEVEL, _GZIP)
        headers = {"content-encoding": "gzip", "vary": "Accept-Encoding"}
    return Response(content, media_type="application/json", headers=headers)
