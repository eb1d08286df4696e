"""One live session per process: two would share a node's status table, a flusher and torch's
groups."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator

from holdfast.contracts.errors import SessionError

_live: dict[int, weakref.ref[object]] = {}


@contextlib.contextmanager
def claimed(session: object, abandon: Callable[[], None]) -> Iterator[None]:
    """Make `session` the live one of this process, until `release`.

    What fails within is abandoned, and `session` is no longer live. Raises `SessionError` when
    there is another.
    """
    holder = _live.get(os.getpid())
    if holder is not None and holder() is not None:
        raise SessionError(
            "this process already has a Session; expected one at a time. Give one Session all "
            "models and optimizers as lists, and further objects as extra; or call close() on the "
            "first before you make the second"
        )
    # A forked child is a process of its own, whatever it inherited.
    _live.clear()
    _live[os.getpid()] = weakref.ref(session)
    try:
        yield
    except BaseException:
        # Whatever it was goes on to the program, which may make another session.
        release(session)
        abandon()
        raise


def release(session: object) -> None:
    """Another session may be made, if `session` was the live one."""
    holder = _live.get(os.getpid())
    if holder is not None and holder() is session:
        _live.clear()
