"""Puts a stage under the real code: its files, locks, clock and commands.

Only calls of actors are concerned. Every other thread of the test process sees the real functions.
"""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

from tests.interleavings.stage import Stage, current, plain

from holdfast.contracts.disk import reading
from holdfast.contracts.node import clocks
from holdfast.workers.runs.attempts import Absences

Commands = Callable[[list[str]], tuple[int, str, str]]
_NAMES: Final = (
    "close fsync link listdir lstat mkdir open pwrite readlink remove rename replace rmdir scandir"
    " stat unlink write"
)
_REAL: Final = {name: getattr(os, name) for name in _NAMES.split()}
_TIME: Final = {name: getattr(time, name) for name in ("time", "monotonic", "clock_gettime")}
UP_S: Final = 100_000.0
_HELD: Final = "/proc/self/fd/"


class Hooks:
    """The replaced functions, for actors of one stage and paths under `root`."""

    def __init__(self, root: Path, commands: Commands, start: Callable[[], object]) -> None:
        self.root, self._commands = str(root), commands
        self._start_supervisor = start
        self.stage: Stage | None = None

    # --- paths --------------------------------------------------------------------------

    def _path(self, path: Any, dir_fd: int | None = None) -> str:
        """Return a path under the root as text, or '' for another one."""
        text = self._absolute(path, dir_fd)
        return plain(text[len(self.root) :].rstrip("/")) if text.startswith(self.root) else ""

    def _absolute(self, path: Any, dir_fd: int | None) -> str:
        if isinstance(path, int):
            try:
                return str(_REAL["readlink"](f"{_HELD}{path}"))
            except OSError:
                return ""
        text = os.fsdecode(path)
        if dir_fd is not None and not text.startswith("/"):
            return f"{self._absolute(dir_fd, None)}/{text}"
        if text.startswith(_HELD):
            handle, _, rest = text[len(_HELD) :].partition("/")
            return f"{self._absolute(int(handle), None)}/{rest}"
        return text

    def _call(self, kind: str, path: Any, dir_fd: int | None = None) -> None:
        if current() is None or self.stage is None:
            return
        if text := self._path(path, dir_fd):
            self.stage.call(kind, text)

    def _name(self, path: Any, dir_fd: int | None = None, *, appears: bool) -> None:
        """A name appears or disappears, unless it is there or gone already."""
        if current() is None or self.stage is None:
            return
        if (text := self._path(path, dir_fd)) and not text.endswith(".TMP"):
            changes = self._exists(text) != appears
            self.stage.call("name" if changes else "read", text)

    # --- replacements -------------------------------------------------------------------

    def _patches(self) -> Iterator[Any]:
        yield from self._patches_of_files()
        yield from self._patches_of_time()
        yield mock.patch.object(subprocess, "run", self._run)
        yield mock.patch.object(subprocess, "Popen", self._popen)

    def _patches_of_files(self) -> Iterator[Any]:
        def named(name: str) -> Callable[..., Any]:
            def replaced(path: Any, *rest: Any, **options: Any) -> Any:
                self._name(path, options.get("dir_fd"), appears=name == "mkdir")
                return _REAL[name](path, *rest, **options)

            return replaced

        def moved(name: str) -> Callable[..., Any]:
            def replaced(source: Any, target: Any, **options: Any) -> Any:
                if name != "link":
                    self._name(source, options.get("src_dir_fd"), appears=False)
                self._call("name", target, options.get("dst_dir_fd"))
                return _REAL[name](source, target, **options)

            return replaced

        def read(name: str, kind: str) -> Callable[..., Any]:
            def replaced(path: Any = ".", *rest: Any, **options: Any) -> Any:
                self._call(kind, path, options.get("dir_fd"))
                return _REAL[name](path, *rest, **options)

            return replaced

        def written(name: str) -> Callable[..., Any]:
            def replaced(handle: int, *rest: Any) -> Any:
                self._call("write", handle)
                return _REAL[name](handle, *rest)

            return replaced

        for name in ("mkdir", "rmdir", "unlink", "remove"):
            yield mock.patch.object(os, name, named(name))
        for name in ("rename", "replace", "link"):
            yield mock.patch.object(os, name, moved(name))
        for name in ("listdir", "scandir"):
            yield mock.patch.object(os, name, read(name, "list"))
        for name in ("stat", "lstat"):
            yield mock.patch.object(os, name, read(name, "read"))
        for name in ("write", "pwrite"):
            yield mock.patch.object(os, name, written(name))
        yield mock.patch.object(os, "fsync", self._fsync)
        yield mock.patch.object(os, "open", self._open)
        yield mock.patch.object(os, "close", self._close)
        yield mock.patch.object(reading, "_open_inside", self._open_inside(reading._open_inside))
        yield mock.patch.object(fcntl, "flock", self._flock(fcntl.flock))

    def _patches_of_time(self) -> Iterator[Any]:
        real_sleep = time.sleep

        def now() -> float:
            actor = current()
            if actor is None or self.stage is None:
                return float(_TIME["time"]())
            return self.stage.now + actor.ahead_s

        def monotonic() -> float:
            if current() is None or self.stage is None:
                return float(_TIME["monotonic"]())
            # Any machine has been up for a while.
            return self.stage.now - self.stage.start + UP_S

        def clock_gettime(which: int) -> float:
            actor = current()
            if actor is None or self.stage is None or which != time.CLOCK_BOOTTIME:
                return float(_TIME["clock_gettime"](which))
            return self.stage.now + actor.ahead_s - clocks._OFFSET_S

        def sleep(seconds: float) -> None:
            if current() is None or self.stage is None:
                real_sleep(seconds)
            else:
                self.stage.sleep(seconds)

        yield mock.patch.object(time, "time", now)
        yield mock.patch.object(time, "monotonic", monotonic)
        yield mock.patch.object(time, "clock_gettime", clock_gettime)
        yield mock.patch.object(time, "sleep", sleep)
        # The default of this argument was taken before time was replaced.
        yield mock.patch.object(Absences.__init__, "__defaults__", (monotonic,))

    def _close(self, handle: int) -> None:
        # A lock is released when its file is closed.
        if current() is not None and (text := self._path(handle)).endswith(".lock"):
            assert self.stage is not None
            self.stage.call("lock", text)
        _REAL["close"](handle)

    def _fsync(self, handle: int) -> None:
        if current() is None:
            _REAL["fsync"](handle)

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & os.O_DIRECTORY:
            self._opened(path, flags, dir_fd)
        return int(_REAL["open"](path, flags, mode, dir_fd=dir_fd))

    def _opened(self, path: Any, flags: int, dir_fd: int | None) -> None:
        if current() is None:
            return
        text = self._path(path, dir_fd)
        if not text or text.endswith((".TMP", ".lock")):
            return
        is_new = flags & os.O_CREAT and not self._exists(text)
        self._call("name" if is_new else "read", path, dir_fd)

    def _exists(self, text: str) -> bool:
        try:
            _REAL["lstat"](self.root + text)
        except OSError:
            return False
        return True

    def _open_inside(self, real: Callable[..., int]) -> Callable[..., int]:
        def replaced(base: int, relative: str, flags: int, follow: bool) -> int:
            if not flags & os.O_DIRECTORY:
                self._opened(relative, flags, base)
            return real(base, relative, flags, follow)

        return replaced

    def _flock(self, real: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def replaced(handle: int, operation: int) -> None:
            self._call("lock", handle)
            real(handle, operation)

        return replaced

    # --- commands -----------------------------------------------------------------------

    def _run(self, arguments: Any, **options: Any) -> Any:
        if current() is None or self.stage is None:
            return _RUN(arguments, **options)
        code, out, err = self._commands(list(map(str, arguments)))
        done: subprocess.CompletedProcess[Any]
        done = subprocess.CompletedProcess(arguments, code, out.encode(), err.encode())
        if options.get("text"):
            done = subprocess.CompletedProcess(arguments, code, out, err)
        if options.get("check"):
            done.check_returncode()
        return done

    def _popen(self, arguments: Any, **options: Any) -> Any:
        if current() is None or self.stage is None:
            return _POPEN(arguments, **options)
        words = list(map(str, arguments))
        if "holdfast.flows.detached" in words:
            self._start_supervisor()
            return PlayedProcess(words, 0, "", "")
        return PlayedProcess(words, *self._commands(words))


_RUN: Final = subprocess.run
_POPEN: Final = subprocess.Popen


class PlayedProcess:
    """A command that has ended, as `subprocess.Popen` would return it."""

    def __init__(self, arguments: list[str], code: int, out: str, err: str) -> None:
        self.args, self.returncode, self.pid = arguments, code, 4_000_000
        self.stdout, self.stderr = _pipe(out), _pipe(err)

    def __enter__(self) -> PlayedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdout.close()
        self.stderr.close()

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        pass


def _pipe(text: str) -> io.FileIO:
    """Return the reading end of a pipe that contains `text`."""
    read, write = os.pipe()
    _REAL["write"](write, text.encode())
    os.close(write)
    return io.FileIO(read)


@contextmanager
def installed(hooks: Hooks) -> Iterator[None]:
    """Replace the functions for the duration of the block."""
    patches = list(hooks._patches())
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()
