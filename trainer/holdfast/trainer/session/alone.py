"""The limit of one open session per process.

Two sessions would share the node's status table, the flusher and torch's process groups.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Callable, Iterator

from holdfast.contracts.errors import SessionError

_live: dict[int, weakref.ref[object]] = {}


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
