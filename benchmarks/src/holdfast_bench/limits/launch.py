"""Starts a rank program of the benchmark under torchrun, and removes all that it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.errors import RunFailedError

POLL_S: Final = 0.02
END_S: Final = 10.0
OUTPUT_LINES_SHOWN: Final = 30


class Launch:
    """One program on `ranks` ranks. As a context manager, it ends its processes on exit."""

    def __init__(
        self,
        program: str,
        ranks: int,
        settings: dict[str, Any],
        *,
        end_by: float,
        package: str = "holdfast_bench.limits",
    ) -> None:
        """`settings` go to the program. Their `directory` is created and gets output and result.

        `program` is a module of `package`. After `end_by`, a Unix time, every wait for it raises.
        """
        self._program = program
        self._directory = Path(settings["directory"])
        self._directory.mkdir(parents=True, exist_ok=True)
        self._out = self._directory / f"{program}.json"
        self._log = self._directory / f"{program}.log"
        self._end_by = end_by
        # Kept short for the sockets in it, whose paths are limited to about 100 characters.
        self._scratch = tempfile.mkdtemp(prefix="holdfast-")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", f"{package}.{program}"]
        command.append(json.dumps(settings | {"out": str(self._out)}))
        with open(self._log, "wb") as log, deferred_term() as terms:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=self._environment(ranks)
            )
            if terms:
                self.__exit__()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        end_tree(self.process)
        shutil.rmtree(self._scratch, ignore_errors=True)

    def result(self) -> dict[str, Any]:
        """Wait for rank 0's result. Raises `RunFailedError` with the program's last output."""
        while self.process.poll() is None:
            self.check_time()
            time.sleep(POLL_S)
        if self.process.returncode != 0 or not self._out.exists():
            raise self._failure(f"ended with status {self.process.returncode}")
        found: dict[str, Any] = json.loads(self._out.read_text())
        return found

    def wait_for(self, path: Path) -> Any:
        """Wait for the JSON file `path`. Raises `RunFailedError` if the program ends first."""
        while not path.exists():
            if self.process.poll() is not None:
                raise self._failure(f"ended with status {self.process.returncode}")
            self.check_time()
            time.sleep(POLL_S)
        return json.loads(path.read_text())

    def check_time(self) -> None:
        """Raise `RunFailedError` if the program has used up its time."""
        if time.time() > self._end_by:
            raise self._failure("exceeded its time limit")

    def _failure(self, what: str) -> RunFailedError:
        lines = self._log.read_text(errors="replace").splitlines()[-OUTPUT_LINES_SHOWN:]
        output = "\n  ".join(lines)
        return RunFailedError(
            f"the benchmark's program `{self._program}` {what}. Try fewer --megabytes or another "
            f"--directory. Its last output:\n  {output}"
        )

    def _environment(self, ranks: int) -> dict[str, str]:
        """Return the environment without HOLDFAST_ variables. Ranks share the cores as threads."""
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        env = {name: v for name, v in os.environ.items() if not name.startswith("HOLDFAST_")}
        # torchrun leaves a folder in TMPDIR. Here it is deleted with the rest.
        return {"OMP_NUM_THREADS": str(threads), **env, "TMPDIR": self._scratch}


@contextlib.contextmanager
def deferred_term() -> Iterator[list[int]]:
    """Let SIGTERM wait for the end of the body, which finds the ones that came in the list.

    A handler that raises inside of `Popen` loses the process that has just been started.
    """
    came: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, former)
        if came:
            signal.raise_signal(signal.SIGTERM)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill torchrun, its ranks and their children, unless torchrun has already ended.

    A flusher whose ranks have ended finishes the sealed steps and then exits.
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
