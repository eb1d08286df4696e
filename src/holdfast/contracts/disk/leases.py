"""Leases, which protect a checkpoint from deletion while a process reads it.

A lease is an empty file beside the checkpoint. The reader touches it every `RENEW_S`. It expires
`LEASE_S` after the last touch, so a killed reader can delay a deletion but never prevent it. Plain
files and their times work from every node and need no lock service. All times are by the clock of
the file server, so the clocks of the nodes need not agree.

There is no race between reader and deleter. A reader first creates its lease and then checks that
the manifest exists. A deleter first removes the manifest and then checks for leases. If it finds
one, it puts the manifest back. In either order, one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import READING, base_of, lease_path, list_leases, real_folder
from holdfast.contracts.disk.reading import open_beneath
from holdfast.contracts.errors import ForeignFileError

LEASE_S: Final = 600.0
RENEW_S: Final = 60.0
STOP_WAIT_S: Final = 5.0
_counter = itertools.count(1)


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[bool]:
    """Protect the checkpoint in `directory` from deletion while the block runs.

    Yields True if the lease was created. If it cannot be created (read-only or full file system,
    another user's folder), the block runs without one. A deletion may then remove files during the
    read, with no other harm. Check the manifest inside the block: the lease does not protect a
    checkpoint that was deleted before.
    """
    lease = lease_path(directory.absolute(), _holder())
    try:
        # Through another link in the place of `checkpoints`, the lease would be written elsewhere.
        folder = real_folder(lease.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        # The lease comes before the caller's look for the manifest. A deleter does the reverse, so
        # one of the two sees the other, see decision 12.
        os.close(open_beneath(folder / lease.name, flags, below=base_of(folder)))
    except (OSError, ForeignFileError):
        yield False
        return
    over = threading.Event()
    renewal = threading.Thread(
        target=_renew, args=(lease, over), name="holdfast-lease", daemon=True
    )
    renewal.start()
    try:
        yield True
    finally:
        over.set()
        renewal.join(STOP_WAIT_S)
        with contextlib.suppress(OSError):
            lease.unlink(missing_ok=True)


def readers(directory: Path) -> list[str]:
    """Return the holders of valid leases on a checkpoint, as `host-pid-number`.

    Expired leases are deleted.
    """
    found, leases = [], list_leases(directory)
    # By the file server's clock, which set the times of the leases. Clocks of nodes may differ.
    now = storage_time(directory.parent) if leases else 0.0
    for lease in leases:
        try:
            is_old = now - lease.lstat().st_mtime > LEASE_S
        except FileNotFoundError:
            continue
        if is_old:
            with contextlib.suppress(OSError):
                lease.unlink(missing_ok=True)
        else:
            found.append(lease.name.partition(READING)[2])
    return sorted(found)


def storage_time(folder: Path) -> float:
    """Return the Unix time by the clock that sets the times of files in a run's `folder`.

    This is the clock of this host if no file can be created there.
    """
    folder = real_folder(folder)
    probe = folder / f".clock-{_holder()}"
    try:
        handle = open_beneath(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, below=base_of(folder))
    except (OSError, ForeignFileError):
        return time.time()
    try:
        return os.fstat(handle).st_mtime
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            probe.unlink()


def _holder() -> str:
    """Return a name for a lease that is unique among the live leases of all nodes."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())
    return f"{host}-{os.getpid()}-{next(_counter)}"


def _renew(lease: Path, over: threading.Event) -> None:
    """Touch the lease until `over` is set or the lease is gone."""
    while not over.wait(RENEW_S):
        try:
            os.utime(lease, follow_symlinks=False)
        # A deleter found it expired, for example because this process was suspended for ten
        # minutes.
        except FileNotFoundError:
            return
        except OSError:
            # The file system may be unavailable for a while. The lease lasts several renewals.
            continue
