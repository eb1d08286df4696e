"""Mounts of `caching_fs.c`, a file system whose clients believe old answers for a while.

    python infra/filesystems/caching_mount.py SOURCE MOUNT_POINT [--seconds S]

mounts SOURCE in this process's mount namespace. `umount MOUNT_POINT` ends it.
"""

import argparse
import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SOURCE_CODE: Final = Path(__file__).with_name("caching_fs.c")
PROGRAM: Final = Path(__file__).parents[2] / ".setup" / "caching_fs"
COMPILE_TIMEOUT_S: Final = 120
MOUNT_WAIT_S: Final = 15.0
COUNTS: Final = "CACHING_FS_COUNTS"
LOCKS: Final = "CACHING_FS_LOCKS"
# Runs a command after a mount in a separate mount namespace. The mount ends with the namespace.
THEN: Final = 'set -e; "$1" "$2" "$3" "$4" -o "$5"; shift 5; exec "$@"'


class CachingMountError(RuntimeError):
    """The file system could not be compiled or mounted."""


def compile_program() -> Path:
    """Return the compiled file system; compile it if it is missing or old. Raises an error."""
    PROGRAM.parent.mkdir(exist_ok=True)
    with PROGRAM.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if PROGRAM.exists() and PROGRAM.stat().st_mtime >= SOURCE_CODE.stat().st_mtime:
            return PROGRAM
        if not shutil.which("gcc") or not shutil.which("pkg-config"):
            packages = "gcc pkg-config libfuse3-dev"
            raise CachingMountError(f"not installed; run: apt-get install {packages}")
        flags = _call(["pkg-config", "--cflags", "--libs", "fuse3"]).split()
        new = PROGRAM.with_suffix(".new")
        _call(["gcc", "-O2", "-Wall", "-o", str(new), str(SOURCE_CODE), *flags])
        new.replace(PROGRAM)
    return PROGRAM


def mount_command(source: Path, control: Path, point: Path, seconds: float) -> list[str]:
    """Return the command that mounts `source` at `point` and believes answers for `seconds`."""
    return [str(compile_program()), str(source), str(control), str(point), "-o", _options(seconds)]


def in_own_mount(
    source: Path,
    control: Path,
    point: Path,
    seconds: float,
    counts: Path | None = None,
    *,
    locks: str = "",
) -> list[str]:
    """Return the words before a command that sees `point` through a mount of its own.

    The file `counts` gets the number of operations on this mount, see `read_counts`. With `locks`
    "local", file locks hold in this mount only.
    """
    given = {COUNTS: counts, LOCKS: locks}
    environment = [f"{name}={value}" for name, value in given.items() if value]
    isolate = ["env", *environment, "unshare", "--mount", "--propagation=private"]
    words = [str(compile_program()), str(source), str(control), str(point), _options(seconds)]
    return [*isolate, "sh", "-c", THEN, "sh", *words]


def set_fault(control: Path, *, latency: str = "0", error: str = "none", paths: str = "*") -> None:
    """Begin a fault, or end it without arguments; see `caching_fs.c`."""
    new = control.with_suffix(".new")
    new.write_text(f"{latency} {error} {paths}\n")
    new.replace(control)


def read_counts(counts: Path) -> tuple[int, int]:
    """Return how many operations on metadata and on data have reached the file system."""
    metadata, data = struct.unpack("=QQ", counts.read_bytes())
    return metadata, data


@contextlib.contextmanager
def mounted(
    source: Path, control: Path, point: Path, seconds: float, *, locks: str = ""
) -> Iterator[Path]:
    """Mount `source` at `point` while the block runs. Raises `CachingMountError`.

    With `locks` "local", file locks hold in this mount only.
    """
    if not control.exists():
        set_fault(control)
    prefix = ["env", f"{LOCKS}={locks}"] if locks else []
    _call([*prefix, *mount_command(source, control, point, seconds)])
    try:
        yield point
    finally:
        set_fault(control)
        _unmount(point)


def _options(seconds: float) -> str:
    times = ",".join(f"{name}_timeout={seconds:g}" for name in ("attr", "entry", "negative"))
    return f"{times},fsname=caching_fs,subtype=caching_fs,max_threads=64"


def _unmount(point: Path) -> None:
    give_up = time.monotonic() + MOUNT_WAIT_S
    while os.path.ismount(point):
        is_late = time.monotonic() > give_up
        subprocess.run(
            ["umount", *(["--lazy"] if is_late else []), str(point)],
            capture_output=True,
            timeout=MOUNT_WAIT_S,
            check=is_late,
        )
        time.sleep(0.1)


def _call(command: list[str]) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise CachingMountError(f"{command[0]} exited {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    """Mount and print how to unmount. Return the exit status."""
    parser = argparse.ArgumentParser(description="Mount a file system with stale caches.")
    parser.add_argument("source", type=Path)
    parser.add_argument("point", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long answers are believed")
    given = parser.parse_args()
    control = given.point.absolute().with_name(f".{given.point.name}.fault")
    try:
        set_fault(control)
        _call(mount_command(given.source, control, given.point, given.seconds))
    except (CachingMountError, OSError) as error:
        print(f"caching_mount.py: {error}", file=sys.stderr)
        return 1
    print(f"# faults: write `LATENCY_MS ERROR PATTERN` into {control}; end: umount {given.point}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
