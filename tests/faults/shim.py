"""The test's side of `shim.c`: builds it, arms faults, and reads the traced calls."""

from __future__ import annotations

import mmap
import os
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("shim.c")
COMPILE_TIMEOUT_S: Final = 120.0
# `struct control` of shim.c.
_CONTROL: Final = struct.Struct("=6i24s1000s")
_STATE_ARMED: Final = 1
_STATE_FIRED: Final = 2
# Random suffixes of temporary names, and the process id in that of the link `latest`.
_OWN_ENDING: Final = re.compile(r"(/\.[^/]+\.)(?:[a-z0-9_]{8}|[0-9a-f]{12}|\d+)$")
_STEP: Final = re.compile(r"step-\d{8,}\.a\d{4,}\.l\d{2,}")
STEP: Final = "STEP"


class Action(IntEnum):
    """What happens at the chosen call."""

    FAIL_ONCE = 1
    FAIL_FROM_HERE = 2
    KILL_AFTER = 3
    SHORT_WRITE = 4
    KILL_BEFORE = 5


@dataclass(frozen=True)
class Call:
    """One traced call. Paths are relative to the folder; `other` is a rename's or link's source."""

    op: str
    path: str
    other: str
    result: int
    error: int
    offset: int
    only_reads: bool
    data: bytes


@dataclass(frozen=True, order=True)
class Point:
    """One system call of a save, identified so that every save has it: the `nth` of its kind.

    `pattern` has `STEP` for the checkpoint's name and `*` for parts that differ by process.
    """

    op: str
    pattern: str
    nth: int

    def __str__(self) -> str:
        return f"{self.op} {self.pattern} #{self.nth}"


class Shim:
    """The shim of one process: start the process with `environment`."""

    def __init__(self, library: Path, root: Path, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        control, self._trace = folder / "control", folder / "trace"
        control.write_bytes(bytes(_CONTROL.size))
        self._trace.write_bytes(b"")
        with open(control, "r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), 0)
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAULT_ROOT": str(root),
            "FAULT_CONTROL": str(control),
            "FAULT_TRACE": str(self._trace),
        }

    def arm(self, point: Point, checkpoint: str, action: Action, error: int = 0) -> None:
        """Do `action` at `point` of the save whose directory is `checkpoint`."""
        pattern = point.pattern.replace(STEP, checkpoint).encode()
        packed = _CONTROL.pack(0, action, error, point.nth, 1, 0, point.op.encode(), pattern)
        self._map[4 : len(packed)] = packed[4:]
        self._map[:4] = struct.pack("=i", _STATE_ARMED)

    def trace(self) -> None:
        """Trace all calls from now on, without a fault."""
        self._map[: _CONTROL.size] = _CONTROL.pack(0, 0, 0, 0, 1, 0, b"", b"")

    def disarm(self) -> None:
        """Remove the fault and continue tracing."""
        self._map[:4] = struct.pack("=i", 0)

    @property
    def has_fired(self) -> bool:
        """True once the armed call was made."""
        return bool(struct.unpack("=i", self._map[:4])[0] == _STATE_FIRED)

    def calls(self) -> list[Call]:
        """All calls traced so far, in the order in which they took effect."""
        return [_parse(line) for line in self._trace.read_bytes().splitlines()]

    def forget(self) -> None:
        """Clear the trace."""
        os.truncate(self._trace, 0)

    def close(self) -> None:
        """Release the control page."""
        self._map.close()


def build(folder: Path) -> Path:
    """Compile the shim into `folder`; returns the library's path."""
    library = folder / "shim.so"
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        str(library),
        str(SOURCE),
        "-ldl",
        "-lpthread",
    ]
    subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S)
    return library


def points_of(calls: Iterable[Call], run: str) -> list[Point]:
    """The calls of one save of the run in folder `run`, as points that every save has."""
    counts: Counter[tuple[str, str]] = Counter()
    points = []
    for call in calls:
        pattern = pattern_of(call.path)
        counts[call.op, pattern] += 1
        points.append(Point(call.op, pattern, counts[call.op, pattern]))
    return [p for p in points if p.pattern == run or p.pattern.startswith(f"{run}/")]


def pattern_of(path: str) -> str:
    """`path` with the parts that differ from save to save replaced."""
    return _STEP.sub(STEP, _OWN_ENDING.sub(r"\1*", path))


def _parse(line: bytes) -> Call:
    op, path, other, result, error, offset, only_reads, data = line.split(b"\t")
    return Call(
        op=op.decode(),
        path=path.decode(),
        other=other.decode(),
        result=int(result),
        error=int(error),
        offset=int(offset),
        only_reads=only_reads == b"1",
        data=bytes.fromhex(data.decode()),
    )


def unknown_calls(calls: Iterable[Call]) -> Iterator[Call]:
    """Calls of a kind that the recording does not support."""
    return (call for call in calls if call.op.startswith("unexpected"))
