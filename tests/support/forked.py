"""Starts programs that import torch by a fork, which saves 4 s of a core for each process.

A forked program is like a new process of Python: it has its own session, environment, folder,
`argv`, output and random numbers. torchrun forks its ranks in the same way. For tests of what ranks
do. A test of how torchrun or Python start them uses `subprocess`.
"""

from __future__ import annotations

import array
import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).parents[2]
# With it in PYTHONPATH, torchrun forks its ranks.
RANK_FORKS: Final = Path(__file__).with_name("rank_forks")
START_S: Final = 120.0
KILL_WAIT_S: Final = 30.0
ANSWER_BYTES: Final = 4096


class Forked:
    """A forked program, with the part of `subprocess.Popen` that tests use.

    Its output is in files, so that no process that it leaves behind holds up the test.
    """

    def __init__(
        self,
        command: Sequence[object],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdout: IO[bytes] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self.args = [str(word) for word in command]
        self.returncode: int | None = None
        self._files = [stdout or _file(), stderr or _file()]
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "command": self.args,
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
        }
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024 * 1024)
        self._socket.send(json.dumps(request).encode())
        with theirs:
            handles = [theirs.fileno(), *(one.fileno() for one in self._files)]
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", handles))
            _server().sendmsg([b"."], [rights])
        self._socket.settimeout(START_S)
        self.pid: int = json.loads(self._socket.recv(ANSWER_BYTES))["pid"]

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._status(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def communicate(self, timeout: float = KILL_WAIT_S) -> tuple[str, str]:
        """Wait for its end and return its output."""
        self.wait(timeout)
        return self._text(0), self._text(1)

    def kill(self) -> None:
        """Kill it and all processes of its session."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)

    def _status(self, timeout: float) -> int | None:
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self.returncode = json.loads(self._socket.recv(ANSWER_BYTES))["status"]
            except (BlockingIOError, TimeoutError):
                return None
            self._socket.close()
        return self.returncode

    def _text(self, number: int) -> str:
        handle = self._files[number].fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")


def run(
    command: Sequence[object],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program of this Python to its end, as `subprocess.run` does with `capture_output`."""
    process = Forked(command, env=env, cwd=cwd)
    try:
        said, errors = process.communicate(timeout)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


def _file() -> IO[bytes]:
    return tempfile.TemporaryFile()


@functools.cache
def _server() -> socket.socket:
    """The socket of this process's fork server, which ends when this process does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait(KILL_WAIT_S)

    atexit.register(end)
    return ours
