"""The journal: append-only JSON lines in the run's folder, one file per writer.

Each line has two numbers. `opening` counts how often the writer has opened its file, `sequence`
counts the lines since then. A crash can cut off only the last line. Readers skip such a line, and
the next writer starts a new one. The SQL index is built from the journals, so every fact that must
survive the database is written to a journal first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.contracts.disk import bounds, file_locks, filesystems, paths, reading
from holdfast.contracts.disk.durable import fsync_directory, make_directory
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.states import AttemptState

# Checks of the facts (the `data`) of journal lines.
#
# Other users may have written a line. Readers index its facts, compare them and compute with
# them, so a line with facts of a wrong type counts as damaged and is skipped.

# Whole numbers and the largest absolute value of each.
_WHOLE: Final[Mapping[str, int]] = {
    **dict.fromkeys(("step", "first_step", "last_step"), bounds.STEP_MAX),
    **dict.fromkeys(("committed_step", "newest_step"), bounds.STEP_MAX),
    **dict.fromkeys(("attempt", "launch", "after_attempt", "node", "rank"), bounds.NUMBER_MAX),
    **dict.fromkeys(("count", "pid", "rounds", "exit_code", "place"), bounds.NUMBER_MAX),
    **dict.fromkeys(("order", "overtakes", "successor", "start", "tries"), bounds.NUMBER_MAX),
    **dict.fromkeys(("world_size", "gpus"), bounds.RANKS_MAX),
    "bytes": bounds.BYTES_MAX,
}
_TEXT: Final = frozenset(
    {
        *("checkpoint", "to", "action", "by", "state", "cause", "host", "error", "reason", "path"),
        *("url", "flow_run", "job_id", "note", "into_uid", "into_run", "format", "text", "finding"),
        *("resumed_from", "command_digest", "traceback", "ending", "source", "problem"),
        *("check", "digest", "tracker", "tracker_id", "key", "metric", "consumer"),
        *("lacks", "unprotected"),
    }
)
_TEXTS: Final = frozenset(
    {"evidence", "hosts", "excluded", "skipped", "exclude", "dumps", "unhealthy_hosts", "drained"}
    | {"tags_added", "tags_removed"}
)
_STATES: Final = frozenset(AttemptState)
# Numbers that JSON does not have, as text.
NOT_FINITE: Final = frozenset({"nan", "inf", "-inf"})
# Required facts, by kind.
_NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "attempt_state": ("state",),
    "attempt_ended": ("state",),
    "pinned": ("checkpoint",),
    "unpinned": ("checkpoint",),
    "checkpoint_deleted": ("checkpoint",),
    "forked": ("checkpoint",),
    "exported": ("checkpoint", "path"),
    "imported": ("checkpoint", "path"),
    "operator_request": ("action",),
    "order_state": ("order", "state"),
    "decision": ("action",),
    "loading": ("checkpoint", "step"),
    "save_failed": ("checkpoint", "step", "error"),
    "node_lost": ("host",),
    "hang_suspected": ("finding",),
    "hang_confirmed": ("finding",),
    "straggler": ("rank", "own_s", "peers_s"),
    "node_silent": ("silent", "nodes"),
    "node_slow": ("host", "slow", "text"),
    "link_slow": ("slow", "text"),
    "slowdown_tested": ("step",),
    "protection": ("launch", "lacks", "unprotected"),
    "node_unhealthy": ("host", "check"),
    "numerics": ("action", "reason"),
    "limit_passed": ("limit", "passed", "text"),
    "metric_missing": ("key", "metric", "missing", "text"),
    "tracked": ("tracker", "tracker_id"),
    "metric": ("checkpoint", "metric", "value"),
    "consumer": ("consumer", "checkpoint", "state"),
}


def needed_facts(kind: str) -> tuple[str, ...]:
    """The facts that a line of `kind` must have."""
    return _NEEDED.get(kind, ())


def problem_with_facts(kind: str, facts: Mapping[str, Any]) -> str | None:
    """Return the problem with the facts of a line of `kind` as text, or None."""
    for name in needed_facts(kind):
        if facts.get(name) is None:
            return f"{name} is missing"
    for name, value in facts.items():
        if value is not None and not _fits(name, value):
            return f"{name} has an invalid value of type {type(value).__name__}"
    if kind == "node_silent" and not _are_texts(facts["nodes"]):
        return "nodes is not a list of names"
    if kind == "limit_passed" and type(facts["limit"]) is not str:
        return "limit is not the name of a limit"
    if kind == "metric" and not _is_number(facts["value"]):
        return "value is not a number"
    if kind in {"attempt_state", "attempt_ended"} and facts["state"] not in _STATES:
        return "state is not a state of an attempt"
    return None


def _fits(name: str, value: Any) -> bool:
    kind = type(value)
    if name == "skip":
        return kind is list and all(_is_pair(item) for item in value)
    if name in _WHOLE:
        return kind is int and abs(value) <= _WHOLE[name]
    if name in _TEXT:
        return kind is str
    if name in _TEXTS:
        return _are_texts(value)
    if name.endswith("_at"):
        return kind in {int, float} and 0 <= value <= bounds.TIME_MAX
    if name.endswith("_s"):
        # The clocks of two machines may differ by any time.
        return kind in {int, float} and abs(value) <= bounds.TIME_MAX
    return True


def _is_number(value: Any) -> bool:
    return type(value) in {int, float} or (type(value) is str and value in NOT_FINITE)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, list) and len(value) == 2
    return is_pair and all(type(item) is int and abs(item) <= bounds.STEP_MAX for item in value)


TAIL_BYTES: Final = 64 * 1024
# Far above what Holdfast writes. A longer line comes from elsewhere and would fill the memory.
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
# A journal with a line per minute has a thousandth of this after a year.
JOURNAL_BYTES_MAX: Final = 512 * 1024 * 1024
# In another user's folder, whose owner may hold the lock on purpose.
FOREIGN_LOCK_S: Final = 2.0
# A write takes milliseconds, but a process that holds the lock may have been suspended.
OWN_LOCK_S: Final = 60.0
_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
# The requester when the grow policy, and not a person, relaunches a run.
GROWER: Final = "elastic.grow"
PENDING_TIMEOUT: Final = "supervision.pending_timeout_min"
# The requester when a run changes its place.
FALLBACKS: Final = "resources.fallbacks"
# Requests by these names are Holdfast's own, so they reset no budget of the run.
AUTOMATIC: Final = frozenset({GROWER, PENDING_TIMEOUT, FALLBACKS})


class EventKind(StrEnum):
    """The kinds of journal lines. `holdfast_docs.event_book` describes each and its `data`."""

    SUPERVISED = "supervised"
    ATTEMPT_RESERVED = "attempt_reserved"
    ATTEMPT_SUBMITTED = "attempt_submitted"
    ATTEMPT_STATE = "attempt_state"
    ATTEMPT_ENDED = "attempt_ended"
    SUCCESSOR_SUBMITTED = "successor_submitted"
    SUCCESSOR_ADOPTED = "successor_adopted"
    SUCCESSOR_WITHDRAWN = "successor_withdrawn"
    DECISION = "decision"
    OPERATOR_REQUEST = "operator_request"
    ORDER_STATE = "order_state"
    RUN_ENDED = "run_ended"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    CHECKPOINT_DELETED = "checkpoint_deleted"
    FORKED = "forked"
    EXPORTED = "exported"
    IMPORTED = "imported"
    ROLLED_BACK = "rolled_back"
    NUMERICS = "numerics"
    CLAIMED = "claimed"
    LAUNCH_STARTED = "launch_started"
    LAUNCH_ENDED = "launch_ended"
    SIGNAL = "signal"
    NOTICE = "notice"
    STOP_AGREED = "stop_agreed"
    STOP_FAILED = "stop_failed"
    LOADING = "loading"
    RESUMED = "resumed"
    STAGED = "staged"
    COMMITTED = "committed"
    SAVE_FAILED = "save_failed"
    MIRRORED = "mirrored"
    MIRROR_FAILED = "mirror_failed"
    FETCHED = "fetched"
    VERIFIED = "verified"
    NODE_LOST = "node_lost"
    TRACKED = "tracked"
    GOODPUT = "goodput"
    HANG_SUSPECTED = "hang_suspected"
    HANG_CLEARED = "hang_cleared"
    HANG_CONFIRMED = "hang_confirmed"
    STRAGGLER = "straggler"
    NODE_SILENT = "node_silent"
    NODE_SLOW = "node_slow"
    LINK_SLOW = "link_slow"
    SLOWDOWN_TESTED = "slowdown_tested"
    PROTECTION = "protection"
    NODE_UNHEALTHY = "node_unhealthy"
    LIMIT_PASSED = "limit_passed"
    ALERT_ACKNOWLEDGED = "alert_acknowledged"
    METRIC_MISSING = "metric_missing"
    METRIC = "metric"
    ANNOTATED = "annotated"
    CONSUMER = "consumer"
    AUDIT = "audit"
    NOTE = "note"


class Event(BaseModel):
    """One line. `time` is in Unix seconds of the writer's clock. The numbers give the order."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    writer: bounds.Name
    opening: Annotated[int, Field(ge=0, le=bounds.INTEGER_MAX)]
    sequence: Annotated[int, Field(ge=0, le=bounds.INTEGER_MAX)]
    time: bounds.Moment
    # Kinds of newer versions are kept as strings. This version does not use them.
    kind: Annotated[
        EventKind | Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
        Field(union_mode="left_to_right"),
    ]
    data: dict[str, Any] = Field(default_factory=dict)


class JournalWriter:
    """Appends lines to one journal file. Several processes may share a writer's name.

    Each append holds an exclusive lock for one write, on a file beside the journal. It reads the
    last line again if another process has written since.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, and create it if needed. Raises `ForeignFileError` for a link or a pipe."""
        if not path.parent.is_dir():
            make_directory(path.parent)
        self.path = path
        self.writer = path.stem
        self._handle, self._is_own = _open_for_appending(path)
        try:
            # Every reader of a file can lock it, so the journal itself is never locked.
            self._lock = file_locks.open_lock(journal_lock(path), below=paths.folder_of(path))
        except BaseException:
            os.close(self._handle)
            raise
        self._size_seen = -1
        self._opening = 0
        self._sequence = 0

    def append(self, kind: EventKind, *, durable: bool = True, **data: Any) -> Event:
        """Write one line and, with `durable`, wait until it is on disk.

        Raises `ValueError` for an invalid line, `OSError` if the write fails, and its subclass
        `TimeoutError` if another process keeps the file locked.
        """
        lock_s = OWN_LOCK_S if self._is_own else FOREIGN_LOCK_S
        if not file_locks.wait_for_lock(self._lock, lock_s):
            lock = journal_lock(self.path)
            raise TimeoutError(
                f"{lock}: locked by another process for {lock_s:.0f} s; find the process with "
                f"`fuser {lock}`, or check the file system's lock service"
            )
        # The lock covers one write only. The fsync can take long, and other writers must not wait
        # for it.
        try:
            event = self._write(kind, data)
        finally:
            file_locks.release(self._lock)
        if durable:
            os.fsync(self._handle)
        return event

    def _write(self, kind: EventKind, data: dict[str, Any]) -> Event:
        prefix = self._catch_up()
        event = Event(
            writer=self.writer,
            opening=self._opening,
            sequence=self._sequence,
            time=time.time(),
            kind=kind,
            data=data,
        )
        content = self._encode(prefix, event)
        # One call writes the whole line to a file in append mode, so a crash can cut off only this
        # line.
        written = os.write(self._handle, content)
        if written != len(content):
            # A file takes fewer bytes only where storage is full.
            text = f"wrote {written} of {len(content)} bytes"
            raise OSError(errno.ENOSPC, text, str(self.path))
        self._size_seen = os.fstat(self._handle).st_size
        self._sequence += 1
        return event

    def _encode(self, prefix: str, event: Event) -> bytes:
        """Return the line of `event` after `prefix`. Raises `ValueError` if it is too long."""
        line = json.dumps(event.model_dump(mode="json"), ensure_ascii=False)
        # A traceback may contain a file name that is not UTF-8. The line is still written.
        content = f"{prefix}{line}\n".encode(errors="replace")
        if len(content) > LINE_BYTES_MAX:
            raise ValueError(
                f"{self.path}: a line of {len(content)} bytes ({event.kind}), expected at most "
                f"{LINE_BYTES_MAX}; shorten its data"
            )
        return content

    def close(self) -> None:
        """Close the file. The writer cannot be used afterwards."""
        os.close(self._handle)
        os.close(self._lock)

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _catch_up(self) -> str:
        """Set the number of the next line. Return the text that must precede the line."""
        # Without this, 79 of 80 journals that two hosts wrote within a second on GlusterFS had two
        # lines with the same number, see decision 48.
        filesystems.fetch_attributes(self._handle)
        size = os.fstat(self._handle).st_size
        if size == self._size_seen:
            return ""
        # Another process has written since, or this one has just opened the file. A new `opening`
        # keeps all numbers unique and in order.
        last = self._last_event(size)
        self._opening = last.opening + 1 if last else 1
        self._sequence = 0
        torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
        if torn:
            warnings.warn(
                f"{self.path}: a crash cut off the last line; it stays as it is, and a new line "
                "follows it",
                stacklevel=4,
            )
        # The torn line stays, because a reader may have passed it already. A newline ends it.
        return "\n" if torn else ""

    def _last_event(self, size: int) -> Event | None:
        """Return the newest complete line, even if incomplete lines follow it."""
        reach = TAIL_BYTES
        while True:
            start = max(0, size - reach)
            events = list(_parse(os.pread(self._handle, size - start, start)))
            if events or start == 0:
                return events[-1] if events else None
            reach *= 4


def journal_lock(path: Path) -> Path:
    """Return the lock file of the journal `path`."""
    return path.with_name(f".{path.stem}.lock")


def read_journal(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """Return the events of a journal from byte `offset`, and the offset after the last whole line.

    Only one line at a time is in memory. A line of more than `LINE_BYTES_MAX` is damaged. It is
    skipped, with a warning that gives its position. Raises `ForeignFileError` for a link, a pipe, a
    device or a file of more than `JOURNAL_BYTES_MAX`.
    """
    events: list[Event] = []
    with open_journal(path) as stream:
        for found, end in each_line(stream, path, offset) if stream else ():
            events += found
            offset = end
    return events, offset


@contextlib.contextmanager
def open_journal(path: Path) -> Iterator[BinaryIO | None]:
    """Open a journal for reading; yields None if it does not exist. Raises like `read_journal`."""
    try:
        handle = reading.open_regular(path, below=paths.folder_of(path))
    except FileNotFoundError:
        yield None
        return
    with open(handle, "rb") as stream:
        # Another host may have added lines since this one last asked for the file's size.
        filesystems.fetch_attributes(handle)
        if (size := os.fstat(handle).st_size) > JOURNAL_BYTES_MAX:
            raise ForeignFileError(path, f"{size} bytes, expected {JOURNAL_BYTES_MAX} or less")
        yield stream


def each_line(stream: BinaryIO, path: Path, offset: int) -> Iterator[tuple[tuple[Event, ...], int]]:
    """Yield the event of each complete line from byte `offset`, and the offset after the line.

    A damaged line has no event. Only one line at a time is in memory.
    """
    stream.seek(offset)
    while line := stream.readline(LINE_BYTES_MAX + 1):
        length = len(line)
        while not line.endswith(b"\n") and (line := stream.readline(TAIL_BYTES)):
            length += len(line)
        # The last line has no newline yet. The offset stays before it, so the next read takes it
        # whole.
        if not line:
            break
        offset += length
        if length <= LINE_BYTES_MAX + 1:
            yield tuple(_parse(line)), offset
            continue
        warnings.warn(
            f"{path}: the line at byte {offset - length} has {length} bytes, expected at most "
            f"{LINE_BYTES_MAX}; it is damaged and was skipped",
            stacklevel=3,
        )
        yield (), offset


def _open_for_appending(path: Path) -> tuple[int, bool]:
    """Return (descriptor, whether this user owns the folder) of a journal. Create it if needed.

    In another user's folder, only a regular file with one name is opened, because a second name
    could be that of a file elsewhere.
    """
    below = paths.folder_of(path)
    try:
        handle = reading.open_beneath(path, _APPEND, below=below)
    except FileNotFoundError:
        handle = reading.open_beneath(path, _APPEND | os.O_CREAT, below=below)
        # Without a durable name, a power cut would lose even the lines that were synced.
        fsync_directory(path.parent)
    found, is_own = os.fstat(handle), reading.is_mine(below)
    if stat.S_ISREG(found.st_mode) and (is_own or found.st_nlink == 1):
        return handle, is_own
    os.close(handle)
    raise ForeignFileError(
        path, "not a regular file with a single name, so Holdfast does not write to it"
    )


def _parse(content: bytes) -> Iterator[Event]:
    """Yield the events in `content`. Incomplete lines and lines with invalid facts are skipped."""
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            event = Event.model_validate_json(line)
        except ValidationError:
            continue
        # `data` may contain anything, and an integer of more than 64 bits fits into no database
        # column.
        is_long = (
            bounds.has_long_number(line) and bounds.problem_with_numbers(event.data) is not None
        )
        if not is_long and problem_with_facts(event.kind, event.data) is None:
            yield event
