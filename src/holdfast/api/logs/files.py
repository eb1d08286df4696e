"""All log files of a run: ranks, torchrun, flushers, agents and the supervisor.

A file is named by its path in the run's folder. Only names that Holdfast itself gives count, so
that a client cannot choose any other file.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from holdfast.api.schemas import LogKind, RunLog
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.disk.reading import open_regular
from holdfast.contracts.errors import ForeignFileError, NotFoundError
from holdfast.contracts.records.documents import Request, read_document

FILES_MAX: Final = 20_000
NAME_CHARACTERS_MAX: Final = 200
SUPERVISOR: Final = "flow.log"


_NODE: Final = r"attempts/(?P<attempt>[0-9]{4,7})/logs/node-(?P<node>[0-9]{4,7})/"
_LAUNCH: Final = rf"{_NODE}l(?P<launch>[0-9]{{1,9}})/"
_NAMES: Final = {
    LogKind.RANK: re.compile(
        rf"{_LAUNCH}rank-(?P<rank>[0-9]{{5,9}})\.(?P<stream>stdout|stderr)\.log"
    ),
    LogKind.TORCHRUN: re.compile(rf"{_LAUNCH}torchrun\.log"),
    LogKind.FLUSHER: re.compile(rf"{_NODE}flusher\.log"),
    LogKind.AGENT: re.compile(
        r"(?:attempts/(?P<attempt>[0-9]{4,7})|successors/[0-9]{4,7})/logs/"
        r"(?:launch\.log|[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\.(?P<stream>out|err))"
    ),
    LogKind.SUPERVISOR: re.compile(re.escape(SUPERVISOR)),
}
_STREAMS: Final = {"out": "stdout", "err": "stderr"}
_ORDER: Final = tuple(LogKind)


@dataclass(frozen=True)
class LogName:
    """A log file's name, and what the name says about it."""

    name: str
    kind: LogKind
    attempt: int | None
    node: int | None
    launch: int | None
    rank: int | None
    stream: str | None

    @classmethod
    def parse(cls, name: str) -> LogName | None:
        """Return the parts of a name, or None if Holdfast gives no log such a name."""
        for kind, pattern in _NAMES.items():
            match = pattern.fullmatch(name)
            if match is None:
                continue
            found = match.groupdict()
            stream = found.get("stream")
            numbers = {
                key: int(found[key]) if found.get(key) else None
                for key in ("attempt", "node", "launch", "rank")
            }
            return cls(name, kind, stream=stream and _STREAMS.get(stream, stream), **numbers)
        return None

    @property
    def order(self) -> tuple[object, ...]:
        """Return the sort key: by kind, then by rank, node, launch and name."""
        numbers = (-1 if one is None else one for one in (self.rank, self.node, self.launch))
        return (_ORDER.index(self.kind), *numbers, self.stream == "stderr", self.name)

    def open(self, paths: RunPaths) -> BinaryIO:
        """Open the file. Raises `OSError` or `ForeignFileError` for anything but a regular one.

        torchrun's names are links, which must stay inside the run's folder.
        """
        follow = self.kind is not LogKind.SUPERVISOR
        path = paths.directory / self.name
        handle = open_regular(path, below=paths.directory, follow=follow)
        return open(handle, "rb")


def list_names(paths: RunPaths, attempt: AttemptPaths) -> list[LogName]:
    """Return the log files of an attempt, by their names only: none of them is opened."""
    places = [attempt.logs]
    request = read_document(Request, attempt.request)
    if request is not None and request.successor:
        # The job of a successor was submitted before there was the attempt's folder.
        places.append(paths.successor(request.successor).logs)
    names = (name for logs in places for name in _names_in(paths, logs))
    found = [known for name in islice(names, FILES_MAX) if (known := LogName.parse(name))]
    # A name in a successor's folder has no attempt.
    own = [one if one.attempt else replace(one, attempt=attempt.number) for one in found]
    return sorted(own, key=lambda one: one.order)


def _names_in(paths: RunPaths, logs: Path) -> Iterator[str]:
    """Return the names in a folder of logs, as text: thousands of `Path` cost half a second."""
    run, folder = str(paths.directory), logs.relative_to(paths.directory).as_posix()
    names = _children(run, folder)
    yield from names
    for node in names:
        if not node.startswith(f"{folder}/node-"):
            continue
        for one in _children(run, node):
            yield one
            if one.startswith(f"{node}/l"):
                yield from _children(run, one)


def _children(run: str, folder: str) -> list[str]:
    """Return what is in a folder; nothing for a link, which may lead out of the run."""
    path = f"{run}/{folder}"
    try:
        if os.path.islink(path):
            return []
        with os.scandir(path) as entries:
            return [f"{folder}/{entry.name}" for entry in islice(entries, FILES_MAX)]
    except OSError:
        return []


def list_files(paths: RunPaths, attempt: AttemptPaths | None) -> list[RunLog]:
    """Return the log files of an attempt, and last the supervisor's, with their sizes."""
    names = [] if attempt is None else list_names(paths, attempt)
    supervisor = LogName.parse(SUPERVISOR)
    assert supervisor is not None
    found = []
    for name in [*names, supervisor]:
        # Another user's folder may contain links, pipes or damaged files.
        with contextlib.suppress(OSError, ForeignFileError), name.open(paths) as file:
            status = os.fstat(file.fileno())
            facts = {**vars(name), "file": name.name}
            del facts["name"]
            found.append(RunLog(**facts, bytes=status.st_size, changed_at=status.st_mtime))
    return found


def find_log(paths: RunPaths, name: str) -> tuple[LogName, BinaryIO]:
    """Return a log file of the run, opened. Raises `NotFoundError` if there is none."""
    known = LogName.parse(name)
    if known is not None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ForeignFileError):
            return known, known.open(paths)
    raise NotFoundError(
        f"{paths.name} has no log file {name[:NAME_CHARACTERS_MAX]!r}; `log-files` lists them"
    )
