"""Runs the benchmark: starts its programs one after the other and collects their results.

It does not import torch. All files are in one folder, which is removed at the end.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import psutil

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import PreflightError
from holdfast_bench.limits import figures, neighbours
from holdfast_bench.limits.commits import newest_durable, wait_until_durable
from holdfast_bench.limits.launch import Launch

MEGABYTE: Final = 1_000_000
# The most copies of the state. In memory: the state, the copy's target, two slots, and stock DCP's
# staging twice. On disk: Holdfast's, stock DCP's and a raw one, each next to its replacement.
MEMORY_COPIES: Final = 7
DISK_COPIES: Final = 6
RANK_BYTES: Final = 500_000_000
# The pairs' share of the whole time. The rest is for the programs after them.
PAIRS_SHARE: Final = 0.5
# The share of the overlapped saves in what is then left.
OVERLAP_SHARE: Final = 0.45
FREE_CORE_SHARE: Final = 0.25
# The shares of the staging modes and of the neighbours in what is then left.
STAGING_SHARE: Final = 0.35
NEIGHBOURS_SHARE: Final = 0.5
FIRST_STEPS: Final = 3
# At most a billion parameters with AdamW. Slots and the page-locked copy must fit into half of the
# free memory.
GPU_STATE_BYTES: Final = 12_000 * MEGABYTE
GPU_MEMORY_SHARE: Final = 1 / 6


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure, and how long it may take in all."""

    directory: Path
    state_bytes: int
    pairs: int
    ranks: int = 2
    step_s: float = 0.2
    small_state_bytes: int = 64 * MEGABYTE
    warm_up_saves: int = 10
    saves: int = 100
    steps: int = 20_000
    time_limit_s: float = 720.0
    is_quick: bool = False

    def quick(self) -> Plan:
        """Return the shortest plan with all programs, to check that they work, not how fast."""
        return replace(
            self,
            step_s=0.05,
            small_state_bytes=2 * MEGABYTE,
            warm_up_saves=1,
            saves=2,
            steps=200,
            is_quick=True,
        )


def run(plan: Plan) -> dict[str, Any]:
    """Return the benchmark's result, as `holdfast bench --json` prints it.

    Raises `PreflightError` if this machine or environment cannot run it, and `RunFailedError` if
    one of its programs fails or the time limit is exceeded.
    """
    check(plan)
    work = make_folder(plan.directory)
    began = time.time()
    try:
        course = Course(plan, work, end_by=began + plan.time_limit_s)
        found, facts = course.run()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    conditions = {
        "ranks": plan.ranks,
        "state_bytes": facts["unique_bytes"],
        "checkpoint_bytes": facts["bytes"],
        "checkpoint_files": facts["files"],
        "pairs_wanted": plan.pairs,
        "resident_after_drop": round(facts["cold_resident"], 4),
        "step_s": plan.step_s,
        "saves_for_memory": plan.saves,
        "write_limit": facts["write_limit"],
        "memory_bytes": facts["memory"],
        "seconds_in_all": round(time.time() - began, 1),
    }
    measured = figures.answer(found) | ({"gpu": figures.gpu(course.gpu)} if course.gpu else {})
    about = {"machine": machine(plan.directory), "versions": versions(), "conditions": conditions}
    return about | measured


def run_gpu(plan: Plan) -> dict[str, Any]:
    """Run only the GPU part of `run`. Raises like `run`, and `PreflightError` without a GPU."""
    if not gpus():
        raise PreflightError(
            "this machine has no NVIDIA GPU: /dev/nvidia0 or another was expected. Run this on a "
            "node with GPUs; `holdfast bench` measures what needs no GPU"
        )
    check(plan)
    work = make_folder(plan.directory)
    try:
        course = Course(plan, work, end_by=time.time() + plan.time_limit_s)
        found = figures.gpu(course.run_gpu())
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"machine": machine(plan.directory), "versions": versions(), "gpu": found}


def make_folder(directory: Path) -> Path:
    """Create a folder for the benchmark in `directory`. Raises `PreflightError` if it cannot."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=directory)).resolve()
    except OSError as error:
        raise PreflightError(
            f"--directory {directory}: cannot write there: {error.strerror}; give another folder"
        ) from error


class Course:
    """The programs of one benchmark, one after the other."""

    def __init__(self, plan: Plan, work: Path, *, end_by: float) -> None:
        self._plan, self._work, self._end_by = plan, work, end_by
        self.gpu: dict[str, Any] = {}

    def run(self) -> tuple[figures.Found, dict[str, Any]]:
        """Return the results of all programs, and the facts of the pairs."""
        endurance = self._program("endurance", self._endurance_settings())
        pairs = self._program("pairs", {"end_by": self._share_of_time(PAIRS_SHARE)})
        saved = {"load": pairs["facts"]["checkpoint"], "save": True}
        narrowed = self._program("reshard", saved, ranks=1, folder="narrowed")
        shutil.rmtree(self._work / "pairs", ignore_errors=True)
        single = {"load": narrowed["facts"]["checkpoint"], "save": False}
        widened = self._program("reshard", single, folder="widened")
        shutil.rmtree(self._work / "narrowed", ignore_errors=True)
        overlap = self._program("overlap", {"end_by": self._share_of_time(OVERLAP_SHARE)})
        shutil.rmtree(self._work / "overlap", ignore_errors=True)
        beside = self._beside_a_free_core()
        staging = self._program("staging", {"end_by": self._share_of_time(STAGING_SHARE)})
        shutil.rmtree(self._work / "staging", ignore_errors=True)
        copies = self._neighbours()
        if gpus():
            self.gpu = self.run_gpu()
        starts = self._starts()
        found = figures.Found(
            pairs=pairs["seconds"],
            overlap=overlap["seconds"],
            peer_version=overlap["facts"][figures.PEER],
            peer_problem=overlap["facts"]["peer_problem"],
            free_core=beside["seconds"],
            starts=[seconds for seconds, _ in starts],
            signals=[ratio for _, ratio in starts],
            narrowed=narrowed["seconds"],
            widened=widened["seconds"],
            endurance=endurance["seconds"],
            staging=staging["seconds"],
            neighbours=copies,
            unique_bytes=pairs["facts"]["unique_bytes"],
        )
        more = {"memory": endurance["facts"], "write_limit": overlap["facts"]["write_limit"]}
        return found, pairs["facts"] | more

    def _program(
        self,
        name: str,
        more: dict[str, Any] | None = None,
        *,
        ranks: int | None = None,
        folder: str | None = None,
    ) -> dict[str, Any]:
        report_progress(f"{folder or name} …")
        settings = self._settings(folder or name) | (more or {})
        ranks = ranks or self._plan.ranks
        with Launch(name, ranks, settings, end_by=self._end_by) as launch:
            return launch.result()

    def _beside_a_free_core(self) -> dict[str, Any]:
        """Run the overlapped saves of one rank with one thread, so that another core is free."""
        settings: dict[str, Any] = {
            "end_by": self._share_of_time(FREE_CORE_SHARE),
            "state_bytes": self._plan.state_bytes // self._plan.ranks,
            "leaves_core_free": True,
        }
        found = self._program("overlap", settings, ranks=1, folder="free-core")
        shutil.rmtree(self._work / "free-core", ignore_errors=True)
        return found

    def _neighbours(self) -> dict[str, list[float]]:
        report_progress("neighbours …")
        end_by = self._share_of_time(NEIGHBOURS_SHARE)
        plan = self._plan
        return neighbours.measure(
            self._work, pairs=plan.pairs, end_by=end_by, is_quick=plan.is_quick
        )

    def _settings(self, folder: str) -> dict[str, Any]:
        return {
            "directory": str(self._work / folder),
            "state_bytes": self._plan.state_bytes,
            "pairs": self._plan.pairs,
            "step_s": self._plan.step_s,
            "end_by": self._end_by,
        }

    def _endurance_settings(self) -> dict[str, Any]:
        plan = self._plan
        return {
            "state_bytes": plan.small_state_bytes,
            "warm_up_saves": plan.warm_up_saves,
            "saves": plan.saves,
            "steps": plan.steps,
        }

    def run_gpu(self) -> dict[str, Any]:
        """Run the GPU program with one rank for each GPU."""
        return self._program("gpu", self._gpu_settings(), ranks=gpus())

    def _gpu_settings(self) -> dict[str, Any]:
        room = int(psutil.virtual_memory().available * GPU_MEMORY_SHARE)
        wanted = GPU_STATE_BYTES if self._plan.saves > 2 else self._plan.state_bytes
        return {"state_bytes": min(wanted, room)}

    def _share_of_time(self, share: float) -> float:
        now = time.time()
        return now + share * (self._end_by - now)

    def _starts(self) -> list[tuple[dict[str, list[float]], float]]:
        """Run as many fresh starts as there are pairs, or as the time allows."""
        done = []
        began = time.time()
        for number in range(self._plan.pairs):
            done.append(self._start(number))
            each_s = (time.time() - began) / len(done)
            if time.time() + each_s > self._end_by:
                break
        return done

    def _start(self, number: int) -> tuple[dict[str, list[float]], float]:
        """Run one fresh start. Return its seconds and its quotient from signal to commit."""
        report_progress(f"start {number + 1} of {self._plan.pairs} …")
        settings = self._settings(f"start-{number}")
        directory = Path(settings["directory"])
        with Launch("starts", self._plan.ranks, settings, end_by=self._end_by) as launch:
            pids = launch.wait_for(directory / "ready.json")
            # Send each signal at a different moment of the step.
            part = (number + 0.5) / self._plan.pairs
            time.sleep((FIRST_STEPS + part) * self._plan.step_s)
            run = RunPaths(directory / "start")
            former = newest_durable(run)
            signalled_at = time.time()
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            committed_at = wait_until_durable(run, former + 1)
            result = launch.result()
        shutil.rmtree(directory, ignore_errors=True)
        ratio = figures.signal_ratio(
            signalled_at=signalled_at,
            committed_at=committed_at,
            step_ends=result["facts"]["step_ends"],
            start=result["seconds"],
        )
        return result["seconds"], ratio


def check(plan: Plan) -> None:
    """Raise `PreflightError` if this machine or environment cannot run `plan`."""
    if find_spec("torch") is None:
        raise PreflightError(
            "torch is not installed in this environment, but the benchmark needs it. "
            "Install Holdfast with the extra `trainer`"
        )
    if plan.pairs < 1 or plan.ranks < 2 or plan.state_bytes < MEGABYTE:
        raise PreflightError(
            f"{plan.pairs} pairs, {plan.ranks} ranks, {plan.state_bytes / MEGABYTE:.0f} MB: "
            "expected at least 1 pair, 2 ranks and 1 MB"
        )
    parent = next(p for p in (plan.directory, *plan.directory.absolute().parents) if p.exists())
    wanted = {
        "memory": (
            MEMORY_COPIES * plan.state_bytes + plan.ranks * RANK_BYTES,
            psutil.virtual_memory().available,
        ),
        f"disk at {parent}": (DISK_COPIES * plan.state_bytes, shutil.disk_usage(parent).free),
    }
    for what, (needed, free) in wanted.items():
        if needed > free:
            raise PreflightError(
                f"{what}: {free / 1e9:.1f} GB are free, but the benchmark needs "
                f"{needed / 1e9:.1f} GB. Use fewer --megabytes, or another --directory"
            )


def machine(directory: Path) -> dict[str, Any]:
    """Describe the machine of the measurement."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "architecture": platform.machine(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release().partition("-")[0],
        "file_system": file_system(directory),
    }


def gpus() -> int:
    """Return the number of visible NVIDIA GPUs, without torch, whose import takes seconds."""
    return sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))


def processor() -> str:
    """Return the processor's name from the kernel, empty if it has none."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else ""


def file_system(directory: Path) -> str:
    """Return the type of the file system that contains `directory`."""
    here = directory.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if here.is_relative_to(p.mountpoint)]
    return max(mounts, key=lambda p: len(p.mountpoint)).fstype if mounts else "unknown"


def versions() -> dict[str, str]:
    """Return the versions of Holdfast, torch and Python."""
    found = {name: version(name) for name in ("holdfast", "torch")}
    return found | {"python": platform.python_version()}


def report_progress(text: str) -> None:
    """Print progress for people to stderr, apart from the result."""
    print(f"bench: {text}", file=sys.stderr, flush=True)
