"""Read what ranks, torchrun, agents and flushers left about an error, within bounds.

Other users write these files. Links must stay inside the attempt, and a launch of thousands of
ranks is read only as far as time allows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.api.errors.models import ErrorSource
from holdfast.api.errors.records import ErrorRecord, LaunchEnd
from holdfast.api.errors.timeline import failure_text
from holdfast.api.logs.files import LogName, list_names
from holdfast.api.schemas import LogKind
from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.disk.reading import open_regular, read_bounded
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.plain_text import plain_line
from holdfast.workers.decisions import evidence
from holdfast.workers.decisions.causes import RankFailure
from holdfast.workers.decisions.evidence import last_message, last_traceback

READ_S: Final = 1.5
FILES_MAX: Final = 10_000
ERROR_FILE_BYTES_MAX: Final = 1024 * 1024
REPORT_BYTES: Final = 1024 * 1024
TAIL_BYTES: Final = 32 * 1024
# torchrun's own place of a rank's files, to which the name of its log is a link.
_PLACE: Final = re.compile(
    r"(?:\.\./\.\./(?P<node>node-[0-9]{4,7}/l[0-9]{1,9})/)?"
    r"(?P<run>[A-Za-z0-9_.-]{1,200})/attempt_0/(?P<local>[0-9]{1,6})/stderr\.log"
)
_OTHERS: Final = {
    LogKind.AGENT: ErrorSource.AGENT,
    LogKind.FLUSHER: ErrorSource.FLUSHER,
    LogKind.TORCHRUN: ErrorSource.TORCHRUN,
}


@dataclass
class ReadBudget:
    """What a request may still read. `unread` counts what it has left out."""

    files: int = FILES_MAX
    ends_at: float = field(default_factory=lambda: time.monotonic() + READ_S)
    unread: int = 0

    def take(self) -> bool:
        """Return True if another file may be read."""
        if self.files > 0 and time.monotonic() < self.ends_at:
            self.files -= 1
            return True
        self.unread += 1
        return False


@dataclass(frozen=True)
class _Place:
    """The folder of a launch's torchrun, and the rank's number there."""

    launch: Path
    folder: Path
    local: int


@dataclass(frozen=True)
class _Report:
    """What a node's torchrun logged: its failed ranks by their numbers, and the ended processes."""

    failed: Mapping[int, evidence.ReportedFailure]
    ended: frozenset[int]


_NO_REPORT: Final = _Report({}, frozenset())


class ErrorFiles:
    """The files of one attempt. `hosts` are its nodes' by number."""

    def __init__(self, attempt: AttemptPaths, hosts: Mapping[int, str], budget: ReadBudget) -> None:
        self._attempt, self._hosts, self._budget = attempt, hosts, budget
        self._names = list_names(attempt.run, attempt)
        self._reports: dict[Path, _Report] = {}

    def of_ranks(self, end: LaunchEnd) -> list[ErrorRecord]:
        """Return the errors of a launch's ranks. The first that failed is read before the others.

        It has a record even if none of its files is left, because the journal names it.
        """
        wanted = [
            name
            for name in self._names
            if name.kind is LogKind.RANK and name.launch == end.number and name.stream == "stderr"
        ]
        wanted.sort(key=lambda name: (name.rank != end.rank, name.rank or 0))
        found = (self._of_rank(name, end) for name in wanted if self._budget.take())
        records = [record for record in found if record is not None]
        if end.rank is None or any(_rank_of(one) == end.rank for one in records):
            return records
        return [self._record(None, end, ended_as(end, None), "", 0.0, ""), *records]

    def of_others(self) -> list[ErrorRecord]:
        """Return the last traceback of each agent, flusher and torchrun."""
        found = []
        for name in self._names:
            source = _OTHERS.get(name.kind)
            if source is None or name.stream == "stdout" or not self._budget.take():
                continue
            path = self._attempt.run.directory / name.name
            tail = self._tail(path)
            text = last_traceback(tail)
            # torchrun's own traceback only says that ranks failed, and repeats that of a rank.
            if not text or (source is ErrorSource.TORCHRUN and "ChildFailedError" in tail):
                continue
            found.append(
                ErrorRecord(
                    attempt=self._attempt.number,
                    launch=name.launch or 0,
                    source=source,
                    kind="exception",
                    text=plain_line(f"{_who(source, name)}: {last_message(text)}"),
                    clock="the file server",
                    at=_changed_at(path),
                    host=self._host(name),
                    traceback=text,
                    file=name.name,
                )
            )
        return found

    def _of_rank(self, name: LogName, end: LaunchEnd) -> ErrorRecord | None:
        """Return how a rank failed; None if it did not fail, or only was ended after a failure."""
        path = self._attempt.run.directory / name.name
        place = _place(path)
        traceback, at = ("", 0.0) if place is None else self._error_file(place.folder)
        report = _NO_REPORT if place is None else self._report(place.launch)
        reported = None if place is None else report.failed.get(place.local)
        is_named, stderr = name.rank == end.rank, ""
        if not traceback and (reported or is_named or place is None):
            stderr = self._tail(path)
            traceback = last_traceback(stderr)
        if reported is not None and reported.code < 0 and reported.pid in report.ended:
            # torchrun ended it after another failure. With an error of its own, it failed too.
            reported = None
        if not (traceback or reported or is_named):
            return None
        code = ended_as(end if is_named else None, reported)
        return self._record(name, end, code, traceback, at, stderr)

    def _record(
        self,
        name: LogName | None,
        end: LaunchEnd,
        code: int,
        traceback: str,
        at: float,
        stderr: str,
    ) -> ErrorRecord:
        """Return the record of a rank's failure; without `name`, of the one that `end` names."""
        rank = (name.rank if name else end.rank) or 0
        host = (end.host if rank == end.rank else "") or (self._host(name) if name else "")
        kind, text = failure_text(code, traceback, stderr)
        return ErrorRecord(
            attempt=self._attempt.number,
            launch=end.number,
            source=ErrorSource.RANK if traceback else ErrorSource.TORCHRUN,
            kind=kind,
            text=text,
            clock=(host or f"node {name.node if name else '?'}") if at else "",
            at=at,
            host=host,
            failure=RankFailure(
                rank=rank, exit_code=code, timestamp=at, traceback=traceback, host=host
            ),
            traceback=traceback,
            file=name.name if name else "",
        )

    def _error_file(self, folder: Path) -> tuple[str, float]:
        try:
            below = self._attempt.directory
            content = read_bounded(folder / "error.json", ERROR_FILE_BYTES_MAX, below=below)
        except (OSError, ForeignFileError):
            return "", 0.0
        return evidence.read_error_file(content)

    def _report(self, launch: Path) -> _Report:
        if launch not in self._reports:
            log = self._tail(launch / "torchrun.log", REPORT_BYTES)
            failed = {one.local: one for one in evidence.read_report(log)}
            self._reports[launch] = _Report(failed, frozenset(evidence.ended_peers(log)))
        return self._reports[launch]

    def _tail(self, path: Path, bytes_max: int = TAIL_BYTES) -> str:
        """Return the last lines of a file, each as a whole; '' if it cannot be read."""
        below = self._attempt.run.directory
        try:
            with open(open_regular(path, below=below, follow=True), "rb") as file:
                start = max(0, os.fstat(file.fileno()).st_size - bytes_max)
                file.seek(start)
                text = file.read(bytes_max).decode(errors="replace")
        except (OSError, ForeignFileError):
            return ""
        # The first line may be cut inside a secret.
        return text.partition("\n")[2] if start else text

    def _host(self, name: LogName) -> str:
        return self._hosts.get(name.node, "") if name.node is not None else ""


def ended_as(named: LaunchEnd | None, reported: evidence.ReportedFailure | None) -> int:
    """Return the exit code of a rank: by the journal if that names it, else by torchrun, else 1."""
    if named is not None and named.code is not None:
        return named.code
    return reported.code if reported is not None else 1


def _rank_of(record: ErrorRecord) -> int | None:
    return record.failure.rank if record.failure else None


def _place(log: Path) -> _Place | None:
    """Return where a rank's files are, from its log's link; None if it is no such link."""
    try:
        match = _PLACE.fullmatch(os.readlink(log))
    except OSError:
        return None
    if match is None:
        return None
    launch = log.parent
    if match["node"]:
        launch = launch.parent.parent / match["node"]
    folder = launch.joinpath(match["run"], "attempt_0", match["local"])
    return _Place(launch, folder, int(match["local"]))


def _who(source: ErrorSource, name: LogName) -> str:
    article = "" if source is ErrorSource.TORCHRUN else "the "
    return f"{article}{source}" + ("" if name.node is None else f" of node {name.node}")


def _changed_at(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
