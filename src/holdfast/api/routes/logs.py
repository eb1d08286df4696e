"""Routes about all log files of a run: the list, parts of a file, search and download."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, BinaryIO, Final

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from holdfast.api.access import AS_READER
from holdfast.api.logs import files, parts
from holdfast.api.logs.search import (
    MATCHES_MAX,
    TEXT_CHARACTERS_MAX,
    LineTest,
    Where,
    search_logs,
)
from holdfast.api.routes import runs
from holdfast.api.schemas import LogKind, LogSearch, RunLog, RunLogPart
from holdfast.api.services import services_of
from holdfast.contracts.disk.rank_logs import choose_attempt
from holdfast.contracts.errors import QueryError
from holdfast.contracts.redaction import read_masked

CHUNK_BYTES: Final = 256 * 1024

File = Annotated[
    str, Query(max_length=files.NAME_CHARACTERS_MAX, description="The path in the run's folder")
]

router = APIRouter(prefix="/runs/{run}/log-files", tags=["runs"], dependencies=[AS_READER])


@router.get("")
def list_log_files(request: Request, run: runs.RunId, attempt: runs.Number = None) -> list[RunLog]:
    """List the log files of an attempt, by default the newest, and the supervisor's.

    They are those of ranks, torchrun, agents and flushers.
    """
    paths = services_of(request).store.folder_of(run)
    has_attempt = attempt is not None or paths.attempt_numbers()
    return files.list_files(paths, choose_attempt(paths, attempt) if has_attempt else None)


@router.get("/part")
def show_log_part(
    request: Request,
    run: runs.RunId,
    file: File,
    offset: runs.FirstByte = None,
    before: runs.EndByte = None,
    limit: runs.PartBytes = runs.PART_BYTES,
) -> RunLogPart:
    """Return a part of a log file. To follow it, repeat with `offset` = `next_offset`."""
    store = services_of(request).store
    paths, secrets = store.folder_of(run), store.secrets(run)
    name, log = files.find_log(paths, file)
    # Read first: an outcome that is there before the last part does not complete the log.
    ended = name.attempt is not None and paths.attempt(name.attempt).outcome.exists()
    with log:
        part = parts.read_part(log, offset=offset, before=before, limit=limit, secrets=secrets)
    return RunLogPart(run=paths.name, file=name.name, ended=ended, **part)


@router.get("/search")
async def search_log_files(
    request: Request,
    run: runs.RunId,
    text: Annotated[
        str,
        Query(
            max_length=TEXT_CHARACTERS_MAX,
            pattern=r"^[^\x00\r\n]*$",
            description="Text of the line; upper and lower case are equal for A to Z",
        ),
    ] = "",
    errors: Annotated[
        bool, Query(description="Find errors, such as tracebacks, instead of a text")
    ] = False,
    attempt: runs.Number = None,
    kind: Annotated[list[LogKind] | None, Query(description="Any of these kinds")] = None,
    rank: Annotated[int | None, Query(ge=0, le=10_000_000)] = None,
    file: Annotated[
        str | None, Query(max_length=files.NAME_CHARACTERS_MAX, description="Only this file")
    ] = None,
    after: runs.After = None,
    limit: Annotated[
        int, Query(ge=1, le=MATCHES_MAX, description="The largest number of lines")
    ] = 100,
) -> LogSearch:
    """Find lines in the log files of all attempts, newest attempt first.

    A request searches for half a second at most. Repeat it with `after` = `next` until that is
    null; an answer without lines does not mean that none follows. Secrets cannot be found.
    """
    if bool(text) is errors:
        raise QueryError("text or errors is needed, and not both of them")
    services = services_of(request)
    where = Where(attempt=attempt, kinds=tuple(kind or ()), rank=rank, file=file)

    def search() -> LogSearch:
        paths, secrets = services.store.folder_of(run), services.store.secrets(run)
        if file is not None:
            files.find_log(paths, file)[1].close()
        if attempt is not None:
            choose_attempt(paths, attempt)
        return search_logs(paths, LineTest(text), where, after=after, limit=limit, secrets=secrets)

    async with services.log_turns:
        return await run_in_threadpool(search)


@router.get(
    "/download",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/plain": {}}}},
)
async def download_log_file(request: Request, run: runs.RunId, file: File) -> StreamingResponse:
    """Return a whole log file, as it is now, as a download. Secrets are masked."""
    services = services_of(request)

    def find() -> tuple[str, BinaryIO, Sequence[str]]:
        paths = services.store.folder_of(run)
        name, log = files.find_log(paths, file)
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", f"{paths.name}-{name.name}")
        return plain, log, services.store.secrets(run)

    name, log, secrets = await run_in_threadpool(find)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(
        _chunks(log, secrets, services.log_turns),
        media_type="text/plain; charset=utf-8",
        headers=headers,
    )


async def _chunks(
    log: BinaryIO, secrets: Sequence[str], turns: asyncio.Semaphore
) -> AsyncIterator[bytes]:
    """Yield a file in masked chunks, with a pause after each one for other requests."""
    with log:
        size, at = os.fstat(log.fileno()).st_size, 0
        while at < size:
            async with turns:
                began = time.monotonic()
                wanted = min(CHUNK_BYTES, size - at)
                chunk = await run_in_threadpool(read_masked, log, at, wanted, secrets)
                took = time.monotonic() - began
            if not chunk:
                return
            at += len(chunk)
            yield chunk
            await asyncio.sleep(took)
