"""The route about the errors of a run: why it failed, merged over all its processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from holdfast.api.access import AS_READER
from holdfast.api.errors.models import RunErrors
from holdfast.api.errors.show import read_errors
from holdfast.api.routes.runs import Number, RunId
from holdfast.api.services import services_of
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
        paths, view = store.folder_of(run), store.show_run(run)
        uid = view["uid"]

        def saved() -> Iterable[Mapping[str, Any]]:
            return store.list_checkpoints(
                uid, CheckpointFilter(), newest_first=True, after=None, limit=PAGE_DEFAULT
            ).items

        events_of = partial(store.newest_events, uid)
        return read_errors(paths, view, events_of, saved, store.secrets(run), attempt=attempt)

    # It reads many files, so few of such requests run at a time.
    async with services.log_turns:
        return await run_in_threadpool(find)
