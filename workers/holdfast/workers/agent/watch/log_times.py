"""Records when the ranks' output appeared, for `holdfast logs --timestamps`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.disk.rank_logs import TIMES, time_line

# For the first minutes of a launch, each heartbeat records. After that, a month of 16 files that
# always grow takes about 20 MB.
FINE_S: Final = 600.0
COARSE_S: Final = 60.0


class LogTimes:
    """Appends the sizes of a node's growing logs to the file `times.log` beside them."""

    def __init__(self, attempt: AttemptPaths, node: int) -> None:
        self._attempt, self._node = attempt, node
        self._launch, self._began, self._wrote = 0, 0.0, 0.0
        self._sizes: dict[str, int] = {}

    def look(self, launch: int, *, is_last: bool = False) -> None:
        """Record the logs that have grown. `launch` is the current one, 0 before the first."""
        now = time.time()
        if launch != self._launch:
            self._write(now)
            self._launch, self._began, self._sizes = launch, now, {}
        is_fine = now - self._began < FINE_S or not 0 <= now - self._wrote < COARSE_S
        if is_fine or is_last:
            self._write(now)

    def _write(self, now: float) -> None:
        if not self._launch:
            return
        folder = self._attempt.rank_log(self._node, self._launch, 0).parent
        grown = [
            (path.name, size)
            for path in sorted(folder.glob("rank-*.log"))
            if (size := _size_of(path)) > self._sizes.get(path.name, 0)
        ]
        if not grown:
            return
        with open(folder / TIMES, "a") as stream:
            stream.writelines(time_line(now, name, size) for name, size in grown)
        self._sizes.update(grown)
        self._wrote = now


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
