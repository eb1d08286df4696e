"""The file system of a path: its type, whether hosts share it, and its delay for changes.

The clients of a network file system answer from caches. NFS caches the absence of a name and a
directory's attributes for up to `acdirmax` seconds (by default 60). So a file that another host has
written can seem absent for that long.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
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
# A local file system shows a name at once. This allows for small differences between clocks.
LOCAL_DELAY_S: Final = 5.0
_ACDIRMAX: Final = re.compile(r"\bacdirmax=(\d+)")
# Options of Lustre, of older NFS and of current NFS.
_LOCAL_LOCKS: Final = re.compile(r"\b(?:localflock|nolock|local_lock=(?:all|flock))\b")
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


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
