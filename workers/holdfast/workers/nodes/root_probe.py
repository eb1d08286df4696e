"""What Holdfast needs of the file system of a root, tried in a folder that is removed again.

`find_problems` is for one host. `SharedProbe` and `compare` are for several: node 0 leaves files
and holds a lock, and every other node checks that it sees them. Then some nodes `race` for names.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import durable, file_locks, filesystems, reading
from holdfast.contracts.disk.paths import real_folder
from holdfast.contracts.plain_text import counted

PREFIX: Final = ".probe."
ADVICE: Final = "give another root (--root or HOLDFAST_ROOT), or mount it with what is missing"
# Clients that learn of changes by messages see them a moment later.
SEEN_S: Final = 10.0
POLL_S: Final = 0.1
TRIES: Final = 3
PAUSE_S: Final = 1.0
# Longer than any name that Holdfast gives a file.
NAME_CHARACTERS: Final = 200
_TOKEN: Final = "token"
_LINES: Final = "lines"
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
# What every other node lacks if locks do not reach the server.
LOCKS: Final = "locks between hosts"
# What a file system lacks if two nodes create the same name at the same moment.
NAMES: Final = "exclusive names between hosts"
# The most races, and the most nodes in them. File systems that fail do so in one of five races.
RACES: Final = 30
RACERS: Final = 4


@dataclass(frozen=True)
class RootProblem:
    """Something that a root's file system cannot do. `lacks` names it in a few words."""

    lacks: str
    text: str


class _UnfitError(Exception):
    """The file system reports success, but does something else."""


def describe(folder: Path) -> str:
    """Return a folder and the type of its file system, for messages."""
    return f"{folder} ({filesystems.filesystem_of(folder).kind or 'unknown file system'})"


def find_problems(folder: Path) -> list[RootProblem]:
    """Return what the file system of `folder` lacks, as this host sees it.

    Raises `OSError` if no file can be written in `folder`.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=PREFIX) as made:
        place = Path(made)
        (place / "first").write_bytes(b"1")
        with (place / "first").open("rb") as stream:
            os.fsync(stream.fileno())
        return [found for need in _NEEDS if (found := need.find(place)) is not None]


def check_folder(folder: Path, shared: str = "", token: str = "") -> list[RootProblem]:
    """Return what this node cannot do in a folder of the run.

    `shared` is the name of node 0's `SharedProbe` there, and `token` its content. Without it, only
    this node is checked.
    """
    problems = _find_lasting_problems(folder)
    if shared:
        problems += compare(folder / shared, token)
    here = describe(real_folder(folder))
    return [RootProblem(one.lacks, f"{here}: {one.text}") for one in problems]


def _find_lasting_problems(folder: Path) -> list[RootProblem]:
    """Return what `find_problems` finds again a moment later. A full disk is no such problem."""
    # One failure may pass, such as a server that restarts. A node must not be excluded for it.
    found: list[RootProblem] = []
    for tried in range(TRIES):
        if tried:
            time.sleep(PAUSE_S)
        try:
            found = find_problems(folder)
        except OSError as error:
            if error.errno in durable.STORAGE_FULL:
                return []
            detail = error.strerror or str(error)
            found = [RootProblem("writing", f"files cannot be written there ({detail})")]
        if not found:
            break
    return found


@dataclass(frozen=True)
class _Need:
    """`lack` completes "the file system …". `reason` says what needs it."""

    name: str
    lack: str
    reason: str
    attempt: Callable[[Path], None]

    def find(self, place: Path) -> RootProblem | None:
        try:
            self.attempt(place)
        except (OSError, _UnfitError) as error:
            if isinstance(error, OSError) and error.errno in durable.STORAGE_FULL:
                raise
            detail = getattr(error, "strerror", None) or str(error)
            text = f"the file system {self.lack} ({detail}), which {self.reason}"
            return RootProblem(self.name, text)
        return None


def _try_links(place: Path) -> None:
    os.link(place / "first", place / "second")
    # A claim and a manifest rely on this: the second `link` must fail.
    with contextlib.suppress(FileExistsError):
        os.link(place / "first", place / "second")
        raise _UnfitError("a link replaced an existing name")


def _try_folders(place: Path) -> None:
    (place / "folder").mkdir()
    with contextlib.suppress(FileExistsError):
        (place / "folder").mkdir()
        raise _UnfitError("a folder was created twice")


def _try_renames(place: Path) -> None:
    (place / "document").write_bytes(b"old")
    (place / "new").write_bytes(b"new")
    os.replace(place / "new", place / "document")
    if (place / "document").read_bytes() != b"new":
        raise _UnfitError("the old bytes are still there")
    (place / "from").mkdir()
    (place / "from" / "file").touch()
    (place / "from").rename(place / "to")
    if not (place / "to" / "file").exists():
        raise _UnfitError("a renamed folder lost its files")


def _try_folder_sync(place: Path) -> None:
    durable.fsync_directory(place)


def _try_appends(place: Path) -> None:
    path = place / _LINES
    handle = os.open(path, _APPEND | filesystems.send_flag(place))
    try:
        for line in (b"one\n", b"two\n"):
            os.write(handle, line)
        os.fsync(handle)
        if path.read_bytes() != b"one\ntwo\n":
            raise _UnfitError("a file that is open does not have the lines that were synced")
    finally:
        os.close(handle)
    handle = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(handle, b"ONE", 0)
    finally:
        os.close(handle)
    if path.read_bytes() != b"ONE\ntwo\n":
        raise _UnfitError("bytes in the middle of a file cannot be replaced")


def _try_locks(place: Path) -> None:
    with (place / "first").open("rb") as mine, (place / "first").open("rb") as other:
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if file_locks.wait_for_lock(other.fileno()):
            raise _UnfitError("a file was locked twice")


def _try_long_names(place: Path) -> None:
    (place / ("n" * NAME_CHARACTERS)).touch(exist_ok=False)


def _try_private_files(place: Path) -> None:
    path = place / "private"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    facts = path.stat()
    if facts.st_mode & 0o077:
        raise _UnfitError(f"a file of mode 0600 has mode {facts.st_mode & 0o7777:04o}")
    if not reading.is_mine(path):
        raise _UnfitError(
            f"a file that user {os.geteuid()} created belongs to user {facts.st_uid}; root is "
            "often mapped to another user"
        )


_NEEDS: Final = (
    _Need("hard links", "has no hard links", "commits and claims need", _try_links),
    _Need(
        "exclusive folders",
        "cannot create folders exclusively",
        "attempts and launches need",
        _try_folders,
    ),
    _Need("renames", "cannot rename over files", "documents and deletions need", _try_renames),
    _Need("sync of folders", "cannot sync folders", "durable commits need", _try_folder_sync),
    _Need(
        "appends",
        "cannot change files that exist",
        "journals and heartbeats need",
        _try_appends,
    ),
    _Need(
        "locks",
        "has no file locks",
        "keep a run from having two supervisors (Lustre: mount it with -o flock)",
        _try_locks,
    ),
    _Need(
        "long names",
        f"has no names of {NAME_CHARACTERS} characters",
        "files of a run may have",
        _try_long_names,
    ),
    _Need(
        "private files",
        "keeps no owners and modes of files",
        "protect tokens and secrets",
        _try_private_files,
    ),
)


class SharedProbe:
    """Node 0's part: a folder with a token and with an open, locked file of lines."""

    def __init__(self, folder: Path) -> None:
        """Create it in `folder`. Raises `OSError`."""
        self.token = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(dir=folder, prefix=PREFIX))
        self._handle = -1
        try:
            durable.create_bytes(self.folder / _TOKEN, self.token.encode())
            self._handle = os.open(
                self.folder / _LINES, _APPEND | filesystems.send_flag(folder), 0o600
            )
            # Held while the other nodes compare: if one of them can lock the file, locks are local.
            file_locks.wait_for_lock(self._handle)
            for _ in range(2):
                os.write(self._handle, f"{self.token}\n".encode())
            os.fsync(self._handle)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock and remove the folder (best effort)."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        shutil.rmtree(self.folder, ignore_errors=True)


def compare(folder: Path, token: str) -> list[RootProblem]:
    """Return what this host does not see of the `SharedProbe` at `folder` on another host."""
    try:
        if not _becomes_true(lambda: _holds(folder / _TOKEN, token.encode())):
            text = "what node 0 has just written is not there, so another folder is mounted here"
            return [RootProblem("the same files", text)]
        # A node whose folder differs would fail both checks below, so they are left out.
        return _problems_with_lines(folder / _LINES, token)
    except OSError as error:
        detail = error.strerror or str(error)
        return [RootProblem("the same files", f"files of node 0 cannot be read ({detail})")]


def _problems_with_lines(path: Path, token: str) -> list[RootProblem]:
    found = []
    if not _becomes_true(lambda: _holds(path, f"{token}\n".encode() * 2)):
        text = f"lines that node 0 has synced are not there after {SEEN_S:.0f} s"
        found.append(RootProblem("the same lines", text))
    with path.open("rb") as stream:
        if file_locks.wait_for_lock(stream.fileno(), shared=True):
            text = (
                "a file that node 0 has locked can be locked here too, so a run could have two "
                "supervisors; mount it with locks that hold between hosts (NFS: without nolock and "
                "local_lock, Lustre: flock)"
            )
            found.append(RootProblem(LOCKS, text))
    return found


def race(folder: Path, number: int) -> bool:
    """Create the name `number` exclusively, while other hosts do the same; return if it succeeded.

    `folder` is that of the `SharedProbe`. Numbers begin with 0.
    """
    own = folder / f"racer-{socket.gethostname()}-{os.getpid()}"
    try:
        if number == 0:
            own.touch()
        # A `link`, because `create_bytes` commits with it too. SeaweedFS fails here in one of five
        # races, see decision 62.
        os.link(own, folder / f"name-{number}")
    except OSError:
        return False
    return True


def judge_races(winners: Sequence[int]) -> list[RootProblem]:
    """Return the problem if several hosts got one name. `winners` has the count of each race."""
    twice = sum(count > 1 for count in winners)
    if not twice:
        return []
    text = (
        f"two nodes created the same name at the same moment, {counted(twice, 'time')} of "
        f"{len(winners)}, so a run could be trained twice and a commit be lost"
    )
    return [RootProblem(NAMES, text)]


def _holds(path: Path, content: bytes) -> bool:
    """Return True if `path` has exactly `content`, as the server knows it."""
    if not filesystems.is_there(path):
        return False
    with path.open("rb") as stream:
        filesystems.fetch_attributes(stream.fileno())
        return stream.read(len(content) + 1) == content


def _becomes_true(condition: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + SEEN_S
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL_S)
    return True
