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
from holdfast.workers.agent.stops import StopWatch, StopWish

LISTEN_S: Final = 0.2
STOP_WAIT_S: Final = 5.0


class StopListener:
    """Signals, the stop file and the time limit become one wish, journaled when it is heard.

    Runs from construction until `close`. Safe to ask from several threads.
    """

    def __init__(self, context: AgentContext, signals: SignalBox, stops: StopWatch) -> None:
        self._context, self._signals, self._stops = context, signals, stops
        # Of its own: a writer serves one thread.
        self._journal = JournalWriter(context.attempt.node_journal(context.node))
        self._lock = threading.Lock()
        self._told: deque[str] = deque()
        self._wish: StopWish | None = None
        self._wished = threading.Event()
        self._late_deadline: float | None = None
        self._failure: Exception | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="stop-listener", daemon=True)
        self._thread.start()

    @property
    def wish(self) -> StopWish | None:
        """Why to stop and by when, with the earliest deadline heard so far.

        Raises what the thread failed of: an agent that hears nothing must not go on.
        """
        if self._failure is not None:
            raise self._failure
        return self._wish

    @property
    def late_deadline(self) -> float:
        """The earliest deadline, Unix seconds, of what was heard since `end`."""
        return math.inf if self._late_deadline is None else self._late_deadline

    def wait(self, timeout_s: float) -> None:
        """Wait `timeout_s`; the first wish ends it."""
        if self._wish is None:
            self._wished.wait(timeout_s)
        else:
            time.sleep(timeout_s)

    def hear(self, name: str) -> None:
        """A signal that another node's agent caught."""
        self._told.append(name)

    def end(self) -> None:
        """How the attempt ended is known: what comes now sets a deadline and nothing else."""
        with self._lock:
            self._late_deadline = math.inf

    def take_up(self, wish: StopWish) -> None:
        """A reason to stop, from whomever."""
        with self._lock:
            if self._late_deadline is not None:
                self._late_deadline = min(self._late_deadline, wish.deadline or math.inf)
                return
            if self._wish is not None:
                self._wish = self._wish.hurried_by(wish)
                return
            self._wish = wish
            self._journal.append(
                EventKind.SIGNAL,
                attempt=self._context.attempt.number,
                source=wish.source,
                name=wish.name,
                cause=wish.cause.value,
                deadline=wish.deadline,
                detail=wish.detail,
            )
        self._wished.set()

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
            # The edge of the thread: raised again where the lead asks for the wish.
            self._failure = error
            self._wished.set()

    def _look(self, names: list[str]) -> None:
        now = time.time()
        for name in names:
            if self._wish is not None and self._late_deadline is None:
                # Signals repeat, and the second of a pair says nothing new.
                continue
            wish, judgement = self._stops.from_signal(name, now)
            if wish is not None:
                self.take_up(wish)
                continue
            words = f"{name}: a warning of the time limit ({judgement.detail})"
            with self._lock:
                number = self._context.attempt.number
                self._journal.append(EventKind.NOTE, attempt=number, text=words)
        for wish in (self._stops.from_file(now), self._stops.from_limit(now)):
            if wish is not None:
                self.take_up(wish)
