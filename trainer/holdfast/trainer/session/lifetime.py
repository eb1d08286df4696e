"""How long a session lasts, in which process, and which exception ended its training."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from holdfast.contracts.errors import SessionError
from holdfast.trainer.process.signals import FailureRecord
from holdfast.trainer.ranks import forks

# The open session, by process. Two in one process would share the node's status table, the flusher
# and torch's process groups.
_live: dict[int, weakref.ref[object]] = {}


class Lifetime:
    """The time in which a program may use its session, in the process that made it."""

    is_closed = False

    def __init__(self) -> None:
        self.forks = forks.count
        self.failures = FailureRecord()
        self._owner = os.getpid()
        # The exception that the program handled when its loop began, which is none of the loop's.
        self._around = _handled()
        self._at_exit: Callable[[], None] | None = None

    @property
    def is_over(self) -> bool:
        """True after the end, and in a forked child, which has no part in its parent's session."""
        # Asking for the process id would be a system call in each step.
        return self.is_closed or self.forks != forks.count

    def require_open(self, name: str, step: int) -> None:
        """Raise `SessionError` if this is over. `name` is the call, `step` the last step."""
        if self.is_closed:
            raise SessionError(
                f"{name}: this Session has ended after step {step}, because it was "
                "closed. Call it before close() or the end of the with block; or create another "
                "Session, which continues from the newest checkpoint"
            )
        if self.is_over:
            raise SessionError(
                f"{name}: this process is a fork of the process {self._owner}, to which the "
                "Session belongs. Call it there, and send it what this process has found"
            )

    def release_at_exit(self, release: Callable[..., None]) -> None:
        """Call `release` when the program ends without `close`, to write what is still queued.

        It is a method of the session. A session that nothing uses any more is released before.
        """
        self._at_exit = functools.partial(_call, weakref.WeakMethod(release))
        atexit.register(self._at_exit)

    def end(self) -> None:
        """End the session for its program."""
        self.is_closed = True
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)

    # --- exceptions -----------------------------------------------------------------------

    def enter_loop(self) -> None:
        """Take the exception that the program handles now as none of the loop's."""
        self._around = _handled()

    @property
    def is_handling(self) -> bool:
        """True while the program handles an exception that it did not handle before its loop."""
        return _handled() not in (None, self._around)

    def passing(self) -> BaseException | None:
        """Return the exception that passes from the program's loop to its caller, or None."""
        error = sys.exc_info()[1]
        is_exit = isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and error.code in (None, 0)
        )
        return error if self.is_handling and not is_exit else None


class _Session(Protocol):
    _life: Lifetime

    @property
    def step(self) -> int: ...


S = TypeVar("S", bound=_Session)
P = ParamSpec("P")
R = TypeVar("R")


def while_open(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let `method` raise `SessionError` after the session has ended, and in a forked child."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **options: P.kwargs) -> R:
        # As `require_open`, without two calls in each step.
        life = self._life
        if life.is_closed or life.forks != forks.count:
            life.require_open(method.__name__, self.step)
        return method(self, *args, **options)

    return call


@contextlib.contextmanager
def claimed(session: object, abandon: Callable[[], None]) -> Iterator[None]:
    """Register `session` as the open session of this process, until `release`.

    If the body raises, call `abandon` and release the session. Raises `SessionError` if another
    session is open.
    """
    if is_claimed():
        # Parts of a session refer to each other, so one that was dropped may still be there.
        gc.collect()
    if is_claimed():
        raise SessionError(
            "this process already has a Session; expected one at a time. Give one Session all "
            "models and optimizers as lists, and further objects as extra; or call close() on the "
            "first before you create the second. Something still refers to the first, such as a "
            "variable, a loop that was left, or the last traceback of an interactive Python"
        )
    # A forked child inherits the entry of its parent. It may open its own session.
    _live.clear()
    _live[os.getpid()] = weakref.ref(session)
    try:
        yield
    except BaseException:
        # The error reaches the program, which may then create another session.
        release(session)
        abandon()
        raise


def release(session: object) -> None:
    """Allow another session, if `session` is the registered one."""
    holder = _live.get(os.getpid())
    if holder is not None and holder() is session:
        _live.clear()


def is_claimed() -> bool:
    """Return True if this process has an open session."""
    holder = _live.get(os.getpid())
    return holder is not None and holder() is not None


def _call(held: weakref.WeakMethod[Callable[..., Any]]) -> None:
    if (method := held()) is not None:
        method(wait=False)


def _handled() -> int | None:
    """Return the identity of the exception that is being handled, without keeping it alive."""
    error = sys.exc_info()[1]
    return None if error is None else id(error)
