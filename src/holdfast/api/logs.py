"""The output of ranks, by stretches: never more than asked for, never outside of the run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from holdfast.api.schemas import LogFile, LogPart
from holdfast.contracts.errors import ForeignFileError, NotFoundError
from holdfast.contracts.paths import AttemptPaths, RunPaths
from holdfast.contracts.reading import open_regular
from holdfast.contracts.redaction import read_masked

STRETCH_BYTES_MAX: Final = 1024 * 1024
FILES_MAX: Final = 20_000
Stream = Literal["stdout", "stderr"]
_FILE = re.compile(r"node-(\d{1,9})/i(\d{1,9})/rank-(\d{1,9})\.(stdout|stderr)\.log")


def choose_attempt(paths: RunPaths, number: int | None) -> AttemptPaths:
    """The attempt of that number, or the last one. Raises `NotFoundError`."""
    there = paths.list_attempts()
    chosen = [one for one in there if number in {None, one.number}]
    if not chosen:
        which = (
            f"no attempt {number}; the last is {there[-1].number}" if there else "no attempt yet"
        )
        raise NotFoundError(f"run {paths.name} has {which}")
    return chosen[-1]


def list_logs(attempt: AttemptPaths) -> list[LogFile]:
    """Every rank's files, in order of rank, launch and stream."""
    found = []
    for path in attempt.logs.glob("node-*/i*/rank-*.log"):
        match = _FILE.fullmatch(path.relative_to(attempt.logs).as_posix())
        size = _size(path, attempt) if match else None
        if match and size is not None:
            found.append(
                LogFile(
                    attempt=attempt.number,
                    node=f"node-{match[1]}",
                    launch=int(match[2]),
                    rank=int(match[3]),
                    stream=match[4],
                    bytes=size,
                )
            )
            if len(found) == FILES_MAX:
                break
    return sorted(found, key=lambda one: (one.rank, one.launch, one.stream))


def read_log(
    paths: RunPaths,
    attempt: AttemptPaths,
    rank: int,
    *,
    stream: Stream,
    launch: int | None,
    offset: int | None,
    limit: int,
    secrets: Sequence[str] = (),
) -> LogPart:
    """`limit` bytes of a rank's output from `offset` on, or the last ones without an offset.

    Of the newest launch unless one is given. A stretch ends with a whole line where it can,
    and always with a whole character. Secrets are masked, by as many bytes. Raises
    `NotFoundError` when the rank wrote nothing there.
    """
    wanted = f"node-*/l{launch:02d}" if launch is not None else "node-*/i*"
    found = [
        path
        for path in attempt.logs.glob(f"{wanted}/rank-{rank:05d}.{stream}.log")
        if _FILE.fullmatch(path.relative_to(attempt.logs).as_posix())
        and _size(path, attempt) is not None
    ]
    if not found:
        raise NotFoundError(
            f"rank {rank} of attempt {attempt.number} of run {paths.name} has no {stream}"
            + (f" in launch {launch}" if launch is not None else "")
        )
    path = max(found, key=lambda one: one.parent.name)
    with open(_open(path, attempt), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - limit) if offset is None else min(offset, size)
        content = read_masked(file, start, limit, secrets)
    if offset is None and start:
        # The tail begins with a whole line.
        cut = content.find(b"\n") + 1
        start, content = start + cut, content[cut:]
    content = _whole(content, is_end=start + len(content) >= size)
    return LogPart(
        run=paths.name,
        attempt=attempt.number,
        rank=rank,
        stream=stream,
        launch=int(path.parent.name[1:]),
        offset=start,
        next_offset=start + len(content),
        bytes=size,
        text=content.decode(errors="replace"),
        ended=attempt.outcome.exists(),
    )


def _whole(content: bytes, *, is_end: bool) -> bytes:
    """Without a last line that goes on, or a last character that does."""
    line = content.rfind(b"\n") + 1
    if not is_end and line:
        return content[:line]
    for back in range(1, min(4, len(content)) + 1):
        lead = content[-back]
        if lead & 0xC0 == 0x80:
            continue
        wanted = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
        return content[:-back] if wanted > back and len(content) > back else content
    return content


def _open(path: Path, attempt: AttemptPaths) -> int:
    """A log opened for reading; `torchrun`'s names are links, which may not leave the attempt."""
    return open_regular(path, below=attempt.directory, follow=True)


def _size(path: Path, attempt: AttemptPaths) -> int | None:
    """Bytes of a log; None for what is none: a link out of the attempt, a pipe, a device."""
    try:
        handle = _open(path, attempt)
    except (OSError, ForeignFileError):
        return None
    try:
        return os.fstat(handle).st_size
    finally:
        os.close(handle)
