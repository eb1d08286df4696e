"""The number of out-of-memory kills by the kernel, as evidence for causes."""

from __future__ import annotations

from pathlib import Path

_VMSTAT = Path("/proc/vmstat")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Return the out-of-memory kills so far in this process's control group, or the machine."""
    of_group = _of_own_group()
    return of_group if of_group is not None else _field(_VMSTAT, "oom_kill") or 0


def _of_own_group() -> int | None:
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            return _field(_GROUPS / path.lstrip("/") / "memory.events", "oom_kill")
        if "memory" in controllers.split(","):
            group = _GROUPS / "memory" / path.lstrip("/")
            return _field(group / "memory.oom_control", "oom_kill")
    return None


def _field(path: Path, name: str) -> int | None:
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), None)
