"""A stage for real code: actors are threads of which exactly one runs at a time.

An actor can be held before each of its calls to the file system, before each lock and before each
command to the scheduler. Time is virtual: it moves only when every actor sleeps, so nothing waits.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{12,32}\b")
# An actor that makes this many calls in one schedule does not end.
CALLS_MAX: Final = 200_000
# A thread that does not come back within this many real seconds waits for something real.
REAL_S: Final = 60.0
_here = threading.local()


class Halt(BaseException):
    """Ends an actor's thread when the schedule is over."""


@dataclass(frozen=True)
class Call:
    """One call of an actor, and what it concerns.

    `kind` is `read`, `list` (names in a folder), `write`, `name` (one appears or disappears),
    `lock`, `ask` or `order` (a command that does not or does change the scheduler's state).
    """

    kind: str
    what: str

    def conflicts(self, other: Call) -> bool:
        """Return True if the order of the two calls can matter."""
        if "list" in {self.kind, other.kind}:
            listed, name = (self, other) if self.kind == "list" else (other, self)
            return name.kind == "name" and name.what.rpartition("/")[0] == listed.what
        return self.what == other.what and not {self.kind, other.kind} <= {"read", "ask"}


@dataclass
class Actor:
    """One process of the play. `ahead_s` is by how much its host's clock is ahead."""

    name: str
    work: Callable[[], object]
    ahead_s: float = 0.0
    state: str = "ready"
    wake_at: float = 0.0
    calls: list[Call] = field(default_factory=list)
    # Held before the call of this number, and before the change of this number.
    hold_at: int = 0
    changes: int = 0
    hold_at_change: int = 0
    result: object = None
    error: BaseException | None = None
    thread: threading.Thread | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_halted: bool = False
    # Another actor killed this process; it makes no more calls.
    is_killed: bool = False

    @property
    def has_ended(self) -> bool:
        return self.state == "ended"


def current() -> Actor | None:
    """Return the actor whose thread this is, or None."""
    return getattr(_here, "actor", None)


class Stage:
    """Runs actors one at a time, each for as long as the test says."""

    def __init__(self, start: float) -> None:
        self.now = self.start = start
        self.actors: list[Actor] = []
        self.trace: list[str] = []
        self._main = threading.Semaphore(0)
        self._is_closing = False

    # --- what the test does -------------------------------------------------------------

    def add(self, name: str, work: Callable[[], object], ahead_s: float = 0.0) -> Actor:
        """Add an actor, which does not run yet."""
        actor = Actor(name, work, ahead_s, wake_at=self.now)
        self.actors.append(actor)
        return actor

    def run(self, actor: Actor, calls: int | None = None, changes: int | None = None) -> str:
        """Let an actor run until it sleeps, ends, or has made `calls` more calls.

        With `calls`, it is held before the call after those, and with `changes` before the lock,
        command or write after that many more of them. Returns its state.
        """
        self._reap()
        if actor.has_ended:
            return actor.state
        if calls is not None:
            actor.hold_at = len(actor.calls) + calls + 1
        if changes is not None:
            actor.hold_at_change = actor.changes + changes + 1
        if actor.thread is None:
            actor.thread = threading.Thread(target=self._body, args=(actor,), daemon=True)
            actor.thread.start()
        actor.state = "running"
        actor.turn.release()
        if not self._main.acquire(timeout=REAL_S):
            raise RuntimeError(
                f"{actor.name} waits for something that is not played: {self.tail()}"
            )
        return actor.state

    def run_to(self, actor: Actor, calls: int, until_s: float) -> bool:
        """Let an actor make `calls` more calls, over sleeps too; False if it makes fewer.

        The others run only when time passes. The actor is then held before its next call.
        """
        actor.hold_at = len(actor.calls) + calls + 1
        limit = self.now + until_s
        while not actor.has_ended:
            if actor.state == "asleep" and actor.wake_at > self.now:
                if actor.wake_at > limit or not self.tick(limit):
                    return False
            else:
                self.run(actor)
            if actor.state == "held":
                return True
        return False

    def tick(self, limit: float) -> bool:
        """Run the actor that is due first, moving the clock to its time; False if none is."""
        self._reap()
        due = [one for one in self.actors if not one.has_ended]
        if not due:
            return False
        first = min(due, key=lambda one: max(one.wake_at, self.now))
        if first.wake_at > limit:
            self.now = limit
            return False
        self.now = max(self.now, first.wake_at)
        self.run(first)
        return True

    def tail(self, count: int = 40) -> str:
        """Return the newest lines of the trace."""
        return "\n".join(self.trace[-count:])

    def close(self) -> None:
        """End every actor's thread."""
        self._is_closing = True
        for actor in self.actors:
            if actor.thread is not None and not actor.has_ended:
                self.end(actor)
        for actor in self.actors:
            if actor.thread is not None:
                actor.thread.join(REAL_S)

    def _reap(self) -> None:
        """End the actors that others have killed."""
        for actor in self.actors:
            if actor.is_killed and not actor.has_ended:
                self.end(actor)

    def end(self, actor: Actor) -> None:
        """End an actor's thread by an exception, from the test's own thread."""
        actor.is_halted = True
        if actor.thread is None:
            actor.state = "ended"
            return
        while not actor.has_ended:
            actor.turn.release()
            if not self._main.acquire(timeout=REAL_S):
                raise RuntimeError(f"{actor.name} cannot be ended")

    # --- what an actor's thread does ----------------------------------------------------

    def _body(self, actor: Actor) -> None:
        actor.turn.acquire()
        _here.actor = actor
        try:
            with contextlib.suppress(Halt):
                if not actor.is_halted:
                    actor.result = actor.work()
        except BaseException as error:
            # The checks judge how a process ended.
            actor.error = error
        finally:
            _here.actor = None
            actor.state = "ended"
            self._note(actor, f"ended{f': {actor.error!r}' if actor.error else ''}")
            self._main.release()

    def call(self, kind: str, what: str) -> None:
        """Note a call that the actor is about to make, and hold the actor here if it is time."""
        actor = current()
        if actor is None:
            return
        if actor.is_halted:
            # A killed process cleans nothing up.
            if kind in {"name", "write", "order"}:
                raise Halt
            return
        actor.calls.append(Call(kind, what))
        actor.changes += kind not in {"read", "list"}
        if len(actor.calls) > CALLS_MAX:
            raise RuntimeError(f"{actor.name} made {CALLS_MAX} calls: {self.tail()}")
        if kind not in {"read", "list", "ask"} and "/heartbeats/" not in what:
            self._note(actor, f"{kind} {what}")
        is_change = kind not in {"read", "list"} and actor.changes == actor.hold_at_change
        if is_change or len(actor.calls) == actor.hold_at:
            actor.state, actor.wake_at = "held", self.now
            self._hand_over(actor)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the actor."""
        actor = current()
        if actor is None:
            raise RuntimeError("only actors sleep in virtual time")
        if actor.is_halted:
            raise Halt
        actor.state, actor.wake_at = "asleep", self.now + max(seconds, 0.0)
        self._hand_over(actor)

    def _hand_over(self, actor: Actor) -> None:
        self._main.release()
        actor.turn.acquire()
        if actor.is_halted:
            raise Halt
        actor.state = "running"

    def _note(self, actor: Actor, text: str) -> None:
        self.trace.append(f"{self.now % 100_000:9.2f} {actor.name:<12} {text}")


def plain(path: str) -> str:
    """Return a path without the random part of a temporary file's name."""
    return _TEMPORARY.sub(".TMP", path)
