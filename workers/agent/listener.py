"""Hears what asks for a stop, in a thread of its own, so that no node can delay it."""

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
    """Signals, the stop file and the time limit become one stop request, journaled at once.

    Runs from construction until `close`. Safe to ask from several threads.
    """

    def __init__(self, context: AgentContext, signals: SignalBox, stops: StopWatch) -> None:
        self._context, self._signals, self._stops = context, signals, stops
        # Of its own: a writer serves one thread.
        self._journal = JournalWriter(context.attempt.node_journal(context.node))
        self._lock = threading.Lock()
        self._told: deque[str] = deque()
        self._stop_request: StopRequest | None = None
        self._was_requested = threading.Event()
        self._late_deadline: float | None = None
        self._failure: Exception | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)
        self._thread.start()

    @property
    def stop_request(self) -> StopRequest | None:
        """Why to stop and by when, with the earliest deadline heard so far.

        Raises what the thread failed of: an agent that hears nothing must not go on.
        """
        if self._failure is not None:
            raise self._failure
        return self._stop_request

    @property
    def late_deadline(self) -> float:
        """The earliest deadline, Unix seconds, of what was heard since `end`."""
        return math.inf if self._late_deadline is None else self._late_deadline

    def wait(self, timeout_s: float) -> None:
        """Wait `timeout_s`; the first stop request ends it."""
        if self._stop_request is None:
            self._was_requested.wait(timeout_s)
        else:
            time.sleep(timeout_s)

    def hear(self, name: str) -> None:
        """A signal that another node's agent caught."""
        self._told.append(name)

    def end(self) -> None:
        """How the attempt ended is known: what comes now sets a deadline and nothing else."""
        with self._lock:
            self._late_deadline = math.inf

    def take_up(self, stop_request: StopRequest) -> None:
        """A reason to stop, from whomever."""
        with self._lock:
            if self._late_deadline is not None:
                self._late_deadline = min(self._late_deadline, stop_request.deadline or math.inf)
                return
            if self._stop_request is not None:
                self._stop_request = self._stop_request.hurried_by(stop_request)
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
                while self._told:
                    names.append(self._told.popleft())
                self._look(names)
        except Exception as error:
            # The edge of the thread: raised again where the lead asks for the stop request.
            self._failure = error
            self._was_requested.set()

    def _look(self, names: list[str]) -> None:
        now = time.time()
        for name in names:
            if self._stop_request is not None and self._late_deadline is None:
                # Signals repeat, and the second of a pair says nothing new.
                continue
            stop_request, judgement = self._stops.from_signal(name, now)
            if stop_request is not None:
                self.take_up(stop_request)
                continue
            words = f"{name}: a warning of the time limit ({judgement.detail})"
            with self._lock:
                number = self._context.attempt.number
                self._journal.append(EventKind.NOTE, attempt=number, text=words)
        for stop_request in (self._stops.from_file(now), self._stops.from_limit(now)):
            if stop_request is not None:
                self.take_up(stop_request)
