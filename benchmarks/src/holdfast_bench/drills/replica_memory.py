"""Damage to the copies of a node's snapshots in the memory of its neighbour's flusher.

Copies lie in memory without a name. The owner keeps the same bytes. So a page that both processes
have is a part of a copy, and no other page is equal in two processes.
"""

from __future__ import annotations

import contextlib
import mmap
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

PAGE: Final = mmap.PAGESIZE
# A page of zeros, or of few other bytes, says nothing about what it is.
VALUES_MIN: Final = 32
WAIT_S: Final = 10.0


def pages_of(owner: psutil.Process) -> frozenset[bytes]:
    """Return the pages of a flusher that a copy of its snapshots may have.

    Raises `OSError` if the system does not let this process read them.
    """
    return frozenset(content for _, content in _pages(owner.pid) if len(set(content)) >= VALUES_MIN)


def damage_copies(owned: frozenset[bytes], holder: psutil.Process) -> int:
    """Invert a byte of each page of `holder` that is in `owned`; return their number.

    `holder` is a neighbour's flusher. Raises `OSError` if the system does not let this process
    write there.
    """
    damaged = 0
    with open(f"/proc/{holder.pid}/mem", "r+b", buffering=0) as memory:
        for at, content in _pages(holder.pid):
            if content in owned:
                memory.seek(at)
                memory.write(bytes([content[0] ^ 0xFF]))
                damaged += 1
    return damaged


def why_not() -> str:
    """Return why this process may not write into the memory of others, or ''."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        try:
            with open(f"/proc/{child.pid}/mem", "r+b", buffering=0):
                return ""
        except OSError as error:
            return f"the memory of another process cannot be written: {error.strerror}"
        finally:
            child.communicate(b"\n", WAIT_S)


def _pages(pid: int) -> Iterator[tuple[int, bytes]]:
    """Yield the address and the content of each page of a process in memory without a name."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end in _unnamed(pid):
            content = b""
            # The process may free it meanwhile.
            with contextlib.suppress(OSError):
                memory.seek(start)
                content = memory.read(end - start)
            for at in range(0, len(content) - PAGE + 1, PAGE):
                yield start + at, content[at : at + PAGE]


def _unnamed(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the writable ranges of a process's memory that have no name."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and not name:
            start, _, end = span.partition("-")
            yield int(start, 16), int(end, 16)
