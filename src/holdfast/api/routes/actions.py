"""Routes for operator actions on a run. They call the same functions as the command line."""

from __future__ import annotations

from fastapi import APIRouter, Request

from holdfast.api import audit, schemas, watch
from holdfast.api.access import AS_READER, Caller, Operator
from holdfast.api.routes.runs import RunId
from holdfast.api.services import services_of
from holdfast.contracts.disk.paths import RunPaths, checkpoint_id
from holdfast.contracts.records.annotations import annotate as change_annotation
from holdfast.contracts.records.history import load_history
from holdfast.lineage.queries.views import iso
from holdfast.workers.checkpoints import deletion
from holdfast.workers.runs import operator
from holdfast.workers.runs.operator import Action
from holdfast.workers.runs.reconcile import reconcile

router = APIRouter(tags=["actions"], dependencies=[AS_READER])


@router.post("/runs/{run}/relaunch")
def relaunch(
    request: Request, run: RunId, body: schemas.AskRelaunch, caller: Operator
) -> schemas.ActionDone:
    """Relaunch a run in a new attempt, with `gpus` GPUs if given. A live run checkpoints first."""
    return _ask(request, run, "relaunch", body, caller, gpus=body.gpus)


@router.post("/runs/{run}/stop")
def stop(request: Request, run: RunId, body: schemas.Ask, caller: Operator) -> schemas.ActionDone:
    """Stop a run after a last checkpoint. `relaunch` continues it."""
    return _ask(request, run, "stop", body, caller)


@router.post("/runs/{run}/pause")
def pause(request: Request, run: RunId, body: schemas.Ask, caller: Operator) -> schemas.ActionDone:
    """Pause a run: it commits a last checkpoint and releases its GPUs until `resume`."""
    return _ask(request, run, "pause", body, caller)


@router.post("/runs/{run}/resume")
def resume(request: Request, run: RunId, body: schemas.Ask, caller: Operator) -> schemas.ActionDone:
    """Continue a paused run."""
    return _ask(request, run, "resume", body, caller)


@router.post("/runs/{run}/cancel")
def cancel(
    request: Request, run: RunId, body: schemas.AskCancel, caller: Operator
) -> schemas.ActionDone:
    """Cancel a run after a last checkpoint, or with `now` without one."""
    return _ask(request, run, "cancel", body, caller, now=body.now)


@router.post("/runs/{run}/annotate")
def annotate(
    request: Request, run: RunId, body: schemas.AskAnnotate, caller: Operator
) -> schemas.AnnotationDone:
    """Change the tags and the note of a run, which may have ended."""
    return annotate_part(request, services_of(request).store.folder_of(run), None, body, caller)


def annotate_part(
    request: Request,
    paths: RunPaths,
    checkpoint: str | None,
    body: schemas.AskAnnotate,
    caller: Caller,
) -> schemas.AnnotationDone:
    """Change the tags and the note of a run, or of one of its checkpoints."""
    with audit.audited(paths, "annotate", caller, checkpoint=checkpoint):
        done = change_annotation(
            paths,
            checkpoint,
            add=body.add,
            remove=body.remove,
            # An empty note that was given removes the former one.
            note=body.note if "note" in body.model_fields_set else None,
            by=caller.name,
            via=watch.WRITER,
        )
    services_of(request).watch.touch(paths)
    identity = checkpoint and checkpoint_id(paths.name, checkpoint)
    facts = {**done.facts, "note_at": iso(done.facts["note_at"])}
    return schemas.AnnotationDone(run=paths.name, checkpoint=identity, **facts)


@router.post("/runs/{run}/prune")
def prune(request: Request, run: RunId, body: schemas.AskPrune, caller: Operator) -> schemas.Prune:
    """Delete the checkpoints that no rule, pin or use keeps, or only list them (`dry_run`)."""
    services = services_of(request)
    paths = services.store.folder_of(run)
    # First, so that the action is judged by what has happened, not by what the index knows.
    reconcile(paths, writer=watch.WRITER)
    with audit.audited(paths, "prune", caller, dry_run=body.dry_run):
        facts = deletion.prune(paths, by=caller.name, writer=watch.WRITER, dry_run=body.dry_run)
    services.watch.touch(paths)
    return schemas.Prune.model_validate(facts)


@router.get("/jobs/{job}")
def show_job(request: Request, job: str) -> schemas.JobRow:
    """Return the state of a background job."""
    return schemas.JobRow.model_validate(vars(services_of(request).jobs.find(job)))


def _ask(
    request: Request,
    run: str,
    action: Action,
    body: schemas.Ask,
    caller: Caller,
    *,
    gpus: int | None = None,
    now: bool = False,
) -> schemas.ActionDone:
    services = services_of(request)
    paths = services.store.folder_of(run)
    reconcile(paths, writer=watch.WRITER)
    continues = action in {"relaunch", "resume"}
    with audit.audited(paths, action, caller, gpus=gpus, force=body.force):
        if continues:
            # Before the request is recorded: an order that cannot be carried out would stay
            # pending.
            services.check(paths)
        message = operator.request(
            paths,
            action,
            by=caller.name,
            gpus=gpus,
            writer=watch.WRITER,
            alone=not body.force,
            now=now,
        )
        # After the order, which the supervisor that starts here must find.
        started = dict(services.start(paths, continues))
    services.watch.touch(paths)
    state = str(load_history(paths).state)
    return schemas.ActionDone.model_validate(
        {**started, "run": paths.name, "action": action, "gpus": gpus, "message": message}
        | {"state": state}
    )
