"""Another user of the machine: work that runs, and locks that are held, as another uid."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STRANGER = 4242


def become(uid: int, groups: tuple[int, ...] = ()) -> None:
    """Change this process, a child of the test's, into one of the user `uid`."""
    assert os.geteuid() == 0, "the other user is another uid: run these tests as root"
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)


def as_user(uid: int, work: Callable[[], object], groups: tuple[int, ...] = ()) -> str:
    """Run `work` in a child process of `uid`; return its result's text, or its exception's."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            become(uid, groups)
            said = str(work())
        except BaseException as error:  # The child ends here and reports its error.
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode(errors="replace"))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


@contextmanager
def held_by(uid: int, paths: list[Path], kind: int = fcntl.LOCK_EX) -> Iterator[list[Path]]:
    """Have `uid` lock what it can open of `paths` during the block; yields those that it locked."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become(uid)
            held = "".join(f"{number}\n" for number, path in enumerate(paths) if _lock(path, kind))
            os.write(writing, (held or "none\n").encode())
            signal.pause()
        except BaseException:  # The child ends here, with its reason on standard error.
            traceback.print_exc()
        finally:
            os._exit(1)
    try:
        os.close(writing)
        with os.fdopen(reading) as stream:
            said = os.read(stream.fileno(), 65536).decode().split()
        assert said, "the other user's process has failed"
        yield [paths[int(one)] for one in said if one != "none"]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _lock(path: Path, kind: int) -> bool:
    for flags in (os.O_RDWR, os.O_RDONLY, os.O_WRONLY):
        try:
            handle = os.open(path, flags | os.O_NONBLOCK)
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except OSError:
            continue
        return True
    return False
