"""Progress of a program, read from its output by the pattern of its spec."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.bounds import STEP_MAX
from holdfast.contracts.disk.reading import open_regular
from holdfast.contracts.errors import ForeignFileError
from holdfast.contracts.node.rank_status import NOWHERE
from holdfast.contracts.spec.program import STEP_GROUP

READ_BYTES: Final = 1 << 18
POLL_S: Final = 0.5
STOP_WAIT_S: Final = 5.0
STEPS_KEPT: Final = 10_000
# A pattern is searched in lines of at most this length, which bounds its time.
LINE_CHARACTERS_MAX: Final = 2000
# A progress bar overwrites its line, so a carriage return ends one too.
_ENDS: Final = re.compile(rb"[\r\n]")
_GROUPED: Final = str.maketrans("", "", ",_ ")


class Progress:
    """The steps in the lines of a program's output."""

    def __init__(self, pattern: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns monotonic seconds."""
        self._pattern, self._clock = re.compile(pattern), clock
        self.first = self.step = NOWHERE
        self.step_s = 0.0
        self.changed_at = clock()
        self._read: deque[tuple[float, int]] = deque(maxlen=STEPS_KEPT)

    def take(self, line: str) -> None:
        """Look for a step in one line. A step that is older than the newest one is ignored."""
        match = self._pattern.search(line[:LINE_CHARACTERS_MAX])
        text = (match[STEP_GROUP] or "").translate(_GROUPED) if match else ""
        if not (text.isascii() and text.isdecimal()) or int(text) > STEP_MAX:
            return
        step, now = int(text), self._clock()
        if step <= self.step:
            return
        if self.step > NOWHERE:
            self.step_s = (now - self.changed_at) / (step - self.step)
        else:
            self.first = step
        self.step, self.changed_at = step, now
        self._read.append((time.time(), step))

    def step_at(self, moment: float) -> int:
        """Return the newest step that had been read at `moment`, in Unix seconds, or `NOWHERE`."""
        return next((step for read_at, step in reversed(self._read) if read_at <= moment), NOWHERE)


class Tail:
    """Reads the new lines of a growing log. Safe against links that leave `below`."""

    def __init__(self, path: Path, below: Path) -> None:
        self._path, self._below = path, below
        self._offset, self._rest = 0, b""

    def lines(self, *, is_last: bool = False) -> list[str]:
        """Return the lines since the last call; with `is_last`, also one that has no end yet.

        Returns nothing while the log does not exist or storage cannot read it.
        """
        try:
            handle = open_regular(self._path, below=self._below, follow=True)
        except (OSError, ForeignFileError):
            return []
        try:
            added = self._read(handle)
        finally:
            os.close(handle)
        *whole, rest = _ENDS.split(self._rest + added)
        if is_last:
            whole, rest = [*whole, rest], b""
        # Of a line without an end, only the part in which a pattern is searched is kept.
        self._rest = rest[: 4 * LINE_CHARACTERS_MAX]
        return [line.decode(errors="replace") for line in whole if line]

    def _read(self, handle: int) -> bytes:
        added = os.pread(handle, READ_BYTES, self._offset)
        self._offset += len(added)
        return added


class OutputWatch:
    """A thread that reads the output of rank 0 while a launch runs."""

    def __init__(self, pattern: str, below: Path) -> None:
        """`below` is the folder that links of logs must not leave."""
        self._pattern, self._below = pattern, below
        self.progress = Progress(pattern)
        self._tails: list[Tail] = []
        self._has_ended, self._is_done = threading.Event(), threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="program-output", daemon=True)
        if pattern:
            self._thread.start()

    def begin(self, logs: Sequence[Path]) -> None:
        """Start a new launch, whose output is in `logs`."""
        self._has_ended.clear()
        self._is_done.clear()
        self.progress = Progress(self._pattern)
        self._tails = [Tail(path, self._below) for path in logs]

    def end(self) -> None:
        """Take the output as complete, because the program has ended."""
        self._has_ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all output has been read; return False if it was not in time."""
        return not self._pattern or self._is_done.wait(timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._pattern:
            self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            progress, tails = self.progress, self._tails
            has_ended = self._has_ended.is_set()
            while lines := [line for tail in tails for line in tail.lines(is_last=has_ended)]:
                for line in lines:
                    progress.take(line)
            if has_ended and tails is self._tails:
                self._is_done.set()
