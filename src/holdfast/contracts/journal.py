"""The journal: append-only JSON lines beside the run, one file per writer.

Each line is numbered (launch, sequence): the launch counts the writer's openings of
its file, the sequence its lines since then. A line torn by a crash is the last one and is
passed over; the next writer starts on a line of its own. SQL is fed from these lines, so
whatever must survive the database is a line first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
import warnings
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from holdfast.contracts.bounds import INTEGER_MAX, Name, has_long_number, problem_with_numbers
from holdfast.contracts.durable import fsync_directory, make_directory
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.event_facts import problem_with_facts
from holdfast.contracts.file_locks import wait_for_lock
from holdfast.contracts.paths import folder_of
from holdfast.contracts.reading import is_mine, open_beneath, open_regular

TAIL_BYTES: Final = 64 * 1024
# Far above what any writer says; a longer line is not ours and would only fill memory.
LINE_BYTES_MAX: Final = 16 * 1024 * 1024
# A year of lines, one a minute, has a thousandth of this.
JOURNAL_BYTES_MAX: Final = 512 * 1024 * 1024
FOREIGN_LOCK_S: Final = 2.0
# A line is written in milliseconds; a process that was stopped may be continued within this time.
OWN_LOCK_S: Final = 60.0
_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
# Who asks when it is no person but the policy of growing.
GROWER: Final = "elastic.grow"


class EventKind(StrEnum):
    """What a line can say; the keys of its `data` stand beside each."""

    SUPERVISED = "supervised"  # host, pid, flow_run: a flow took the run up
    ATTEMPT_RESERVED = "attempt_reserved"  # attempt, gpus, nodes, reason
    ATTEMPT_SUBMITTED = "attempt_submitted"  # attempt, job_id
    ATTEMPT_STATE = "attempt_state"  # attempt, state, detail
    ATTEMPT_ENDED = "attempt_ended"  # attempt, state, cause, evidence, and `Outcome`'s facts
    DECISION = "decision"  # after_attempt, action, gpus, exclude, delay_s, reason
    OPERATOR_REQUEST = "operator_request"  # action, by, after_attempt, gpus, of_completed
    RUN_ENDED = "run_ended"  # state, reason
    PINNED = "pinned"  # checkpoint (directory name), by, note
    UNPINNED = "unpinned"  # checkpoint, by
    CHECKPOINT_DELETED = "checkpoint_deleted"  # checkpoint, reason, by
    FORKED = "forked"  # checkpoint, into_uid, into_run
    EXPORTED = "exported"  # checkpoint, format, path
    # skip: data passed over from then on, pairs [first_step, steps].
    ROLLED_BACK = "rolled_back"  # to, excluded (directory names), skip, step, reason
    NUMERICS = "numerics"  # problem, step, loss, rank, window, median, limit, action, reason, skip
    CLAIMED = "claimed"  # job_id, host, pid
    LAUNCH_STARTED = "launch_started"  # launch, world_size
    LAUNCH_ENDED = "launch_ended"  # launch, ending, last_step, trained_until
    SIGNAL = "signal"  # source, name, detail: something asked the attempt to stop
    NOTICE = "notice"  # cloud, notice, host, deadline, detail: a cloud's interruption notice
    STOP_AGREED = "stop_agreed"  # step, rounds, waited_s
    STOP_FAILED = "stop_failed"  # reason, newest_step
    # Where training goes on; with world_size and argv besides.
    RESUMED = "resumed"  # checkpoint, step, skipped, command_digest, restored, load_s
    STAGED = "staged"  # checkpoint, step, bytes, blocked_s, reason
    COMMITTED = "committed"  # checkpoint, step, bytes, flush_s
    SAVE_FAILED = "save_failed"  # checkpoint, step, error
    MIRRORED = "mirrored"  # checkpoint, step, url, bytes, seconds
    MIRROR_FAILED = "mirror_failed"  # checkpoint, step, url, error
    FETCHED = "fetched"  # checkpoint, step, url, bytes, seconds, path
    VERIFIED = "verified"  # checkpoint, ok, by, bytes, damaged: every byte was read
    NODE_LOST = "node_lost"  # node, host
    GOODPUT = "goodput"  # attempt, and where its time went (`contracts.goodput`)
    HANG_SUSPECTED = "hang_suspected"  # launch, silent, finding, dumps
    HANG_CONFIRMED = "hang_confirmed"  # launch, reason, silent, finding, dumps
    STRAGGLER = "straggler"  # launch, rank, own_s, peers_s, step_s
    NODE_SILENT = "node_silent"  # attempt, nodes, count, silent: heartbeats stopped or came again
    AUDIT = "audit"  # action, by, role, address, token, outcome, and the action's own facts
    NOTE = "note"  # text


class Event(BaseModel):
    """One line. `time` is Unix seconds by the writer's clock; numbers, not times, give order."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    writer: Name
    launch: Annotated[int, Field(ge=0, le=INTEGER_MAX)]
    sequence: Annotated[int, Field(ge=0, le=INTEGER_MAX)]
    time: float
    # A newer program's kinds are kept, and mean nothing here.
    kind: Annotated[
        EventKind | Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
        Field(union_mode="left_to_right"),
    ]
    data: dict[str, Any] = Field(default_factory=dict)


class JournalWriter:
    """Appends to one journal file; safe for several processes that share a writer's name.

    Each append holds an exclusive lock for the time of one write, and looks at the last line
    again when somebody else has written since.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, made if need be; a link or a pipe there is a `ForeignFileError`."""
        if not path.parent.is_dir():
            make_directory(path.parent)
        self.path = path
        self.writer = path.stem
        self._handle, self._is_own = _open_for_appending(path)
        self._size_seen = -1
        self._launch = 0
        self._sequence = 0

    def append(self, kind: EventKind, *, durable: bool = True, **data: Any) -> Event:
        """Write one line and, unless told otherwise, wait until it is durable.

        Raises `ValueError` for a line that no reader would believe, and `OSError` as writing does:
        a `TimeoutError` where another process keeps the file locked.
        """
        lock_s = OWN_LOCK_S if self._is_own else FOREIGN_LOCK_S
        if not wait_for_lock(self._handle, lock_s):
            raise TimeoutError(
                f"{self.path}: locked by another process for {lock_s:.0f} s; a process that writes "
                "it hangs, or the file system's lock service does"
            )
        try:
            prefix = self._catch_up()
            event = Event(
                writer=self.writer,
                launch=self._launch,
                sequence=self._sequence,
                time=time.time(),
                kind=kind,
                data=data,
            )
            line = json.dumps(event.model_dump(mode="json"), ensure_ascii=False)
            # A traceback may name a file whose name is no UTF-8: the line is worth more than it.
            content = f"{prefix}{line}\n".encode(errors="replace")
            if len(content) > LINE_BYTES_MAX:
                raise ValueError(
                    f"{self.path}: a line of {len(content)} bytes ({kind}), expected at most "
                    f"{LINE_BYTES_MAX}; say less in it"
                )
            written = os.write(self._handle, content)
            if written != len(content):
                raise OSError(f"{self.path}: wrote {written} of {len(content)} bytes")
            self._size_seen = os.fstat(self._handle).st_size
            self._sequence += 1
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)
        if durable:
            os.fsync(self._handle)
        return event

    def close(self) -> None:
        """Give the file back; the writer cannot be used after it."""
        os.close(self._handle)

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _catch_up(self) -> str:
        """Number the next line after the last one; returns what must precede it."""
        size = os.fstat(self._handle).st_size
        if size == self._size_seen:
            return ""
        last = self._last_event(size)
        self._launch = last.launch + 1 if last else 1
        self._sequence = 0
        torn = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
        if torn:
            warnings.warn(
                f"{self.path}: its last line was cut short by a crash, and stays as it is; the "
                "next one stands alone",
                stacklevel=3,
            )
        return "\n" if torn else ""

    def _last_event(self, size: int) -> Event | None:
        """The newest whole line, however many torn ones follow it."""
        reach = TAIL_BYTES
        while True:
            start = max(0, size - reach)
            events = list(_parse(os.pread(self._handle, size - start, start)))
            if events or start == 0:
                return events[-1] if events else None
            reach *= 4


def read_journal(path: Path, offset: int = 0) -> tuple[list[Event], int]:
    """The events of a journal from byte `offset` on, and the offset after the last whole line.

    One line at a time is in memory. One of more than `LINE_BYTES_MAX` is damage: a warning names
    its place, and it is passed over as a torn one is. Raises `ForeignFileError` for what is no
    journal: a link, a pipe, a device, a file of more than `JOURNAL_BYTES_MAX`.
    """
    with open_journal(path) as stream:
        return ([], offset) if stream is None else read_lines(stream, path, offset)


@contextlib.contextmanager
def open_journal(path: Path) -> Iterator[BinaryIO | None]:
    """A journal opened for reading, None when there is none. Raises as `read_journal` does."""
    try:
        handle = open_regular(path, below=folder_of(path))
    except FileNotFoundError:
        yield None
        return
    with open(handle, "rb") as stream:
        if (size := os.fstat(handle).st_size) > JOURNAL_BYTES_MAX:
            raise ForeignFileError(path, f"{size} bytes, expected {JOURNAL_BYTES_MAX} or less")
        yield stream


def read_lines(stream: BinaryIO, path: Path, offset: int) -> tuple[list[Event], int]:
    """`read_journal` of a journal that is open; `path` is its name."""
    events: list[Event] = []
    stream.seek(offset)
    while line := stream.readline(LINE_BYTES_MAX + 1):
        length = len(line)
        while not line.endswith(b"\n") and (line := stream.readline(TAIL_BYTES)):
            length += len(line)
        if not line:
            break
        if length <= LINE_BYTES_MAX + 1:
            events.extend(_parse(line))
        else:
            warnings.warn(
                f"{path}: the line at byte {offset} has {length} bytes, expected at most "
                f"{LINE_BYTES_MAX}; it is damaged and passed over",
                stacklevel=2,
            )
        offset += length
    return events, offset


def _open_for_appending(path: Path) -> tuple[int, bool]:
    """(descriptor, whether the folder is one's own) of a journal, which is made if need be.

    In another user's folder nothing but that folder's own file is written to, and its owner, who
    may hold the lock, is not waited for.
    """
    below = folder_of(path)
    try:
        handle = open_beneath(path, _APPEND, below=below)
    except FileNotFoundError:
        handle = open_beneath(path, _APPEND | os.O_CREAT, below=below)
        fsync_directory(path.parent)
    found, is_own = os.fstat(handle), is_mine(below)
    # A second name of a file may be of one that lies elsewhere.
    if stat.S_ISREG(found.st_mode) and (is_own or found.st_nlink == 1):
        return handle, is_own
    os.close(handle)
    raise ForeignFileError(path, "not a regular file with one name, so nothing is written to it")


def _parse(content: bytes) -> Iterator[Event]:
    """The events in `content`.

    Lines that were torn, cut by its edges, or have facts that cannot be meant, are passed over.
    """
    for line in content.split(b"\n"):
        if not line.strip():
            continue
        try:
            event = Event.model_validate_json(line)
        except ValidationError:
            continue
        is_long = has_long_number(line) and problem_with_numbers(event.data) is not None
        if not is_long and problem_with_facts(event.kind, event.data) is None:
            yield event
