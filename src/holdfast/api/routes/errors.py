"""The route about the errors of a run: why it failed, merged over all its processes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from holdfast.api.access import AS_READER
from holdfast.api.errors.models import RunErrors
from holdfast.api.errors.records import KINDS
from holdfast.api.errors.show import (
    ErrorSources,
    choose_attempt_of,
    find_errors,
    no_errors,
    versions_in,
)
from holdfast.api.routes.runs import Number, RunId
from holdfast.api.services import services_of
from holdfast.contracts.disk.journal import EventKind
from holdfast.lineage.queries.cursors import PAGE_DEFAULT
from holdfast.lineage.queries.pages import CheckpointFilter

router = APIRouter(prefix="/runs/{run}/errors", tags=["runs"], dependencies=[AS_READER])


@router.get("")
async def show_errors(request: Request, run: RunId, attempt: Number = None) -> RunErrors:
    """Return why an attempt failed, by default the newest that has errors.

    The errors of all ranks, of the agents, of torchrun and of the journals are in one order, with
    equal ones as one entry and the first cause of each launch marked. The stacks and flight
    records of hung ranks are grouped by equal stack, and what differs from the last launch that
    worked is listed. Secrets are masked.
    """
    services = services_of(request)

    def find() -> RunErrors:
        store = services.store
        paths, view, secrets = store.folder_of(run), store.show_run(run), store.secrets(run)
        uid = view["uid"]
        ended = store.newest_events(uid, (EventKind.LAUNCH_ENDED,))
        known, number = choose_attempt_of(view, ended, attempt)
        if number is None:
            return no_errors(paths.name)
        committed = store.newest_events(uid, (EventKind.COMMITTED,))
        saved = store.list_checkpoints(
            uid, CheckpointFilter(), newest_first=True, after=None, limit=PAGE_DEFAULT
        )
        sources = ErrorSources(
            view=view,
            known=known,
            attempt=number,
            events=store.newest_events(uid, KINDS, number),
            resumed=store.newest_events(uid, (EventKind.RESUMED,)),
            committed=[str(event.data.get("checkpoint")) for event in committed],
            versions=versions_in(saved.items),
        )
        return find_errors(paths, sources, secrets)

    # It reads many files, so few of such requests run at a time.
    async with services.log_turns:
        return await run_in_threadpool(find)
