"""The ranks' log files, read in parts of bounded size and never outside the attempt's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any, BinaryIO, Final, Literal

from holdfast.api.schemas import LogFile, LogPart
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.disk.rank_logs import RankLog, rank_logs
from holdfast.contracts.errors import NotFoundError
from holdfast.contracts.redaction import read_masked

PART_BYTES_MAX: Final = 1024 * 1024
FILES_MAX: Final = 20_000
Stream = Literal["stdout", "stderr"]


def list_logs(attempt: AttemptPaths) -> list[LogFile]:
    """Return the log files of all ranks, sorted by rank, launch and stream."""
    found = islice(rank_logs(attempt, on_skip=_ignore), FILES_MAX)
    return [
        LogFile(
            attempt=attempt.number,
            node=one.node,
            launch=one.launch,
            rank=one.rank,
            stream=one.stream,
            bytes=one.bytes,
        )
        for one in sorted(found, key=lambda one: (one.rank, one.launch, one.stream))
    ]


def read_log(
    paths: RunPaths,
    attempt: AttemptPaths,
    rank: int,
    *,
    stream: Stream,
    launch: int | None,
    offset: int | None,
    before: int | None = None,
    limit: int,
    secrets: Sequence[str] = (),
) -> LogPart:
    """Return up to `limit` bytes of a rank's log from `offset`, or the end of the log.

    With `before`, the part ends at that byte, which is the `offset` of another part. Without
    `launch`, the newest launch is read. Without `offset`, a part begins with a complete line if
    one fits. A part ends with a complete line if possible, and always
    with a complete character. Secrets are masked by the same number of bytes. Raises
    `NotFoundError` if there is no such log.
    """
    log = _newest_log(paths, attempt, rank, stream, launch)
    with log.open() as file:
        part = read_part(file, offset=offset, before=before, limit=limit, secrets=secrets)
    return LogPart(
        run=paths.name,
        attempt=attempt.number,
        rank=rank,
        stream=stream,
        launch=log.launch,
        ended=attempt.outcome.exists(),
        **part,
    )


def read_part(
    file: BinaryIO,
    *,
    offset: int | None,
    before: int | None,
    limit: int,
    secrets: Sequence[str],
) -> dict[str, Any]:
    """Return a part of an open log, as `read_log` describes it, and the size of the log."""
    size = os.fstat(file.fileno()).st_size
    end = size if before is None else min(before, size)
    start = max(0, end - limit) if offset is None else min(offset, end)
    # Masked in the file's bytes before anything is cut, or a part could begin inside a secret.
    content = read_masked(file, start, min(limit, end - start), secrets)
    if offset is None and start:
        # Begin with a complete line. A part of one that is longer is better than nothing.
        cut = content.find(b"\n") + 1
        if cut < len(content):
            start, content = start + cut, content[cut:]
    content = _whole(content, is_end=start + len(content) >= end)
    return {
        "offset": start,
        "next_offset": start + len(content),
        "bytes": size,
        "text": content.decode(errors="replace"),
    }


def _newest_log(
    paths: RunPaths, attempt: AttemptPaths, rank: int, stream: Stream, launch: int | None
) -> RankLog:
    found = [
        one
        for one in rank_logs(attempt, rank, on_skip=_ignore)
        if one.stream == stream and launch in {None, one.launch}
    ]
    if not found:
        raise NotFoundError(
            f"rank {rank} of attempt {attempt.number} of run {paths.name} has no {stream}"
            + (f" in launch {launch}" if launch is not None else "")
        )
    return max(found, key=lambda one: one.launch)


def _whole(content: bytes, *, is_end: bool) -> bytes:
    """Return `content` without an incomplete last line or character."""
    line = content.rfind(b"\n") + 1
    if not is_end and line:
        return content[:line]
    # A character may be cut in the middle. The next part begins with it.
    for back in range(1, min(4, len(content)) + 1):
        lead = content[-back]
        if lead & 0xC0 == 0x80:
            continue
        wanted = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
        return content[:-back] if wanted > back and len(content) > back else content
    return content


def _ignore(_: Exception) -> None:
    """Leave out what is not a log: pipes, devices, links out of the attempt."""
