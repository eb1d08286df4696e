"""Threads that listen for stop requests, so that neither a node nor storage can delay a signal."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.contracts.disk.journal import EventKind, JournalWriter
from holdfast.contracts.node import clocks
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.stops.signals import SignalBox
from holdfast.workers.agent.stops.sources import StopRequest, StopWatch

LISTEN_S: Final = 0.2
STOP_WAIT_S: Final = 5.0


class StopListener:
    """Turns signals, the stop file and the time limit into one stop request, journaled immediately.

    Runs from construction until `close`. Safe for use by several threads.
    """

    def __init__(self, context: AgentContext, signals: SignalBox, stops: StopWatch) -> None:
        self._context, self._signals, self._stops = context, signals, stops
        # A separate journal writer, because each writer serves one thread.
        self._journal = JournalWriter(context.attempt.node_journal(context.node))
        self._lock, self._recording = threading.Lock(), threading.Lock()
        self._forwarded: deque[str] = deque()
        self._stop_request: StopRequest | None = None
        self._was_requested = threading.Event()
        self._late_deadline: float | None = None
        self._failure: Exception | None = None
        self._is_closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(look,), name=name, daemon=True)
            for name, look in (
                ("stop-listener", self._listen),
                ("stop-file", self._look_at_storage),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def stop_request(self) -> StopRequest | None:
        """The stop request with the earliest deadline received so far, or None.

        Raises the error of the thread, if any: an agent that cannot hear stop requests must end.
        """
        if self._failure is not None:
            raise self._failure
        return self._stop_request

    @property
    def drained(self) -> Mapping[str, str]:
        """The job's nodes that are drained, with the reasons of their operator."""
        return self._stops.drained

    @property
    def late_deadline(self) -> float:
        """The earliest deadline (Unix seconds) of requests received since `end`."""
        return math.inf if self._late_deadline is None else self._late_deadline

    def wait(self, timeout_s: float) -> None:
        """Wait for `timeout_s` seconds, or until the first stop request."""
        if self._stop_request is None:
            self._was_requested.wait(timeout_s)
        else:
            time.sleep(timeout_s)

    def hear(self, name: str) -> None:
        """Add a signal that another node's agent received."""
        self._forwarded.append(name)
        self._signals.wake()

    def recall(self, known: StopRequest | None) -> None:
        """Take over the stop request of a lost lead, and what this node had heard meanwhile."""
        if known is not None:
            self.accept(known, is_journaled=True)
        for name in self._signals.heard:
            self.hear(name)

    def end(self) -> None:
        """Mark the attempt's ending as known. Later requests only set a deadline."""
        with self._lock:
            self._late_deadline = math.inf

    def accept(self, stop_request: StopRequest, *, is_journaled: bool = False) -> None:
        """Accept a stop request from any source."""
        with self._lock:
            if self._late_deadline is not None:
                self._late_deadline = min(self._late_deadline, stop_request.deadline or math.inf)
                return
            if self._stop_request is not None:
                self._stop_request = self._stop_request.with_deadline_of(stop_request)
                return
            self._stop_request = stop_request
        self._was_requested.set()
        if is_journaled:
            return
        self._record(
            EventKind.SIGNAL,
            source=stop_request.source,
            name=stop_request.name,
            cause=stop_request.cause.value,
            deadline=stop_request.deadline,
            detail=stop_request.detail,
        )

    def close(self) -> None:
        """End the threads. One that waits for storage is left behind."""
        self._is_closed.set()
        for thread in self._threads:
            thread.join(STOP_WAIT_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._journal.close()

    def _record(self, kind: EventKind, **facts: Any) -> None:
        """Journal a line if storage allows. A writer serves one thread at a time."""
        with self._recording, contextlib.suppress(OSError):
            self._journal.append(kind, attempt=self._context.attempt.number, **facts)

    def _run(self, look: Callable[[], None]) -> None:
        try:
            while not self._is_closed.is_set():
                look()
        except Exception as error:
            # Store the error of the thread; `stop_request` raises it in the agent's loop.
            self._failure = error
            self._was_requested.set()

    def _listen(self) -> None:
        names = self._signals.wait(LISTEN_S)
        while self._forwarded:
            names.append(self._forwarded.popleft())
        now = clocks.now()
        for name in names:
            self._judge(name, now)
        if (stop_request := self._stops.from_limit(now)) is not None:
            self.accept(stop_request)

    def _look_at_storage(self) -> None:
        """Look for an operator's request. Storage that fails or hangs delays only this."""
        now = clocks.now()
        with contextlib.suppress(OSError):
            if (stop_request := self._stops.from_file(now)) is not None:
                self.accept(stop_request)
            self._stops.look_at_saves(now)
        self._is_closed.wait(LISTEN_S)

    def _judge(self, name: str, now: float) -> None:
        """Accept the stop request of a signal, or journal that it is only a warning."""
        if self._stop_request is not None and self._late_deadline is None:
            # Signals repeat, and the second of a pair adds nothing.
            return
        stop_request, judgement = self._stops.from_signal(name, now)
        if stop_request is not None:
            self.accept(stop_request)
            return
        text = f"{name}: a warning of the time limit ({judgement.detail})"
        self._record(EventKind.NOTE, text=text)
