"""The limits of this process: memory, within the machine and its cgroups, and open files."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OWN_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")
_MACHINE: Final = Path("/proc/meminfo")
# (limit, usage, the parts of the usage that are page cache) by cgroup version.
_NAMES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file total_active_file"),
    2: ("memory.max", "memory.current", "inactive_file active_file"),
}


def free_memory(machine: Path = _MACHINE) -> int | None:
    """Return the bytes that this process may still allocate, or None if the system does not say."""
    rooms = [room for room in (group_room(), _machine_room(machine)) if room is not None]
    return min(rooms, default=None)


def group_room(own_groups: Path = _OWN_GROUPS, mount: Path = _MOUNT) -> int | None:
    """Return the bytes that the process may still allocate, or None without a limit.

    This is the minimum over all its cgroups and their parents, of versions 1 and 2. The page cache
    counts as free. A Slurm job or a container has a limit far below the machine's memory.
    """
    rooms = [
        room
        for version, group, top in _groups(own_groups, mount)
        for folder in (group, *group.parents)
        if folder.is_relative_to(top) and (room := _room_in(folder, version)) is not None
    ]
    return min(rooms, default=None)


def _machine_room(machine: Path) -> int | None:
    try:
        rows = dict(line.split(":", 1) for line in machine.read_text().splitlines())
        return int(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, LookupError):
        return None


def _groups(own_groups: Path, mount: Path) -> Iterator[tuple[int, Path, Path]]:
    """Yield (version, folder of the cgroup, folder of the top one) of each memory hierarchy."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield 2, mount / path.lstrip("/"), mount
        elif "memory" in controllers.split(","):
            # In a container, the path may be that of the host. The top cgroup is then its own.
            yield 1, mount / "memory" / path.lstrip("/"), mount / "memory"


def _room_in(folder: Path, version: int) -> int | None:
    """Return the bytes that one cgroup leaves; None if it has no limit or cannot be read."""
    limit_name, usage_name, cache_names = _NAMES[version]
    try:
        limit, usage = (int((folder / name).read_text()) for name in (limit_name, usage_name))
        rows = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
    except (OSError, ValueError):
        # Without a limit, the file of version 2 contains `max`.
        return None
    cache = sum(int(row[1]) for row in rows if row and row[0] in cache_names.split())
    return max(0, limit - usage + cache)


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to the highest that it may set (best effort)."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
