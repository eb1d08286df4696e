"""Leases: a checkpoint that somebody reads is not deleted under their hands.

A lease is an empty file beside the checkpoint. Its holder touches it every `RENEW_S`, and
`LEASE_S` after the last touch it counts no longer, so that a reader that was killed delays a
deletion and never prevents it. Plain files and their times work from every node and need no lock
service; clocks of nodes must agree to within some minutes.

Neither side can lose the race between them. A reader first leaves its lease and then looks whether
the manifest is there. Who deletes first takes the manifest away and then looks for leases, and puts
it back when there is one. Whichever came first, one of the two sees the other.
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

from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.paths import READING, lease_path, list_leases
from holdfast.contracts.reading import open_beneath

LEASE_S: Final = 600.0
RENEW_S: Final = 60.0
STOP_WAIT_S: Final = 5.0
_counter = itertools.count(1)


@contextlib.contextmanager
def reading(directory: Path) -> Iterator[bool]:
    """Keep the checkpoint in `directory` from deletion while the block runs.

    Yields True when the lease stands. Where it cannot be written (a read-only or full file
    system, somebody else's folder) the block runs without one: a reader that is overtaken by a
    deletion meets missing files and nothing worse. Look at the manifest inside the block, not
    before it: what had been taken away by then is not held.
    """
    lease = lease_path(directory.absolute(), _holder())
    try:
        # A link in the place of `checkpoints` would have the lease written elsewhere.
        below = lease.parent.parent
        os.close(open_beneath(lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL, below=below))
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


def is_being_read(directory: Path) -> bool:
    """True while somebody holds a lease on the checkpoint in `directory`."""
    return bool(readers(directory))


def readers(directory: Path) -> list[str]:
    """Who reads the checkpoint in `directory`: `host-pid-number` of each lease that counts."""
    now = time.time()
    found = []
    for lease in list_leases(directory):
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


def _holder() -> str:
    """A name for one lease that no other live one of any node has."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())
    return f"{host}-{os.getpid()}-{next(_counter)}"


def _renew(lease: Path, over: threading.Event) -> None:
    """Touch the lease until it is over, and no longer than it exists."""
    while not over.wait(RENEW_S):
        try:
            os.utime(lease, follow_symlinks=False)
        except FileNotFoundError:
            return
        except OSError:
            # A file system that is away for a while: the lease lasts for several renewals.
            continue
