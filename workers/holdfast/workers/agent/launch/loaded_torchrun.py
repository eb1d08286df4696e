"""A torchrun that loads its libraries while the agent loads its own, for the first launch.

It has no ranks before a launch starts it. Its guard ends it with the agent. This module is loaded
before the agent, so it imports little.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.reading import read_bounded
from holdfast.contracts.errors import HoldfastError

GUARD: Final = "holdfast.workers.agent.guard"
STARTER: Final = "holdfast.workers.agent.loaded_start"
TORCHRUN: Final = "torch.distributed.run"
END_WAIT_S: Final = 30.0
# What reading a value of another type than expected raises.
MALFORMED: Final = (LookupError, TypeError, AttributeError)


class LoadedTorchrun:
    """Call `start` or `discard` once."""

    def __init__(self, folder: str, variables: Mapping[str, str]) -> None:
        """Start the process in the working directory `folder`. Raises `OSError`."""
        self.log = os.memfd_create("torchrun.log", os.MFD_CLOEXEC)
        self._file = os.memfd_create("torchrun-arguments", os.MFD_CLOEXEC)
        self._pipe, self._release = os.pipe2(os.O_CLOEXEC)
        own = f"/proc/{os.getpid()}/fd"
        words = [TORCHRUN, f"{own}/{self._pipe}", f"{own}/{self._file}"]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", GUARD, sys.executable, "-m", STARTER, *words],
                stdin=subprocess.PIPE,
                stdout=self.log,
                stderr=self.log,
                cwd=folder,
                env=variables,
                start_new_session=True,
            )
        except BaseException:
            os.close(self.log)
            self._close()
            raise
        self._is_used = False

    @classmethod
    def of(cls, request_path: Path) -> LoadedTorchrun | None:
        """Return a torchrun for an attempt, or None if its first launch must start one itself."""
        # The agent reads the request again and reports what is wrong.
        with contextlib.suppress(HoldfastError, OSError, ValueError, *MALFORMED):
            request = json.loads(read_bounded(request_path, below=request_path.parents[2]))
            if request["program"]["launcher"] != "torchrun" or request["launch"]["node_setup"]:
                return None
            # The launch gives the whole environment, with the values of references to secrets.
            given = {k: v for k, v in request["environment"].items() if isinstance(v, str)}
            return cls(request["working_directory"], {**os.environ, **given})
        return None

    @property
    def is_ready(self) -> bool:
        """True until it is used, unless it has ended."""
        return not self._is_used and self._process.poll() is None

    def start(
        self, arguments: Sequence[str], variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Let torchrun begin; return its guard, which belongs to the caller from now on."""
        self._is_used = True
        content = {"arguments": list(arguments), "environment": dict(variables)}
        with open(self._file, "wb", closefd=False) as file:
            file.write(json.dumps(content).encode())
        os.write(self._release, b"1")
        return self._process

    def discard(self) -> None:
        """End the process if no launch has used it."""
        if not self._is_used:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_WAIT_S)
            os.close(self.log)
            self._is_used = True
        self._close()

    def _close(self) -> None:
        for descriptor in (self._file, self._pipe, self._release):
            os.close(descriptor)
