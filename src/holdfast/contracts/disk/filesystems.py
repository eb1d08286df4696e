"""The file system of a path: its type, whether hosts share it, and its delay for changes.

The clients of a network file system answer from caches. NFS caches the absence of a name and a
directory's attributes for up to `acdirmax` seconds (by default 60). So a file that another host has
written can seem absent for that long.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MOUNTS: Final = Path("/proc/self/mountinfo")
# Types whose files several hosts can see, without the prefix `fuse.`.
NETWORK_TYPES: Final = frozenset(
    {"9p", "acfs", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "coda", "curvefs", "cvmfs"}
    | {"daos", "dfuse", "dvs", "fhgfs", "gcsfuse", "gfs", "gfs2", "glusterfs", "goofys", "gpfs"}
    | {"juicefs", "lustre", "mfs", "moosefs", "mount-s3", "mountpoint-s3", "ncpfs", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "quobyte", "rclone", "s3fs", "seaweedfs", "smb2"}
    | {"smb3", "smbfs", "sshfs", "vastnfs", "vboxsf", "virtiofs", "weedfs", "wekafs"}
)
FUSE: Final = "fuse."
NODE_LOCAL: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# How late a client of a network file system may see a name: the default of NFS's `acdirmax`.
CACHE_S: Final = 60.0
CACHE_MARGIN_S: Final = 15.0
# A local file system shows a name immediately. This allows for small differences between clocks.
LOCAL_DELAY_S: Final = 5.0
_ACDIRMAX: Final = re.compile(r"\bacdirmax=(\d+)")
# Options of Lustre, of older NFS and of current NFS.
_LOCAL_LOCKS: Final = re.compile(r"\b(?:localflock|nolock|local_lock=(?:all|flock))\b")
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")
# Of the kernel's `statx`, for which this Python has no function.
_WORKING_DIRECTORY: Final = -100
_EMPTY_PATH: Final = 0x1000
_FORCE_SYNC: Final = 0x2000
_BASIC_STATS: Final = 0x7FF
_STATX_BYTES: Final = 256
# By the number of a device: when this process looked (monotonic seconds), and its file system. The
# kernel gives the number of an unmounted file system to the next one, so a look is soon too old.
_KNOWN: Final[dict[int, tuple[float, FileSystem]]] = {}
KNOWN_S: Final = 1.0


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system: its type, as the kernel names it, and its mount options."""

    kind: str
    options: str = ""

    @property
    def is_network(self) -> bool:
        """True for a type that is known to be shared between hosts."""
        return self.kind.lower().removeprefix(FUSE) in NETWORK_TYPES

    @property
    def may_be_shared(self) -> bool:
        """True for a network type and for any FUSE type, which may be shared too."""
        return self.is_network or self.kind.startswith(FUSE)

    @property
    def local_lock_option(self) -> str:
        """The mount option that makes locks valid on this host only; empty without one."""
        found = _LOCAL_LOCKS.search(self.options) if self.may_be_shared else None
        return found[0] if found else ""

    @property
    def delay_s(self) -> float:
        """Seconds after which this host sees a name that another host has created."""
        if not self.may_be_shared:
            return LOCAL_DELAY_S
        option = _ACDIRMAX.search(self.options)
        return max(CACHE_S, float(option[1]) if option else 0.0) + CACHE_MARGIN_S


def filesystem_of(path: Path) -> FileSystem:
    """Return the file system of `path`, or of its nearest existing parent."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    real = there.resolve()
    found = FileSystem("")
    depth = -1
    for point, mounted in _mounts():
        # The last mount at a mount point hides earlier ones.
        if real.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = mounted, len(point.parts)
    return found


def delay_s(path: Path) -> float:
    """Return the seconds after which an absence at `path` is certain, see `FileSystem.delay_s`."""
    return filesystem_of(path).delay_s


def is_there(path: Path) -> bool:
    """Return True if `path` exists, even if another host has just created it.

    Use this to wait for a file of another host. A client remembers a name that it looked up in
    vain, for up to a minute. The cost does not depend on how many names the folder has.
    """
    # A name that is found needs no question to the server. Only absences are cached, see
    # decision 48.
    if os.path.lexists(path) or not _is_on_shared_device(path.parent):
        return os.path.lexists(path)
    # NFS asks for the folder's time when it is opened, and then drops older absences.
    with contextlib.suppress(OSError):
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    look_up(path)
    return os.path.lexists(path)


def _is_on_gluster(handle: int) -> bool:
    """Return whether an open file is on GlusterFS, by its device."""
    found = _known(os.fstat(handle).st_dev, Path(f"/proc/self/fd/{handle}"))
    return found.kind.removeprefix(FUSE) == "glusterfs"


def _is_on_shared_device(folder: Path) -> bool:
    """Return whether several hosts may see `folder`, by its device; False if it does not exist."""
    try:
        return _known(folder.stat().st_dev, folder).may_be_shared
    except OSError:
        return False


def _known(device: int, path: Path) -> FileSystem:
    """Return the file system of `path` on `device`, as it was at most `KNOWN_S` seconds ago."""
    looked_at, found = _KNOWN.get(device, (-math.inf, None))
    now = time.monotonic()
    if found is None or now - looked_at >= KNOWN_S:
        found = filesystem_of(path)
        _KNOWN[device] = now, found
    return found


def is_listed(path: Path) -> bool:
    """Return True if the server lists `path` in its folder, whatever this host remembers.

    Use this where a name may have been removed by another host. Its cost grows with the folder.
    Raises `OSError` if the folder cannot be read, and returns False if there is none.
    """
    try:
        return path.name in os.listdir(path.parent)
    except (FileNotFoundError, NotADirectoryError):
        return False


def look_up(path: Path) -> None:
    """Make this host forget a cached absence of `path` (best effort).

    `link` always looks up its target at the server. It then fails, because the target exists or
    else because a folder cannot have a second name.
    """
    with contextlib.suppress(OSError):
        # `open` with O_CREAT would ask the server too, but might create the file, see decision 48.
        os.link(path.parent, path)


def fetch_attributes(file: int | Path) -> None:
    """Make the next `stat` of a path or an open file return what the server knows (best effort).

    On GlusterFS, the attributes of a path may still be a second old.
    """
    if isinstance(file, int) and _is_on_gluster(file):
        # Its client has a separate cache below the kernel's. The answer to `fsync` renews it.
        with contextlib.suppress(OSError):
            os.fsync(file)
    if (statx := _statx()) is None:
        return
    handle, name = (file, b"") if isinstance(file, int) else (_WORKING_DIRECTORY, os.fsencode(file))
    flags = _EMPTY_PATH | _FORCE_SYNC
    statx(handle, name, flags, _BASIC_STATS, ctypes.create_string_buffer(_STATX_BYTES))


@functools.cache
def _statx() -> Callable[..., int] | None:
    """Return the C library's `statx`; None if it has no such function."""
    try:
        found = ctypes.CDLL(None).statx
    except (OSError, AttributeError):
        return None
    found.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p]
    return found


def send_flag(directory: Path) -> int:
    """Return the flag with which to open a file for writing that other hosts read while it grows.

    A client sends what was written when the file is closed, or half a minute later. With this flag,
    each write is sent immediately. On a local file system it is 0: every process sees a write.
    """
    return os.O_DSYNC if filesystem_of(directory).may_be_shared else 0


def refresh(directory: Path) -> None:
    """Make this host update its cache of the names in `directory` from the server (best effort).

    NFS fetches a directory's attributes when the directory is opened, and then drops older cached
    absences.
    """
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.listdir(handle)
        finally:
            os.close(handle)


def revalidate(directory: Path) -> None:
    """Do the same as `refresh`, and also create and delete a file in `directory` (best effort).

    The server's answer to a change shows the client that its cached directory is out of date. This
    also works on mounts without close-to-open consistency (`nocto`).
    """
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=directory, prefix=".look."):
        pass
    refresh(directory)


def _mounts() -> list[tuple[Path, FileSystem]]:
    """Return every mount of this process in mount order; none without `/proc`."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [mounted for line in lines if (mounted := _parse(line)) is not None]


def _parse(line: str) -> tuple[Path, FileSystem] | None:
    """Parse a line of `mountinfo`: mount point and options, ` - `, type and further options."""
    before, dash, after = line.partition(" - ")
    fields, facts = before.split(" "), after.split(" ")
    if not dash or len(fields) < 6 or len(facts) < 3:
        return None
    point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
    return Path(point), FileSystem(facts[0], f"{fields[5]},{facts[2]}")
