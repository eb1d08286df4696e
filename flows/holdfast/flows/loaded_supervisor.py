"""A supervisor that loads its modules while a command still checks and creates its run.

It reads and writes nothing of the run before the command begins it. If the command ends before
that, however it ends, the process ends too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import RunPaths

MODULE: Final = "holdfast.flows.detached"
WHEN_TOLD: Final = "--when-told"
END_WAIT_S: Final = 10.0


class LoadedSupervisor:
    """Leave its `with` block to end a process that was not begun. Call `begin` at most once."""

    def __init__(self, paths: RunPaths) -> None:
        """Start the process for the run that will be at `paths`. Raises `OSError`."""
        self._directory = paths.directory
        self._is_begun = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE, WHEN_TOLD, str(paths.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def begin(self, directory: Path) -> subprocess.Popen[bytes] | None:
        """Let it supervise the run in `directory`, whose log exists; return the process.

        Returns None if it is another run's, or has ended. The caller then starts a process.
        """
        assert self._process.stdin is not None
        if self._is_begun or directory != self._directory or self._process.poll() is not None:
            return None
        try:
            with self._process.stdin as pipe:
                pipe.write(b"1")
        except OSError:
            return None
        self._is_begun = True
        return self._process

    def close(self) -> None:
        """End the process, unless it was begun."""
        assert self._process.stdin is not None
        if self._is_begun:
            return
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> LoadedSupervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def wait_until_told(log: Path) -> bool:
    """Wait in the loaded process for its command; return False if the command has ended.

    Afterwards, the output of this process goes to `log`, as that of other supervisors.
    """
    if not os.read(0, 1):
        return False
    with open(log, "ab") as output, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        for handle in (1, 2):
            os.dup2(output.fileno(), handle)
    return True
