"""Seconds from submission to the first step: `holdfast submit` beside `torchrun` alone, in pairs.

Run `python benchmarks/first_step.py [--pairs N] [--real-time]`. Both start the small job of
`benchmarks/peers` on two ranks, and in each pair one follows the other. Each job is then stopped
after a checkpoint and started again, `torchrun` by its command and Holdfast by `holdfast relaunch`.
The job under torchrun loads its checkpoint with `torch.load`. CPU seconds are those of all
processes that the command started, up to the first step, because wall seconds depend on the load.
Python keeps its compiled modules, as in an installation, even if `PYTHONDONTWRITEBYTECODE` is set.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

PROGRAMS: Final = Path(__file__).parent / "peers" / "programs"
RANKS: Final = 2
JOB: Final = {"step_s": 0.05, "save_steps": 20, "snapshot_steps": 5, "width": 64}
STEPS_BEFORE_STOP: Final = 25
WAIT_S_MAX: Final = 120.0
POLL_S: Final = 0.02
NOT_INHERITED: Final = frozenset({"PREFECT_API_URL", "PYTHONDONTWRITEBYTECODE"})
# This variable identifies all processes of a job, in any session.
MARK: Final = "PEERS_JOB"


class Job:
    """A job in a new folder, started as a user would. `peer` is `torchrun` or `holdfast`."""

    def __init__(self, peer: str, folder: Path) -> None:
        self.peer, self.folder = peer, folder
        folder.mkdir()
        settings = folder / "job.json"
        settings.write_text(json.dumps({**JOB, "steps": 10**6, "folder": str(folder)}))
        own = {MARK: str(settings), "OMP_NUM_THREADS": "1"}
        own |= {"HOLDFAST_HOME": str(folder / "home"), "HOLDFAST_ROOT": str(folder / "runs")}
        self._environment = {
            **{name: value for name, value in os.environ.items() if name not in NOT_INHERITED},
            **own,
        }
        (folder / "run.yaml").write_text(json.dumps(self._spec(settings)))

    def start(self, command: list[str]) -> dict[str, float]:
        """Run `command`; return the wall and CPU seconds until all ranks have made a new step."""
        before = [len(_lines(path)) for path in self._records]
        ended_s, began = _ended_cpu_s(), time.time()
        with open(self.folder / "output.log", "ab") as log:
            process = subprocess.Popen(
                command,
                env=self._environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait(before)
        first = max(
            json.loads(_lines(path)[count])["time"]
            for path, count in zip(self._records, before, strict=True)
        )
        process.poll()
        return {"wall_s": first - began, "cpu_s": self._cpu_s() + _ended_cpu_s() - ended_s}

    def first(self) -> dict[str, float]:
        """Start the job."""
        if self.peer == "torchrun":
            return self.start(self._torchrun())
        return self.start(self._holdfast("submit", str(self.folder / "run.yaml")))

    def again(self) -> dict[str, float]:
        """Stop the job after a checkpoint, and start it again."""
        self._wait([STEPS_BEFORE_STOP] * RANKS)
        if self.peer == "torchrun":
            self.end()
            return self.start(self._torchrun())
        subprocess.run(
            self._holdfast("stop", "first"),
            env=self._environment,
            check=True,
            stdout=sys.stderr,
            timeout=WAIT_S_MAX,
        )
        psutil.wait_procs(self._processes(), timeout=WAIT_S_MAX)
        return self.start(self._holdfast("relaunch", "first"))

    def end(self) -> None:
        """Kill all processes of the job."""
        mine = self._processes()
        for process in mine:
            process.kill()
        psutil.wait_procs(mine, timeout=WAIT_S_MAX)

    def _spec(self, settings: Path) -> dict[str, Any]:
        return {
            "name": "first",
            "command": [str(PROGRAMS / "with_holdfast.py")],
            "environment": {MARK: str(settings), "OMP_NUM_THREADS": "1"},
            "launch": {"working_directory": str(self.folder)},
            "resources": {"gpus_per_node": RANKS, "executor": "local"},
            "checkpoint": {"interval": JOB["save_steps"], "snapshots": JOB["snapshot_steps"]},
            "supervision": {"standby_after_s": "off"},
        }

    def _torchrun(self) -> list[str]:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        return [sys.executable, *words, str(PROGRAMS / "with_torch.py")]

    def _holdfast(self, *words: str) -> list[str]:
        return [str(Path(sys.executable).with_name("holdfast")), *words]

    @property
    def _records(self) -> list[Path]:
        return [self.folder / "records" / f"rank{rank}.jsonl" for rank in range(RANKS)]

    def _wait(self, counts: list[int]) -> None:
        """Wait until each rank has recorded more steps than its number in `counts`."""
        give_up = time.monotonic() + WAIT_S_MAX
        while any(len(_lines(p)) <= n for p, n in zip(self._records, counts, strict=True)):
            if time.monotonic() > give_up:
                self.end()
                raise SystemExit(f"{self.folder}: no step within {WAIT_S_MAX:.0f} s")
            time.sleep(POLL_S)

    def _processes(self) -> list[psutil.Process]:
        wanted, found = self._environment[MARK], []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == wanted:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _cpu_s(self) -> float:
        """Return the CPU seconds of the job's processes, and of the children that they awaited."""
        times = [process.cpu_times() for process in self._processes()]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def _ended_cpu_s() -> float:
    """Return the CPU seconds of the commands that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _lines(path: Path) -> list[str]:
    """Return the whole lines of a record."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def summary(found: list[dict[str, float]]) -> dict[str, float]:
    """Return the median and the longest start."""
    wall = [one["wall_s"] for one in found]
    cpu = median(one["cpu_s"] for one in found)
    return {
        "wall_s": round(median(wall), 2),
        "longest_s": round(max(wall), 2),
        "cpu_s": round(cpu, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--real-time", action="store_true", help="take priority over other processes (root)"
    )
    given = parser.parse_args()
    if given.real_time:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-first-step-") as folder:
        for number in range(given.pairs):
            for peer in ("torchrun", "holdfast"):
                job = Job(peer, Path(folder) / f"{peer}-{number}")
                try:
                    for name, start in (("cold", job.first), ("relaunch", job.again)):
                        one = start()
                        found.setdefault(f"{peer}_{name}", []).append(one)
                        load = os.getloadavg()[0]
                        print(peer, name, one, f"load {load:.1f}", file=sys.stderr, flush=True)
                finally:
                    job.end()
    print(json.dumps({name: summary(one) for name, one in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
