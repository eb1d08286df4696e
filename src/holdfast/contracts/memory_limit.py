"""How much memory this process may still take, by the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")
# (limit, usage, what of the usage is page cache) by the version of control groups.
_NAMES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file total_active_file"),
    2: ("memory.max", "memory.current", "inactive_file active_file"),
}


def group_room(own_groups: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> int | None:
    """Bytes that the process's control groups leave it, the page cache counted as free.

    The least of all groups above it, of version 1 and 2; None where none has a limit. A job of
    Slurm or a container has one far below the machine's memory.
    """
    rooms = [
        room
        for version, group, top in _groups(own_groups, mount)
        for folder in (group, *group.parents)
        if folder.is_relative_to(top) and (room := _room_in(folder, version)) is not None
    ]
    return min(rooms, default=None)


def _groups(own_groups: Path, mount: Path) -> Iterator[tuple[int, Path, Path]]:
    """(version, folder of the group, folder of the topmost one) of each hierarchy of memory."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield 2, mount / path.lstrip("/"), mount
        elif "memory" in controllers.split(","):
            # In a container the path may be the host's; its own group is then the topmost.
            yield 1, mount / "memory" / path.lstrip("/"), mount / "memory"


def _room_in(folder: Path, version: int) -> int | None:
    """What one group leaves; None where it has no limit, or says nothing."""
    limit_name, usage_name, cache_names = _NAMES[version]
    try:
        limit, usage = (int((folder / name).read_text()) for name in (limit_name, usage_name))
        rows = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
    except (OSError, ValueError):
        # Without a limit version 2 says `max`.
        return None
    cache = sum(int(row[1]) for row in rows if row and row[0] in cache_names.split())
    return max(0, limit - usage + cache)
