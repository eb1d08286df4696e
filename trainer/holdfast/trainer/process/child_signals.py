"""The signals that end a job, in a rank and in the processes that it starts.

Slurm sends them to all processes of a job, and so does a `kill` of the process group. A rank must
survive them until the ranks have saved together, and so must the processes that give it its data.
All other processes have the same actions as under plain torchrun:

- A rank under an agent has handlers that do nothing. They are reset when a program is executed, so
  commands that it starts have the default actions. An ignored signal would stay ignored there.
- A child that the rank forks with `os.fork` has the default actions.
- Processes of `multiprocessing` ignore the signals, such as the workers of a data loader. In them,
  `terminate()` of this rank becomes a kill, because nothing else would end them.

Standard library only: ranks import it before their program begins.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import popen_fork, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Final

# What an agent handles for its ranks, and what a session handles without one.
AGENT_SIGNALS: Final = (
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
    signal.SIGHUP,
)
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR2)
# How long daemonic children get to end at the exit of the interpreter.
END_S: Final = 2.0
# The function that a worker of torch's and torchdata's loaders runs.
WORKER: Final = "_worker_loop"

# The signals that the processes of `multiprocessing` ignore.
_held: list[int] = []
_has_hooks = False
_forking = threading.local()
# `multiprocessing` has no public names for where its processes start and end.
_processes: Any = BaseProcess
_util: Any = util
_popen: Any = popen_fork.Popen


def survive() -> None:
    """Let this rank survive the signals of its agent. Outside the main thread, do nothing.

    Handlers of the program stay, and so does a default action that the agent chose for a program
    without a session.
    """
    # The agent's guard ignores its signals, and torchrun and the ranks inherit that. Only this is
    # replaced: a handler would be one of the program.
    _replace(signal.SIG_IGN)


def survive_in_session() -> None:
    """Let a process with a session survive, not a rank of torchrun if that only started it.

    The default actions are replaced too.
    """
    _replace(signal.SIG_IGN, signal.SIG_DFL, signal.default_int_handler)


def _replace(*found: Any) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in AGENT_SIGNALS:
        if signal.getsignal(number) in found:
            signal.signal(number, _do_nothing)
            # The system's calls in libraries continue, as they do while a signal is ignored.
            signal.siginterrupt(number, False)
    hold([number for number in AGENT_SIGNALS if signal.getsignal(number) is _do_nothing])


def hold(numbers: Sequence[int]) -> None:
    """Let the processes that `multiprocessing` starts from now on ignore these signals."""
    global _has_hooks
    if not _has_hooks:
        _has_hooks = True
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)
        _processes.start = _mark_loaders(_processes.start)
        _processes._bootstrap = _deaf(_processes._bootstrap)
        # With the start methods `spawn` and `forkserver`, a child executes Python and keeps no
        # handlers.
        _util.spawnv_passfds = _deaf_command(_util.spawnv_passfds)
        _popen.terminate = _end(_popen.terminate)
    _held.extend(number for number in numbers if number not in _held)
    # Registered again each time, because the last one runs first: before that of torch's loaders.
    atexit.unregister(_end_deaf_children)
    atexit.register(_end_deaf_children, os.getpid())


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Do nothing: the agent handles the signal."""


def _block() -> None:
    """Hold back the signals while this thread forks, so that the child gets one with its action."""
    # Between the fork and `_reset` the child still has the rank's handler, which does nothing. A
    # signal in that moment would be lost.
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _held)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset() -> None:
    """Give a forked child the actions that a program has at its start.

    A process of `multiprocessing` ignores the signals from its first moment on.
    """
    is_process = getattr(_forking, "is_process", False)
    _forking.is_process = False
    for number in _held:
        if is_process:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) is _do_nothing:
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)
    _unblock()


def _deaf(bootstrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that runs a process of `multiprocessing`, in which it is deaf first."""

    @functools.wraps(bootstrap)
    def run(*args: Any, **options: Any) -> Any:
        for number in _held:
            signal.signal(number, signal.SIG_IGN)
        return bootstrap(*args, **options)

    return run


def _deaf_command(spawn: Callable[..., int]) -> Callable[..., int]:
    """Return the function that starts a Python for `multiprocessing`, which is deaf first."""

    @functools.wraps(spawn)
    def start(path: Any, args: Sequence[Any], passed: Any) -> int:
        words = list(args)
        if "-c" in words:
            at = words.index("-c") + 1
            deaf = (
                f"import signal; [signal.signal(n, signal.SIG_IGN) for n in {[*map(int, _held)]}]; "
            )
            words[at] = f"{deaf}{words[at]}"
        return spawn(path, words, passed)

    return start


def _mark_loaders(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `start` of a process, which is deaf; a worker of torch's loaders stays so."""

    @functools.wraps(start)
    def run(process: Any) -> None:
        if getattr(process._target, "__name__", "") == WORKER:
            process._target = functools.partial(_work, process._target, tuple(_held))
        _forking.is_process = True
        try:
            start(process)
        finally:
            _forking.is_process = False

    return run


def _work(worker: Callable[..., None], held: Sequence[int], *args: Any) -> None:
    """Run the loop of a loader's worker.

    torch sets a handler there by which SIGTERM ends the worker, unless its parent sends it.
    """
    # Torch has no public name for it. The module of the loop has loaded it.
    handling: Any = sys.modules["torch.utils.data._utils.signal_handling"]
    set_handlers = handling._set_worker_signal_handlers

    def set_and_ignore() -> None:
        set_handlers()
        for number in held:
            signal.signal(number, signal.SIG_IGN)

    handling._set_worker_signal_handlers = set_and_ignore
    worker(*args)


def _end(terminate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `terminate` of a process, which kills one that ignores SIGTERM."""

    @functools.wraps(terminate)
    def end(popen: Any) -> None:
        if popen.returncode is None and _is_deaf(popen.pid):
            popen.kill()
        else:
            terminate(popen)

    return end


def _end_deaf_children(owner: int) -> None:
    """End the daemonic children, as `multiprocessing` would, but kill those that do not end.

    It sends SIGTERM to them when the interpreter ends, and waits for them without a limit. A loader
    that is still referenced then would block its rank forever.
    """
    if os.getpid() != owner:
        # A forked child: they are children of its parent.
        return
    daemons = [child for child in multiprocessing.active_children() if child.daemon]
    if daemons and threading.current_thread() is threading.main_thread():
        # torch's loader reports a dead worker as an error, which is wrong at the end.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in daemons:
        child.terminate()
    give_up = time.monotonic() + END_S
    for child in daemons:
        child.join(max(0.0, give_up - time.monotonic()))
        if child.is_alive():
            # It may have begun to ignore signals only now.
            child.kill()


def _is_deaf(pid: int) -> bool:
    """Return True for a process that ignores TERM."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
