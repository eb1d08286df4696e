"""The ranks' log files, read in parts of bounded size and never outside the attempt's folder."""

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

PART_BYTES_MAX: Final = 1024 * 1024
FILES_MAX: Final = 20_000
Stream = Literal["stdout", "stderr"]
_FILE = re.compile(r"node-(\d{1,9})/l(\d{1,9})/rank-(\d{1,9})\.(stdout|stderr)\.log")


def choose_attempt(paths: RunPaths, number: int | None) -> AttemptPaths:
    """Return attempt `number`, or the last one. Raises `NotFoundError` if there is none."""
    there = paths.list_attempts()
    chosen = [one for one in there if number in {None, one.number}]
    if not chosen:
        problem = (
            f"no attempt {number}; the last one is {there[-1].number}"
            if there
            else "no attempt yet"
        )
        raise NotFoundError(f"run {paths.name} has {problem}")
    return chosen[-1]


def list_logs(attempt: AttemptPaths) -> list[LogFile]:
    """Return the log files of all ranks, sorted by rank, launch and stream."""
    found = []
    for path in attempt.logs.glob("node-*/l*/rank-*.log"):
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
    """Return up to `limit` bytes of a rank's log from `offset`, or the end of the log.

    Without `launch`, the newest launch is read. A part ends with a complete line if possible, and
    always with a complete character. Secrets are masked by the same number of bytes. Raises
    `NotFoundError` if there is no such log.
    """
    wanted = f"node-*/l{launch:02d}" if launch is not None else "node-*/l*"
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
        # Begin with a complete line.
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
    """Return `content` without an incomplete last line or character."""
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
    """Open a log for reading. torchrun's names are links, which must not leave the attempt."""
    return open_regular(path, below=attempt.directory, follow=True)


def _size(path: Path, attempt: AttemptPaths) -> int | None:
    """Return the size of a log; None for other files: pipes, devices, links out of the attempt."""
    try:
        handle = _open(path, attempt)
    except (OSError, ForeignFileError):
        return None
    try:
        return os.fstat(handle).st_size
    finally:
        os.close(handle)
