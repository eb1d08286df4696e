"""The log files of an attempt's ranks, which are never read outside of the attempt's folder."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.disk.reading import open_regular
from holdfast.contracts.errors import ForeignFileError, NotFoundError

# In the folder of a node's launch: when its logs had which sizes.
TIMES: Final = "times.log"
# Only Holdfast's own names count, because another user's folder may contain any other.
_NAME: Final = re.compile(r"(node-[0-9]+)/l([0-9]{1,9})/rank-([0-9]{5,9})\.(stdout|stderr)\.log")
_TIME: Final = re.compile(r"([0-9]{1,12}\.[0-9]{3}) (\S+) ([0-9]{1,18})")


@dataclass(frozen=True)
class RankLog:
    """A rank's output in one launch: a regular file of `bytes` bytes below the folder `below`."""

    path: Path
    below: Path
    node: str
    launch: int
    rank: int
    stream: str
    bytes: int
    changed_at: float

    def open(self) -> BinaryIO:
        """Open the file. torchrun's names are links, which must not leave the attempt."""
        return open(open_regular(self.path, below=self.below, follow=True), "rb")

    def times(self) -> list[tuple[int, float]]:
        """Return (bytes, Unix time) pairs: at that time, the file was found to have that size.

        Sizes grow from pair to pair. The agent records them with its heartbeats, later once a
        minute. It is empty for an attempt of an older version.
        """
        try:
            with open(open_regular(self.path.with_name(TIMES), below=self.below), "rb") as stream:
                lines = stream.read().decode(errors="replace").splitlines()
        except (OSError, ForeignFileError):
            return []
        found: list[tuple[int, float]] = []
        for line in lines:
            match = _TIME.fullmatch(line)
            if match and match[2] == self.path.name:
                size = int(match[3])
                if size > (found[-1][0] if found else 0):
                    found.append((size, float(match[1])))
        return found


def time_line(at: float, name: str, size: int) -> str:
    """Return the line of `TIMES` that says that the log `name` had `size` bytes at `at`."""
    return f"{at:.3f} {name} {size}\n"


def choose_attempt(paths: RunPaths, number: int | None) -> AttemptPaths:
    """Return attempt `number`, or the last one. Raises `NotFoundError` if there is none."""
    there = paths.list_attempts()
    if not there:
        raise NotFoundError(
            f"{paths.name} has no attempt yet; `holdfast show {paths.name}` shows the reason"
        )
    chosen = [one for one in there if number in {None, one.number}]
    if not chosen:
        raise NotFoundError(
            f"{paths.name} has no attempt {number}; the last one is {there[-1].number}"
        )
    return chosen[-1]


def rank_logs(
    attempt: AttemptPaths, rank: int | None = None, *, on_skip: Callable[[Exception], object]
) -> Iterator[RankLog]:
    """Yield the logs of a rank, or of every rank.

    `on_skip` is called for anything but a regular file of the attempt, such as a link or a pipe.
    """
    number = "*" if rank is None else f"{rank:05d}"
    for path in attempt.logs.glob(f"node-*/l*/rank-{number}.*.log"):
        match = _NAME.fullmatch(path.relative_to(attempt.logs).as_posix())
        if not match:
            continue
        try:
            handle = open_regular(path, below=attempt.directory, follow=True)
        # Another user's folder may contain links, pipes or damaged files. Other ranks' logs still
        # count.
        except (OSError, ForeignFileError) as error:
            on_skip(error)
            continue
        try:
            status = os.fstat(handle)
        finally:
            os.close(handle)
        yield RankLog(
            path=path,
            below=attempt.directory,
            node=match[1],
            launch=int(match[2]),
            rank=int(match[3]),
            stream=match[4],
            bytes=status.st_size,
            changed_at=status.st_mtime,
        )
