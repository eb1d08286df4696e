"""Digests of the code, config, data and environment that an attempt is submitted with.

`request.json` contains them, so that any two checkpoints can be compared later. This reads the
code's folder and the files that the config names as data, within bounds. If that would take too
long or git does not answer, a digest stays unknown and the submission continues.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk import digests, paths
from holdfast.contracts.records.documents import Provenance
from holdfast.contracts.spec.run_spec import RunSpec

GIT_TIMEOUT_S: Final = 10.0
DIFF_BYTES_MAX: Final = 64 * 1024 * 1024
FILES_MAX: Final = 10_000
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
DATA_KEY: Final = "data"
# Run no program that a repository's configuration names, and change nothing in the repository.
GIT: Final = (
    *("git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.quotepath=off"),
    *("-c", "core.hooksPath=/dev/null"),
)
CACHES: Final = frozenset({"__pycache__", "node_modules"})
_DESCRIPTORS: Final = "/proc/self/fd"


def files_under(folder: Path) -> Iterator[str]:
    """Return the names of the files under `folder`, in order, relative to it.

    Hidden folders, caches and the folders of Holdfast's index and runs are left out.
    """
    ours = {os.path.realpath(place) for place in (paths.holdfast_home(), paths.default_root())}
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in CACHES
            and os.path.realpath(os.path.join(place, name)) not in ours
        )
        for name in sorted(files):
            yield os.path.relpath(os.path.join(place, name), folder)


def is_open_here(path: Path) -> bool:
    """Return True if this process has the file open, so that other code in it must not close it.

    A process that closes a file releases every POSIX lock that it holds on it. If a process that
    has the index open read its files, SQLite would lose its locks and other processes could write
    over its changes. (SQLite, "How To Corrupt An SQLite Database File", section 2.2.)
    """
    facts = os.stat(path)
    # By device and inode, because a file may have several names. See decision 20.
    wanted = facts.st_dev, facts.st_ino
    for descriptor in os.listdir(_DESCRIPTORS):
        try:
            held = os.fstat(int(descriptor))
        except OSError:
            continue
        if (held.st_dev, held.st_ino) == wanted:
            return True
    return False


def take_provenance(spec: RunSpec, code: Path) -> Provenance:
    """Return the current digests of a run's spec and of the folder `code`."""
    is_snapshot = spec.launch.code == "snapshot"
    # A run's copy of the code may be inside a repository that it does not belong to.
    commit, changes = (None, digest_of_folder(code)) if is_snapshot else describe_code(code)
    data = spec.config.get(DATA_KEY)
    launch = spec.launch
    variables = spec.model_dump(mode="json")["environment"]
    # Empty ones are left out, so that the digest of a run does not change with an upgrade.
    more = [given for given in (launch.wrapper, launch.node_setup) if given]
    return Provenance(
        code_commit=commit,
        code_digest=changes,
        config_digest=digests.document_digest(spec.config),
        data_digest=None
        if data is None
        else digests.document_digest([data, describe_data(data, code)]),
        environment_digest=digests.document_digest(
            [variables, launch.python, launch.setup, launch.container, *more]
        ),
    )


def describe_code(folder: Path) -> tuple[str | None, str | None]:
    """Return the commit of a folder under git, and a digest of what differs from the commit.

    The digest is None without differences. For a folder outside git the commit is None and the
    digest is `digest_of_folder`.
    """
    output = ask_git(folder, "rev-parse", "--verify", "HEAD")
    if output is None:
        return None, digest_of_folder(folder)
    commit = output.decode(errors="replace").strip()
    diff = ask_git(folder, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", "--", ".")
    new = ask_git(folder, "ls-files", "--others", "--exclude-standard", "-z", "--", ".")
    if diff is None or new is None:
        return commit, None
    names = sorted(os.fsdecode(name) for name in new.split(b"\0") if name)
    if not diff and not names:
        return commit, None
    untracked = _digest_of_files(folder, iter(names))
    return commit, hashlib.sha256(diff + (untracked or "").encode()).hexdigest()


def digest_of_folder(folder: Path) -> str | None:
    """Return the SHA-256 of the names and contents of the files that `files_under` returns."""
    return _digest_of_files(folder, files_under(folder))


def describe_data(data: Any, folder: Path) -> list[tuple[str, int, int]]:
    """Return (path, bytes, time of change) of each file that `data` of a config names, in order."""
    found = []
    for text in _texts(data):
        path = folder / text
        try:
            status = path.stat()
        except (OSError, ValueError):
            continue
        found.append((text, status.st_size, status.st_mtime_ns))
    return found[:FILES_MAX]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _texts(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def ask_git(folder: Path, *arguments: str, timeout_s: float = GIT_TIMEOUT_S) -> bytes | None:
    """Return git's output; None if git is missing, too slow, fails or prints too much."""
    try:
        done = subprocess.run(
            [*GIT, "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    is_good = done.returncode == 0 and len(done.stdout) <= DIFF_BYTES_MAX
    return done.stdout if is_good else None


def _digest_of_files(folder: Path, names: Iterator[str]) -> str | None:
    """Return the SHA-256 of names, sizes and contents; None for no files, too many or too much.

    A file larger than `FILE_BYTES_MAX` counts by its size only, because it is hardly code.
    """
    running, count, total = hashlib.sha256(), 0, 0
    for name in names:
        path = folder / name
        try:
            # Closing a file that SQLite has open would release its locks, see decision 20.
            if path.is_symlink() or not path.is_file() or is_open_here(path):
                continue
            size = path.stat().st_size
            # A file of size 0 that has content, as in /proc, might never end.
            content = path.read_bytes() if 0 < size <= FILE_BYTES_MAX else b""
        except OSError:
            continue
        count, total = count + 1, total + len(content)
        if count > FILES_MAX or total > DIFF_BYTES_MAX:
            return None
        running.update(f"{os.fsencode(name)!r} {size}\n".encode())
        running.update(content)
    return running.hexdigest() if count else None
