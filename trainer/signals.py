"""Signals that become a flag, and exceptions that become torchrun's error file.

Handlers are installed only where there is no agent: under one, TERM and USR2 are ignored by the
whole tree, and the agent turns them into the stop agreement.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from holdfast.contracts.rank_status import RankRecord

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR2)


class SignalFlags:
    """TERM and USR2 set a word in the rank's record, from construction until `close`."""

    def __init__(self, record: RankRecord) -> None:
        """Does nothing outside the main thread, where Python allows no handlers."""
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return

        def catch(number: int, _frame: FrameType | None) -> None:
            record.catch(number)

        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, catch)
        os.register_at_fork(after_in_child=self._forget_in_child)

    def close(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _forget_in_child(self) -> None:
        """A forked child shares the status table: `terminate()` on it must not stop the run."""
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
        self._previous.clear()


def ignore_stop_signals() -> None:
    """Let this process, a helper of a rank, outlive the signals that stop the run."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_deaf_helpers_at_exit() -> None:
    """When the program ends, end the daemonic children that ignore stop signals.

    `multiprocessing` sends its daemons TERM when the interpreter ends and then waits for them
    without a limit. A loader that is still referenced by then would keep its rank for ever.
    """
    atexit.unregister(_end_deaf_helpers)
    atexit.register(_end_deaf_helpers)


def _end_deaf_helpers() -> None:
    deaf = [child for child in multiprocessing.active_children() if _is_deaf(child)]
    if deaf and threading.current_thread() is threading.main_thread():
        # torch's loader takes a worker's death for an error, which it is not any more.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in deaf:
        child.kill()


def _is_deaf(child: BaseProcess) -> bool:
    """True for a daemon that ignores TERM."""
    try:
        status = Path(f"/proc/{child.pid}/status").read_text()
    except OSError:
        return False
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return child.daemon and bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


class FailureRecord:
    """Writes the first uncaught exception where torchrun and the agent look for it."""

    def __init__(self) -> None:
        self._recorded: BaseException | None = None
        self._previous_hook = sys.excepthook
        self._hook: Callable[..., None] = self._on_uncaught
        sys.excepthook = self._hook

    def write(self, error: BaseException) -> None:
        """Write `error` to the file that torchrun named, once; nothing without torchrun."""
        if error is self._recorded or not isinstance(error, Exception):
            return
        self._recorded = error
        trace = error.__traceback__
        try:
            # torchrun's handler formats the exception that is being handled, so it must be.
            raise error
        except Exception as current:
            # Whatever the program raised is recorded with its own traceback, without this frame.
            current.__traceback__ = trace
            get_error_handler().record_exception(current)
        finally:
            error.__traceback__ = trace

    def close(self) -> None:
        """Put back the hook that was there before, unless another one came after ours."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook

    def _on_uncaught(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self.write(error)
        self._previous_hook(kind, error, trace)
