"""Starting a rank program of the benchmark under torchrun, and leaving nothing of it behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.errors import RunFailedError

POLL_S: Final = 0.02
END_S: Final = 10.0
OUTPUT_LINES_SHOWN: Final = 30


class Launch:
    """One program on `ranks` ranks; a context manager whose end is the end of its processes."""

    def __init__(
        self, program: str, ranks: int, settings: dict[str, Any], *, end_by: float
    ) -> None:
        """`settings` are the program's; `directory` of them is made, and gets output and result.

        Past `end_by`, Unix time, every wait for the program raises.
        """
        self._program = program
        self._directory = Path(settings["directory"])
        self._directory.mkdir(parents=True, exist_ok=True)
        self._out = self._directory / f"{program}.json"
        self._log = self._directory / f"{program}.log"
        self._end_by = end_by
        # Short, because sockets are made in it, whose names are limited to about 100 letters.
        self._scratch = tempfile.mkdtemp(prefix="holdfast-")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", f"holdfast.trainer.bench.{program}"]
        command.append(json.dumps(settings | {"out": str(self._out)}))
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment(ranks)
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        end_tree(self.process)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def result(self) -> dict[str, Any]:
        """What rank 0 found; waits for it. Raises `RunFailedError` with the last output."""
        while self.process.poll() is None:
            self.check_time()
            time.sleep(POLL_S)
        if self.process.returncode != 0 or not self._out.exists():
            raise self._failure(f"ended with status {self.process.returncode}")
        found: dict[str, Any] = json.loads(self._out.read_text())
        return found

    def wait_for(self, path: Path) -> Any:
        """The JSON that the program leaves at `path`; `RunFailedError` when it ends first."""
        while not path.exists():
            if self.process.poll() is not None:
                raise self._failure(f"ended with status {self.process.returncode}")
            self.check_time()
            time.sleep(POLL_S)
        return json.loads(path.read_text())

    def check_time(self) -> None:
        """Raises `RunFailedError` when the program has used up its time."""
        if time.time() > self._end_by:
            raise self._failure("took longer than it was given")

    def _failure(self, what: str) -> RunFailedError:
        lines = self._log.read_text(errors="replace").splitlines()[-OUTPUT_LINES_SHOWN:]
        said = "\n  ".join(lines)
        return RunFailedError(
            f"the benchmark's program `{self._program}` {what}; try fewer --megabytes or another "
            f"--directory. Its last output:\n  {said}"
        )

    def _environment(self, ranks: int) -> dict[str, str]:
        """Ours without an agent's words, with as many threads for a rank as it has cores."""
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        env = {name: v for name, v in os.environ.items() if not name.startswith("HOLDFAST_")}
        # torchrun leaves a folder in the temporary one: here it goes with the rest.
        return {"OMP_NUM_THREADS": str(threads), **env, "TMPDIR": self._scratch}


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a torchrun with its ranks and what these have started; nothing when it has ended.

    A flusher whose ranks have ended finishes what was sealed and leaves by itself.
    """
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [*parent.children(recursive=True), parent]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(family, END_S)
    process.wait(END_S)
