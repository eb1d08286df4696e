"""Signal handlers that set a flag, and the record of exceptions in torchrun's error file.

They are installed only without an agent. Under an agent, the ranks survive TERM and USR2, and the
agent starts the stop agreement.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from holdfast.contracts.node.rank_status import RankRecord
from holdfast.trainer.process import child_signals
from holdfast.trainer.process.child_signals import STOP_SIGNALS

# The time between two looks at the handlers.
LOOK_S: Final = 1.0
NO_HANDLERS: Final = (
    "the Session was not created in the main thread, and only there can Python handle signals. "
    "SIGTERM and SIGUSR2 end this process without a last checkpoint. Create the Session in the "
    "main thread, or stop the run by the file `stop` in its folder"
)

_Handler = Callable[[int, FrameType | None], Any] | int | None


class SignalFlags:
    """Sets a flag in the rank's record on TERM and USR2, from construction until `close`.

    It calls the handlers of the program too, whether they were installed before or after it.
    """

    def __init__(self, record: RankRecord) -> None:
        """Install the handlers. Only the main thread can. Elsewhere `look` reports it."""
        self._record = record
        # The program's handlers by signal, the newest last. The first was there before this one.
        # A list, because programs and libraries chain handlers in turn.
        self._chained: dict[int, list[_Handler]] = {}
        self._depth: dict[int, int] = dict.fromkeys(STOP_SIGNALS, 0)
        self._given_up: set[int] = set()
        self._notes: list[str] = []
        # The monotonic time from which `look` has something to do.
        self.due_at = -math.inf
        self._is_open = _in_main_thread()
        # One object, to recognise it: each access to a method makes another.
        self._handler: Callable[[int, FrameType | None], None] = self._catch
        if not self._is_open:
            self._notes.append(NO_HANDLERS)
            return
        for number in STOP_SIGNALS:
            found = signal.signal(number, self._handler)
            self._chained[number] = [_without_closed(number, found)]
        # Without an agent, a kill of the process group reaches the workers of loaders too.
        child_signals.hold(STOP_SIGNALS)
        os.register_at_fork(after_in_child=self._forget_in_child)

    def look(self, now: float) -> list[str]:
        """Chain handlers that the program has installed since, and return what people should know.

        It looks about once a second, `now` being the monotonic time. A signal that the program
        ignores stays ignored.
        """
        if now < self.due_at:
            return []
        # Programs install handlers after the session without telling it. Signals are rare, so a
        # look once a second is enough, and other step boundaries cost one comparison.
        self.due_at = now + LOOK_S
        for number in STOP_SIGNALS if self._is_open else ():
            current = signal.getsignal(number)
            if current is not self._handler and number not in self._given_up:
                self._take_back(number, current)
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Restore the program's newest handlers. One that was installed unseen stays."""
        if not self._is_open:
            return
        self._is_open = False
        for number, handlers in self._chained.items():
            if _in_main_thread() and signal.getsignal(number) is self._handler:
                newest = _without_closed(number, handlers[-1])
                signal.signal(number, signal.SIG_DFL if newest is None else newest)

    def _take_back(self, number: int, current: _Handler) -> None:
        name = signal.Signals(number).name
        if current is signal.SIG_IGN or not _in_main_thread():
            self._given_up.add(number)
            self._notes.append(
                f"the program {'ignores' if current is signal.SIG_IGN else 'handles'} {name} since "
                f"it created the Session, so {name} no longer stops the run after a last checkpoint"
            )
            return
        if current is not self._chained[number][-1]:
            self._chained[number].append(current)
            self._notes.append(
                f"the program set a handler for {name} after it created the Session. The Session "
                "now hears the signal first and then calls that handler"
            )
        signal.signal(number, self._handler)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        """Set the flag, then call the program's handler.

        If that handler calls the one that it found, which is this one, the next older one follows.
        An error of a handler, such as `SystemExit`, would end this rank before the ranks have
        agreed on a last checkpoint, so it is dropped while the session is open.
        """
        depth, handlers = self._depth[number], self._chained.get(number, [])
        handler = handlers[-1 - depth] if depth < len(handlers) else signal.SIG_IGN
        if not self._is_open:
            # A handler of the program that was installed after this one still calls it.
            _act(number, frame, handlers[0] if handlers else signal.SIG_IGN)
            return
        # Only a flag: a save inside a handler could interrupt the program in any line, and ranks
        # would save at different steps.
        self._record.catch(number)
        if not callable(handler):
            return
        self._depth[number] = depth + 1
        try:
            handler(number, frame)
        except (Exception, SystemExit) as error:
            # The last checkpoint comes first, whatever the program's handler raises.
            self._notes.append(
                f"the program's handler for {signal.Signals(number).name} raised "
                f"{type(error).__name__}. The run continues to its last checkpoint and then stops"
            )
        finally:
            self._depth[number] = depth

    def _forget_in_child(self) -> None:
        """Reset a forked child's handlers: `terminate()` on the child must not stop the run.

        A worker of a data loader ignores the signals, see `child_signals`. torchrun passes a signal
        on to all processes of a rank, and a rank without its workers fails.
        """
        if not self._is_open:
            return
        self._is_open = False
        for number in self._chained:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, signal.SIG_DFL)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _without_closed(number: int, handler: _Handler) -> _Handler:
    """Return the handler that the session of `handler` found, if that session has ended.

    A session that another thread collects as garbage cannot restore the handlers. Its own would
    stay, and end this process by the signal.
    """
    owner = getattr(handler, "__self__", None)
    while isinstance(owner, SignalFlags) and not owner._is_open:
        handler = owner._chained[number][-1]
        owner = getattr(handler, "__self__", None)
    return handler


def _act(number: int, frame: FrameType | None, handler: _Handler) -> None:
    """Do what `handler` says, as if it were installed."""
    if callable(handler):
        handler(number, frame)
    elif handler is not signal.SIG_IGN:
        # The default action of a signal is the kernel's, so the signal is sent again after its
        # restoration.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class FailureRecord:
    """Writes the first uncaught exception to the file that torchrun and the agent read."""

    def __init__(self) -> None:
        self._recorded: BaseException | None = None
        self._owner = os.getpid()
        self._previous_hook = sys.excepthook
        self._hook: Callable[..., None] = self._on_uncaught
        sys.excepthook = self._hook

    def write(self, error: BaseException) -> None:
        """Write `error` once to torchrun's error file. Without torchrun, do nothing."""
        # `SystemExit` and `KeyboardInterrupt` are not failures of the program.
        if error is self._recorded or not isinstance(error, Exception):
            return
        if os.getpid() != self._owner:
            # The error of a forked child is not the rank's.
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
