"""A process with torch imported, which forks the programs that tests ask it to run.

    python -m tests.support.fork_server DESCRIPTOR

`tests.support.forked` starts it, one for each process of pytest, and sends it requests on the
socket DESCRIPTOR. A child runs its program as `__main__` with the `argv`, environment, folder and
output of the request. It has no thread and no random number of this process. If the program is
torchrun, then torchrun itself is real and forks its ranks in the same way. With `rank_forks` in
`PYTHONPATH`, a torchrun that an agent starts does so too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

import numpy as np
import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

TORCHRUN: Final = "torch.distributed.run"
REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
FAILED: Final = 1
_PR_SET_MM: Final = 35
_PR_SET_MM_MAP: Final = 14
# Where /proc/<pid>/stat has the addresses of `prctl_mm_map`, counted from the state.
_BEFORE_BRK: Final = (23, 24, 42, 43, 44)
_START_STACK: Final = 25


@dataclass(frozen=True)
class Program:
    """A program and its arguments, as a command line of Python has them."""

    command: list[str]
    words: list[str]
    is_module: bool
    warnings: tuple[str, ...] = ()
    is_unbuffered: bool = False

    def run(self) -> None:
        """Run it as `__main__`."""
        name, *rest = self.words
        sys.argv[:] = [name, *rest]
        sys.orig_argv[:] = self.command
        sys.path[0] = os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(name))
        for action in self.warnings:
            warnings.simplefilter(action)  # type: ignore[arg-type]
        if self.is_module and name == TORCHRUN:
            fork_ranks()
            import_module(TORCHRUN).main(rest)
        elif self.is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")


def parse(command: list[str]) -> Program | None:
    """Return the program of a command line of Python; None if it has other options than ours."""
    options: dict[str, Any] = {"warnings": (), "is_unbuffered": False}
    words = command[1:]
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "-m" and words:
            return Program(command, words, True, **options)
        if option == "-u":
            options["is_unbuffered"] = True
        elif option == "-W" and words:
            options["warnings"] = (*options["warnings"], words.pop(0))
        else:
            return None
    return Program(command, words, False, **options) if words else None


def fork(
    program: Program,
    environment: dict[str, str],
    outputs: tuple[int, int],
    folder: str = "",
) -> int:
    """Fork a child that runs the program to its end; return its process id.

    `outputs` are the descriptors of its standard output and standard error.
    """
    pid = os.fork()
    if pid:
        return pid
    status = FAILED
    try:
        os.setsid()
        _begin(program, environment, outputs, folder)
        program.run()
        status = 0
    except SystemExit as end:
        status = _status_of(end)
    except BaseException:
        # The child ends here in any case, as Python itself would.
        traceback.print_exc()
    finally:
        _end(status)
    return pid


def _begin(
    program: Program, environment: dict[str, str], outputs: tuple[int, int], folder: str
) -> None:
    """Set up the child as a new interpreter would be."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for source, target in zip(outputs, (1, 2), strict=True):
        os.dup2(source, target)
    _close_others()
    said = io.FileIO(1, "wb", closefd=False)
    buffered = said if program.is_unbuffered else io.BufferedWriter(said)
    sys.stdout = io.TextIOWrapper(buffered, write_through=program.is_unbuffered)
    errors = io.FileIO(2, "wb", closefd=False)
    sys.stderr = io.TextIOWrapper(errors, errors="backslashreplace", write_through=True)
    if folder:
        os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _show(program.command, environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    random.seed()
    np.random.seed()


def _close_others() -> None:
    """Close what the parent has open. The numbers stay taken, because objects of the parent may
    still close them later."""
    gc.freeze()
    empty = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != empty and os.path.exists(f"/proc/self/fd/{name}"):
            os.dup2(empty, number, inheritable=False)
    os.close(empty)


def _show(command: list[str], environment: dict[str, str]) -> None:
    """Let /proc show this process's own command line and environment.

    Raises OSError if the kernel does not support it.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in command)
    lines = [f"{name}={value}" for name, value in environment.items()]
    variables = b"".join(os.fsencode(line) + b"\0" for line in lines)
    library = ctypes.CDLL(None, use_errno=True)
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    # It is never freed, because the kernel reads it as long as this process lives.
    start = library.malloc(len(words) + len(variables))
    ctypes.memmove(start, words + variables, len(words) + len(variables))
    with open("/proc/self/stat") as stream:
        facts = stream.read().rpartition(")")[2].split()
    middle = start + len(words)
    addresses = [
        *(int(facts[number]) for number in _BEFORE_BRK),
        library.sbrk(0),
        int(facts[_START_STACK]),
        *(start, middle, middle, middle + len(variables)),
    ]
    with open("/proc/self/comm", "w") as stream:
        stream.write("python")
    # The auxiliary vector and the file of the program stay.
    shape = struct.pack("<12QIi", *addresses, 0, 0, -1)
    if library.prctl(_PR_SET_MM, _PR_SET_MM_MAP, shape, ctypes.c_ulong(len(shape)), 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: {os.strerror(number)}")


def _status_of(end: SystemExit) -> int:
    """The exit status of `sys.exit`, as Python determines it."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return FAILED


def _end(status: int) -> None:
    """End this process as Python does, but leave the objects of its parent alone."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status & 0xFF)


@dataclass
class Rank:
    """A forked rank, with the part of `subprocess.Popen` that torchrun uses."""

    pid: int
    args: tuple[str, ...]
    returncode: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end. torchrun sets no time limit, or waits after it has killed it."""
        del timeout
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork_ranks() -> None:
    """Let torchrun fork its ranks in this process."""
    SubprocessHandler._popen = _fork_rank  # type: ignore[method-assign,assignment]


def _fork_rank(self: Any, args: tuple[str, ...], env: dict[str, str]) -> Rank:
    """Start a rank of torchrun."""
    program = parse(list(args))
    assert program is not None, args
    outputs = [1 if one is None else one.fileno() for one in (self._stdout, self._stderr)]
    if self._stderr is None:
        outputs[1] = 2
    return Rank(fork(program, env, (outputs[0], outputs[1])), args)


class Server:
    """Forks a child for each request, and reports its end on the request's own socket."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._poller = selectors.DefaultSelector()
        self._poller.register(requests, selectors.EVENT_READ, self._accept)
        self._children: set[int] = set()

    def serve(self) -> None:
        """Serve until the other end of the socket is closed, and then kill all children."""
        while self._requests.fileno() >= 0:
            for key, _ in self._poller.select():
                act: Callable[[], None] = key.data
                act()
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _accept(self) -> None:
        _, handles, _, _ = socket.recv_fds(self._requests, 1, 3)
        if not handles:
            self._poller.unregister(self._requests)
            self._requests.close()
            return
        answer = socket.socket(fileno=handles[0])
        request = json.loads(answer.recv(REQUEST_BYTES_MAX))
        program = parse(request["command"])
        assert program is not None, request["command"]
        outputs = handles[1], handles[2]
        pid = fork(program, request["environment"], outputs, request["folder"])
        for handle in outputs:
            os.close(handle)
        answer.send(json.dumps({"pid": pid}).encode())
        self._children.add(pid)
        process = os.pidfd_open(pid)
        self._poller.register(
            process, selectors.EVENT_READ, lambda: self._report(pid, process, answer)
        )

    def _report(self, pid: int, process: int, answer: socket.socket) -> None:
        _, status = os.waitpid(pid, 0)
        self._children.discard(pid)
        self._poller.unregister(process)
        os.close(process)
        # A test that failed may not wait for it.
        with contextlib.suppress(BrokenPipeError), answer:
            answer.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())


def main() -> None:
    torch.set_num_threads(1)
    import_module(TORCHRUN)
    # The children then copy less of this memory.
    gc.freeze()
    Server(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
