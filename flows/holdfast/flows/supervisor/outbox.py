"""Delivery of a run's journal lines to a service: in order, and each line once.

The journals are the source. A file of the run has the last line of each journal that the service
has stored. A service that is down delays lines and loses none, and a supervisor that is killed
loses none either: the next one asks the service which lines it has, and sends the others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from uuid import UUID, uuid5

from pydantic import Field

from holdfast.contracts.disk.bounds import Count, Moment
from holdfast.contracts.disk.durable import make_directory
from holdfast.contracts.disk.journal import Event
from holdfast.contracts.errors import HoldfastError, ServiceError
from holdfast.contracts.records.documents import Document, read_document, write_document
from holdfast.contracts.records.history import order_of
from holdfast.flows.supervisor.flow_lock import FlowLock

POLL_S: Final = 1.0
ASKED_MAX: Final = 50
# A service stores lines some seconds after it has accepted them.
ASK_AFTER_S: Final = 8.0
ASK_AGAIN_S: Final = 5.0
# Long enough that a service has stored or lost a line that it accepted. Prefect with SQLite loses
# a whole batch if a line comes twice in it.
RESEND_AFTER_S: Final = 60.0
# For lines that a former supervisor may have sent.
RESEND_INHERITED_S: Final = 20.0
BACK_OFF_S_MAX: Final = 30.0
SAVE_S: Final = 5.0
# While the run's end waits for the service.
HURRY_S: Final = 0.3

Number = tuple[Count, Count]


class RefusedLineError(ServiceError):
    """The service will never accept a line."""


@dataclass(frozen=True)
class OutboxLine:
    """A journal line to deliver. `at` is its time, later than that of each line before it."""

    id: UUID
    event: Event
    at: float


class Service(Protocol):
    """Where lines go. The methods raise `ServiceError` or `OSError` if it cannot be used.

    It takes `batch_max` lines at once. If `is_prompt`, it has stored them when `send` returns.
    `advice` says what to do about lines that it did not get before the run's supervisor ended.
    """

    @property
    def batch_max(self) -> int: ...
    @property
    def is_prompt(self) -> bool: ...
    @property
    def advice(self) -> str: ...

    def wants(self, event: Event) -> bool:
        """Return whether the service gets lines such as this one."""
        ...

    def send(self, lines: Sequence[OutboxLine]) -> None:
        """Send lines. Raises `RefusedLineError` if the service will never accept one of them."""
        ...

    def stored(self, lines: Sequence[OutboxLine]) -> set[UUID]:
        """Return which of the lines the service has stored."""
        ...


class Delivered(Document):
    """How far the journals are delivered: the last `opening` and `sequence` of each."""

    format: Count = 1
    last: dict[str, Number] = Field(default_factory=dict)
    newest: Moment = 0.0


@dataclass
class _Entry:
    """A line on its way. `ask_at` and `resend_at` are times of the monotonic clock."""

    line: OutboxLine
    stream: str
    is_stored: bool = False
    is_sent: bool = False
    ask_at: float = 0.0
    resend_at: float = 0.0


class Outbox:
    """Delivers the journals of the run `uid` to `service`.

    `file` has how far. `look` gives each line that may be new to the function that it gets. It may
    leave out lines that it gave before. `failed` is called with the error when the service fails
    for the first time, and `refused` with that of a lost line.
    """

    def __init__(
        self,
        file: Path,
        uid: str,
        service: Service,
        *,
        look: Callable[[Callable[[Event], None]], None],
        failed: Callable[[Exception], None] = lambda _: None,
        refused: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        self._file, self._run, self._service = file, UUID(uid), service
        self._look, self._failed, self._refused = look, failed, refused
        self._entries: deque[_Entry] = deque()
        self._wake = threading.Event()
        self._closes_at: float | None = None
        self._thread: threading.Thread | None = None
        self._done: dict[str, Number] = {}
        self._taken: dict[str, Number] = {}
        self._newest = self._done_until = 0.0
        self._is_changed = self._has_begun = self._has_failed = False
        self._save_at = self._retry_at = self._back_off_s = 0.0

    def offer(self) -> None:
        """Have a thread deliver what is new. Returns at once."""
        if self._thread is None or not self._thread.is_alive():
            self._closes_at = None
            self._thread = threading.Thread(target=self._work, name="holdfast-outbox", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self, limit_s: float) -> bool:
        """Deliver what is left, for at most `limit_s` seconds; return whether all is delivered."""
        self._closes_at = time.monotonic() + limit_s
        self._wake.set()
        if self._thread is not None:
            self._thread.join(limit_s + POLL_S)
            if self._thread.is_alive():
                return False
            self._thread, self._closes_at = None, None
        return self._is_complete

    @property
    def _is_complete(self) -> bool:
        return self._has_begun and not self._entries

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            lock: FlowLock | None = None
            while True:
                now, closes_at = time.monotonic(), self._closes_at
                try:
                    lock = lock or stack.enter_context(self._open_lock())
                    if lock.is_held or lock.try_take():
                        self.turn(now)
                except (HoldfastError, OSError) as error:
                    # The run's folder may be unavailable for a while.
                    self._fail(error, now)
                if closes_at is not None and (self._is_complete or now >= closes_at):
                    return
                self._wake.wait(POLL_S if closes_at is None else HURRY_S)
                self._wake.clear()

    def _open_lock(self) -> FlowLock:
        """Return the lock that keeps two processes from delivering the same lines."""
        make_directory(self._file.parent)
        return FlowLock(self._file.with_suffix(".lock"))

    def turn(self, now: float) -> None:
        """Do what is due at `now`, a time of the monotonic clock. Raises for the run's folder."""
        is_inherited = not self._has_begun and self._begin()
        self._collect(now, is_inherited=is_inherited)
        is_closing = self._closes_at is not None
        if now >= self._retry_at or is_closing:
            try:
                self._send(now)
                self._ask(now)
            except (ServiceError, OSError) as error:
                self._fail(error, now)
            else:
                self._has_failed, self._back_off_s = False, 0.0
        self._pass_over()
        is_urgent = self._service.is_prompt or (is_closing and not self._entries)
        if self._is_changed and (now >= self._save_at or is_urgent):
            self._save()
            self._save_at = now + SAVE_S

    def _begin(self) -> bool:
        """Read how far lines are delivered; return whether a former process delivered some."""
        try:
            known = read_document(Delivered, self._file)
        except HoldfastError:
            # Damaged. The service knows which lines it has.
            known = Delivered()
        self._done = dict(known.last) if known else {}
        self._taken = dict(self._done)
        self._newest = self._done_until = known.newest if known else 0.0
        if known is None:
            make_directory(self._file.parent)
            self._save()
        self._has_begun = True
        return known is not None

    def _collect(self, now: float, *, is_inherited: bool) -> None:
        """Queue the lines that are new, oldest first."""
        new: dict[UUID, tuple[str, Event]] = {}

        def take(event: Event) -> None:
            stream = f"{event.data.get('attempt', 0)}/{event.writer}"
            is_new = (event.opening, event.sequence) > self._taken.get(stream, (0, -1))
            if is_new and self._service.wants(event):
                text = f"{stream}/{event.opening}/{event.sequence}/{event.time!r}"
                new[uuid5(self._run, text)] = stream, event

        try:
            self._look(take)
        finally:
            # If one journal cannot be read, the lines of the others are not given again.
            self._queue(new, now, is_inherited=is_inherited)

    def _queue(
        self, new: Mapping[UUID, tuple[str, Event]], now: float, *, is_inherited: bool
    ) -> None:
        for id_, (stream, event) in sorted(new.items(), key=lambda one: order_of(one[1][1])):
            # Hosts' clocks differ, and lines can come late. The service orders by time.
            self._newest = max(event.time, self._newest + 1e-6)
            self._taken[stream] = event.opening, event.sequence
            entry = _Entry(OutboxLine(id_, event, self._newest), stream)
            if is_inherited:
                entry.is_sent, entry.ask_at = True, now + ASK_AFTER_S
                entry.resend_at = now + RESEND_INHERITED_S
            self._entries.append(entry)

    def _send(self, now: float) -> None:
        most = self._service.batch_max
        while batch := [entry for entry in self._entries if not entry.is_sent][:most]:
            try:
                self._service.send([entry.line for entry in batch])
            except RefusedLineError as error:
                if len(batch) > 1:
                    self._send_singly(batch, now)
                    continue
                self._refused(error)
                batch[0].is_stored = True
            self._mark_sent(batch, now)

    def _send_singly(self, batch: Sequence[_Entry], now: float) -> None:
        """Find the refused lines of a batch. The others are delivered."""
        for entry in batch:
            try:
                self._service.send([entry.line])
            except RefusedLineError as error:
                self._refused(error)
                entry.is_stored = True
            self._mark_sent([entry], now)

    def _mark_sent(self, batch: Iterable[_Entry], now: float) -> None:
        for entry in batch:
            entry.is_sent = True
            entry.is_stored |= self._service.is_prompt
            entry.ask_at, entry.resend_at = now + ASK_AFTER_S, now + RESEND_AFTER_S

    def _ask(self, now: float) -> None:
        """Ask the service which of the sent lines it has stored; send missing ones again later."""
        open_ = [entry for entry in self._entries if entry.is_sent and not entry.is_stored]
        if not open_ or (now < open_[0].ask_at and self._closes_at is None):
            return
        asked = open_[:ASKED_MAX]
        stored = self._service.stored([entry.line for entry in asked])
        for entry in asked:
            entry.is_stored = entry.line.id in stored
            entry.ask_at = now + ASK_AGAIN_S
            if not entry.is_stored and now >= entry.resend_at:
                entry.is_sent = False

    def _pass_over(self) -> None:
        """Forget the oldest lines, up to the first that may not be stored."""
        while self._entries and self._entries[0].is_stored:
            entry = self._entries.popleft()
            event = entry.line.event
            self._done[entry.stream] = event.opening, event.sequence
            self._done_until = entry.line.at
            self._is_changed = True

    def _save(self) -> None:
        write_document(self._file, Delivered(last=self._done, newest=self._done_until))
        self._is_changed = False

    def _fail(self, error: Exception, now: float) -> None:
        self._back_off_s = min(BACK_OFF_S_MAX, 2.0 * self._back_off_s or POLL_S)
        self._retry_at = now + self._back_off_s
        if not self._has_failed:
            self._has_failed = True
            self._failed(error)
