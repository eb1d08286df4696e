"""Signal handlers that set a flag, and the record of exceptions in torchrun's error file.

Handlers are installed only without an agent. Under an agent, the whole process tree ignores TERM
and USR2, and the agent starts the stop agreement.
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
from torch.utils.data._utils import signal_handling

from holdfast.contracts.rank_status import RankRecord

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR2)


class SignalFlags:
    """Sets a flag in the rank's record on TERM and USR2, from construction until `close`."""

    def __init__(self, record: RankRecord) -> None:
        """Install the handlers. Only the main thread can: elsewhere this does nothing."""
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return

        def catch(number: int, _frame: FrameType | None) -> None:
            record.catch(number)

        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, catch)
        os.register_at_fork(after_in_child=self._forget_in_child)

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _forget_in_child(self) -> None:
        """Reset a forked child's handlers: `terminate()` on the child must not stop the run.

        A worker of a data loader ignores the signals, once torch has set its handlers. torchrun
        passes a signal on to all processes of a rank, and a rank without its workers fails.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_DFL)
        self._previous.clear()
        _torch._set_worker_signal_handlers = _set_handlers_of_worker


# Torch has no public name for it.
_torch: Any = signal_handling
_set_torch_handlers: Final = _torch._set_worker_signal_handlers


def _set_handlers_of_worker() -> None:
    """Set torch's signal handlers in a worker of a data loader, and then ignore stop signals."""
    _set_torch_handlers()
    ignore_stop_signals()


def ignore_stop_signals() -> None:
    """Ignore the signals that stop the run, in a helper process of a rank."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_deaf_helpers_at_exit() -> None:
    """Register a hook that ends the daemonic children that ignore stop signals.

    When the interpreter ends, `multiprocessing` sends TERM to its daemons and waits for them
    without a limit. A loader that is still referenced then would block its rank forever.
    """
    atexit.unregister(_end_deaf_helpers)
    atexit.register(_end_deaf_helpers)


def _end_deaf_helpers() -> None:
    deaf = [child for child in multiprocessing.active_children() if _is_deaf(child)]
    if deaf and threading.current_thread() is threading.main_thread():
        # torch's loader reports a dead worker as an error, which is wrong at the end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in deaf:
        child.kill()


def _is_deaf(child: BaseProcess) -> bool:
    """Return True for a daemon that ignores TERM."""
    try:
        status = Path(f"/proc/{child.pid}/status").read_text()
    except OSError:
        return False
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return child.daemon and bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


class FailureRecord:
    """Writes the first uncaught exception to the file that torchrun and the agent read."""

    def __init__(self) -> None:
        self._recorded: BaseException | None = None
        self._previous_hook = sys.excepthook
        self._hook: Callable[..., None] = self._on_uncaught
        sys.excepthook = self._hook

    def write(self, error: BaseException) -> None:
        """Write `error` once to torchrun's error file. Without torchrun, do nothing."""
        if error is self._recorded or not isinstance(error, Exception):
            return
        self._recorded = error
        trace = error.__traceback__
        try:
            # torchrun's handler formats the exception being handled, so raise it first.
            raise error
        except Exception as current:
            # Record the program's traceback without this frame.
            current.__traceback__ = trace
            get_error_handler().record_exception(current)
        finally:
            error.__traceback__ = trace

    def close(self) -> None:
        """Restore the previous hook, unless another hook was installed after this one."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous_hook

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.write(error)
        self._previous_hook(kind, error, trace)
