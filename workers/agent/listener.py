"""A thread that listens for stop requests, so that no node can delay them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import Final

from holdfast.contracts.journal import EventKind, JournalWriter
from holdfast.workers.agent.context import AgentContext
from holdfast.workers.agent.signals import SignalBox
from holdfast.workers.agent.stops import StopRequest, StopWatch

LISTEN_S: Final = 0.2
STOP_WAIT_S: Final = 5.0


class StopListener:
    """Turns signals, the stop file and the time limit into one stop request, journaled at once.

    Runs from construction until `close`. Safe for use by several threads.
    """

    def __init__(self, context: AgentContext, signals: SignalBox, stops: StopWatch) -> None:
        self._context, self._signals, self._stops = context, signals, stops
        # A separate journal writer, because each writer serves one thread.
        self._journal = JournalWriter(context.attempt.node_journal(context.node))
        self._lock = threading.Lock()
        self._forwarded: deque[str] = deque()
        self._stop_request: StopRequest | None = None
        self._was_requested = threading.Event()
        self._late_deadline: float | None = None
        self._failure: Exception | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)
        self._thread.start()

    @property
    def stop_request(self) -> StopRequest | None:
        """The stop request with the earliest deadline received so far, or None.

        Raises the error of the thread, if any: an agent that cannot hear stop requests must end.
        """
        if self._failure is not None:
            raise self._failure
        return self._stop_request

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

    def end(self) -> None:
        """Mark the attempt's ending as known. Later requests only set a deadline."""
        with self._lock:
            self._late_deadline = math.inf

    def accept(self, stop_request: StopRequest) -> None:
        """Accept a stop request from any source."""
        with self._lock:
            if self._late_deadline is not None:
                self._late_deadline = min(self._late_deadline, stop_request.deadline or math.inf)
                return
            if self._stop_request is not None:
                self._stop_request = self._stop_request.with_deadline_of(stop_request)
                return
            self._stop_request = stop_request
            self._journal.append(
                EventKind.SIGNAL,
                attempt=self._context.attempt.number,
                source=stop_request.source,
                name=stop_request.name,
                cause=stop_request.cause.value,
                deadline=stop_request.deadline,
                detail=stop_request.detail,
            )
        self._was_requested.set()

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        self._thread.join(STOP_WAIT_S)
        if not self._thread.is_alive():
            self._journal.close()

    def _listen(self) -> None:
        try:
            while not self._is_closed.is_set():
                names = self._signals.wait(LISTEN_S)
                while self._forwarded:
                    names.append(self._forwarded.popleft())
                self._look(names)
        except Exception as error:
            # Store the error of the thread; `stop_request` raises it in the agent's loop.
            self._failure = error
            self._was_requested.set()

    def _look(self, names: list[str]) -> None:
        now = time.time()
        for name in names:
            if self._stop_request is not None and self._late_deadline is None:
                # Signals repeat, and the second of a pair adds nothing.
                continue
            stop_request, judgement = self._stops.from_signal(name, now)
            if stop_request is not None:
                self.accept(stop_request)
                continue
            text = f"{name}: a warning of the time limit ({judgement.detail})"
            with self._lock:
                number = self._context.attempt.number
                self._journal.append(EventKind.NOTE, attempt=number, text=text)
        for stop_request in (self._stops.from_file(now), self._stops.from_limit(now)):
            if stop_request is not None:
                self.accept(stop_request)
