"""The checks of `holdfast doctor`. Each one takes limited time and raises no error."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from holdfast.cli.output import bytes_text
from holdfast.cli.supervise import command, supervisor_warning
from holdfast.contracts.durable import make_directory
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.filesystems import NODE_LOCAL, filesystem_of
from holdfast.contracts.history import load_history
from holdfast.contracts.paths import RunPaths, list_runs
from holdfast.contracts.visits import visit
from holdfast.workers.root_probe import ADVICE, describe, find_problems

Level = Literal["ok", "warn", "fail"]
COMMAND_S_MAX: Final = 60.0
NAMES_MAX: Final = 10
FREE_BYTES_MIN: Final = 10 * 1024**3
SHARED_BYTES_MIN: Final = 256 * 1024**2
PYTHON_MIN: Final = (3, 11)
SLURM: Final = ("sbatch", "squeue", "sacct", "scontrol", "scancel")
# Prints the missing packages that training needs, or torch's version.
FIND_PACKAGES: Final = (
    "import importlib.util as u, importlib.metadata as m\n"
    "need = ('torch', 'numpy', 'psutil', 'submitit')\n"
    "gone = [n for n in need if u.find_spec(n) is None]\n"
    "print('missing ' + ', '.join(gone) if gone else 'torch ' + m.version('torch'))\n"
)


@dataclass(frozen=True)
class Finding:
    """One result: the check's name, its level, the details, and the next step."""

    name: str
    level: Level
    detail: str
    next_step: str = ""


def run_checks(root: Path) -> list[Finding]:
    """Run every check, in the order in which a run needs them."""
    checks: tuple[Callable[[], Finding], ...] = (
        check_python,
        check_torch,
        lambda: check_root(root),
        lambda: check_space(root),
        check_database,
        check_service,
        lambda: check_supervisors(root),
        check_slurm,
        check_memory_files,
    )
    return [check() for check in checks]


def check_python() -> Finding:
    """Check the version of this interpreter."""
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < PYTHON_MIN:
        return Finding("python", "fail", found, "install Python 3.11 or newer")
    return Finding("python", "ok", found)


def check_torch() -> Finding:
    """Check that this interpreter, the default for jobs, has the packages that training needs."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", FIND_PACKAGES],
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("job environment", "fail", str(error), "repair this Python interpreter")
    found = done.stdout.strip() or done.stderr.strip()[-200:]
    if done.returncode or found.startswith("missing"):
        step = (
            "install Holdfast with the extra `trainer` here, or set another launch.python in the "
            "spec"
        )
        return Finding("job environment", "warn", found, step)
    return Finding("job environment", "ok", found)


def check_root(root: Path) -> Finding:
    """Check what the root's file system can do, and that it is not in memory."""
    try:
        make_directory(root)
        problems = find_problems(root)
    except OSError as error:
        step = "give a writable directory with --root or HOLDFAST_ROOT"
        return Finding("root", "fail", f"{root}: {error.strerror or error}", step)
    if problems:
        return Finding("root", "fail", f"{describe(root)}: {problems[0].text}", ADVICE)
    kind = filesystem_of(root).kind
    if kind in NODE_LOCAL:
        step = "set HOLDFAST_ROOT to durable storage that all nodes share"
        return Finding("root", "warn", f"{root} is in memory ({kind})", step)
    return Finding("root", "ok", describe(root))


def check_space(root: Path) -> Finding:
    """Check the free space under the root."""
    there = root
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{bytes_text(free)} free"
    if free < FREE_BYTES_MIN:
        step = "`holdfast prune` old checkpoints, or set HOLDFAST_ROOT to a larger disk"
        return Finding("disk space", "warn", found, step)
    return Finding("disk space", "ok", found)


def check_database() -> Finding:
    """Check that the index can be opened and has this version's schema."""
    from holdfast.lineage.database import open_database

    try:
        with open_database() as database:
            return Finding("database", "ok", database.name)
    except HoldfastError as error:
        return Finding("database", "fail", str(error), "fix this problem; runs are safe on disk")


def check_service() -> Finding:
    """Check Prefect's API, the deployment and its workers, if an API is configured."""
    from holdfast.flows.start import has_service

    if not has_service():
        found = "no PREFECT_API_URL: `holdfast submit` starts the supervisor on this machine"
        return Finding("prefect", "ok", found)
    from holdfast.flows import deployments

    try:
        report = deployments.check_service()
    except HoldfastError as error:
        return Finding("prefect", "fail", str(error), "start the server, then `holdfast deploy`")
    found = f"{report.url}, pool {report.pool}, {report.workers} worker(s)"
    if not report.workers:
        return Finding("prefect", "warn", found, f"prefect worker start --pool {report.pool}")
    return Finding("prefect", "ok", found)


def check_supervisors(root: Path) -> Finding:
    """Check that this user's live runs under the root have a supervisor, within a time limit."""
    ends_at = time.monotonic() + COMMAND_S_MAX
    found = list_runs(root)
    lost: list[str] = []
    for number, paths in enumerate(found):
        if time.monotonic() > ends_at:
            detail = f"checked only {number} of {len(found)} runs within {COMMAND_S_MAX:.0f} s"
            return Finding("supervisors", "warn", f"{detail}{_named(lost)}", command(root, "--all"))
        # A run that cannot be read is listed by `holdfast runs` with the reason.
        lost += [one.paths.name for one in visit([paths], _has_lost_supervisor) if one.result]
    if lost:
        runs = "run" if len(lost) == 1 else "runs"
        detail = f"this host sees no supervisor of {len(lost)} live {runs}"
        step = command(root, *(lost if len(lost) == 1 else ["--all"]))
        return Finding("supervisors", "warn", f"{detail}{_named(lost)}", step)
    return Finding("supervisors", "ok", "all your live runs have one")


def _has_lost_supervisor(paths: RunPaths) -> bool:
    return bool(supervisor_warning(paths)) and load_history(paths).state.is_live


def _named(runs: list[str]) -> str:
    if not runs:
        return ""
    more = f" and {len(runs) - NAMES_MAX} more" if len(runs) > NAMES_MAX else ""
    return f": {', '.join(runs[:NAMES_MAX])}{more}"


def check_slurm() -> Finding:
    """Check Slurm's commands and that Slurm responds. Without any command, Slurm is optional."""
    there = [name for name in SLURM if shutil.which(name)]
    if not there:
        return Finding("slurm", "ok", "not installed: only the local executor is available")
    absent = [name for name in SLURM if name not in there]
    if absent:
        step = "install Slurm's client programs, or use a login node"
        return Finding("slurm", "fail", f"{', '.join(absent)} missing", step)
    from holdfast.workers import slurm_client

    try:
        names = [partition["PartitionName"] for partition in slurm_client.partitions()]
        version = slurm_client.version()
    except HoldfastError as error:
        step = "check that slurmctld responds (`scontrol ping`); until then, only local runs work"
        return Finding("slurm", "warn", str(error), step)
    found = f"Slurm {version or 'of an unknown version'}, partitions {', '.join(names) or 'none'}"
    if slurm_client.is_tested(version):
        return Finding("slurm", "ok", found)
    step = (
        f"Holdfast was tested with Slurm {', '.join(slurm_client.TESTED)}; before you rely on it, "
        "rehearse a preemption and a lost node on this cluster"
    )
    return Finding("slurm", "warn", found, step)


def check_memory_files() -> Finding:
    """Check memory files, which hold staged checkpoints, and /dev/shm for data loaders."""
    try:
        os.close(os.memfd_create("holdfast-doctor"))
    except OSError as error:
        step = "use Linux 3.17 or newer, outside of sandboxes that forbid memfd_create"
        return Finding("memory files", "fail", str(error), step)
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else 0
    found = f"memfd works, {bytes_text(free)} free in /dev/shm"
    if free < SHARED_BYTES_MIN:
        step = "give containers a larger --shm-size: DataLoader workers need it"
        return Finding("memory files", "warn", found, step)
    return Finding("memory files", "ok", found)
