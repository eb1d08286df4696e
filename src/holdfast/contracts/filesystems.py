"""The file system under a path: its type, whether hosts share it, and how late it shows a change.

A network file system lets a client answer from its own cache. NFS keeps the absence of a name and
a directory's attributes for up to `acdirmax` seconds (60 unless the mount says otherwise), so a
file that another host has written can seem absent for that long.
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
# Types whose files several hosts can see, without `fuse.` before them.
NETWORK_TYPES: Final = frozenset(
    {"9p", "acfs", "afs", "beegfs", "beegfs_nodev", "ceph", "cifs", "coda", "curvefs", "cvmfs"}
    | {"daos", "dfuse", "dvs", "fhgfs", "gcsfuse", "gfs", "gfs2", "glusterfs", "goofys", "gpfs"}
    | {"juicefs", "lustre", "mfs", "moosefs", "mount-s3", "mountpoint-s3", "ncpfs", "nfs", "nfs4"}
    | {"ocfs2", "orangefs", "panfs", "pvfs2", "quobyte", "rclone", "s3fs", "seaweedfs", "smb2"}
    | {"smb3", "smbfs", "sshfs", "vastnfs", "vboxsf", "virtiofs", "weedfs", "wekafs"}
)
FUSE: Final = "fuse."
NODE_LOCAL: Final = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# How late a client of a network file system may see a name: NFS's default of `acdirmax`.
CACHE_S: Final = 60.0
CACHE_MARGIN_S: Final = 15.0
# A local file system shows a name at once; this allows for clocks that differ by a little.
LOCAL_DELAY_S: Final = 5.0
_ACDIRMAX: Final = re.compile(r"\bacdirmax=(\d+)")
# Lustre's, NFS's of old, and NFS's of today.
_LOCAL_LOCKS: Final = re.compile(r"\b(?:localflock|nolock|local_lock=(?:all|flock))\b")
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class FileSystem:
    """A mounted file system: its type as the kernel names it, and its mount options."""

    kind: str
    options: str = ""

    @property
    def is_network(self) -> bool:
        """True for a type that several hosts are known to share."""
        return self.kind.lower().removeprefix(FUSE) in NETWORK_TYPES

    @property
    def may_be_shared(self) -> bool:
        """True unless the type is known to be one host's own; any FUSE program may be shared."""
        return self.is_network or self.kind.startswith(FUSE)

    @property
    def local_lock_option(self) -> str:
        """The mount option by which locks hold on this host only; empty where there is none."""
        found = _LOCAL_LOCKS.search(self.options) if self.may_be_shared else None
        return found[0] if found else ""

    @property
    def delay_s(self) -> float:
        """Seconds after which this host sees a name that another host has made."""
        if not self.may_be_shared:
            return LOCAL_DELAY_S
        told = _ACDIRMAX.search(self.options)
        return max(CACHE_S, float(told[1]) if told else 0.0) + CACHE_MARGIN_S


def filesystem_of(path: Path) -> FileSystem:
    """The file system that holds `path`, or its nearest existing parent."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    real = there.resolve()
    found = FileSystem("")
    depth = -1
    for point, mounted in _mounts():
        # The last one mounted at a point hides those before it.
        if real.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = mounted, len(point.parts)
    return found


def delay_s(path: Path) -> float:
    """Seconds after which an absence at `path` may be believed; see `FileSystem.delay_s`."""
    return filesystem_of(path).delay_s


def refresh(directory: Path) -> None:
    """Have this host compare its cache of the names in `directory` with the server; best effort.

    NFS asks for a directory's attributes when it is opened, and forgets absences that are older.
    """
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.listdir(handle)
        finally:
            os.close(handle)


def revalidate(directory: Path) -> None:
    """Like `refresh`, by making a name in `directory` as well; best effort.

    The server's answer to a change tells a client that the directory is not as it was cached,
    which also works on mounts without close-to-open consistency (`nocto`).
    """
    with contextlib.suppress(OSError), tempfile.NamedTemporaryFile(dir=directory, prefix=".look."):
        pass
    refresh(directory)


def _mounts() -> list[tuple[Path, FileSystem]]:
    """Every mount of this process in the order of mounting; none where there is no `/proc`."""
    try:
        lines = MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [mounted for line in lines if (mounted := _parse(line)) is not None]


def _parse(line: str) -> tuple[Path, FileSystem] | None:
    """One line of `mountinfo`: point and options before ` - `, type and further options after."""
    before, dash, after = line.partition(" - ")
    fields, facts = before.split(" "), after.split(" ")
    if not dash or len(fields) < 6 or len(facts) < 3:
        return None
    point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
    return Path(point), FileSystem(facts[0], f"{fields[5]},{facts[2]}")
