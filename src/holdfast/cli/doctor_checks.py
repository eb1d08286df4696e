"""The doctor's checks: each looks at one thing, within a bound, and never raises."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from holdfast.cli.output import bytes_text
from holdfast.cli.supervise import alone, command
from holdfast.contracts.durable import make_directory
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.filesystems import NODE_LOCAL, filesystem_of
from holdfast.contracts.history import load_history
from holdfast.contracts.paths import list_runs

Level = Literal["ok", "warn", "fail"]
COMMAND_S_MAX: Final = 60.0
NAMES_MAX: Final = 10
FREE_BYTES_MIN: Final = 10 * 1024**3
SHARED_BYTES_MIN: Final = 256 * 1024**2
PYTHON_MIN: Final = (3, 11)
SLURM: Final = ("sbatch", "squeue", "sacct", "scontrol", "scancel")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do about it."""

    name: str
    level: Level
    detail: str
    next_step: str = ""


def run_checks(root: Path) -> list[Finding]:
    """Every check, in the order in which a run would need the things."""
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
    """The interpreter of the command itself."""
    told = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < PYTHON_MIN:
        return Finding("python", "fail", told, "install Python 3.11 or newer")
    return Finding("python", "ok", told)


def check_torch() -> Finding:
    """Whether the default job environment, this interpreter's, can train; torch is not loaded."""
    program = (
        "import importlib.util as u, importlib.metadata as m\n"
        "need = ('torch', 'numpy', 'psutil', 'submitit')\n"
        "gone = [n for n in need if u.find_spec(n) is None]\n"
        "print('missing ' + ', '.join(gone) if gone else 'torch ' + m.version('torch'))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("job environment", "fail", str(error), "see that this interpreter works")
    told = done.stdout.strip() or done.stderr.strip()[-200:]
    if done.returncode or told.startswith("missing"):
        step = "pip install 'holdfast[trainer]' here, or name another launch.python in the spec"
        return Finding("job environment", "warn", told, step)
    return Finding("job environment", "ok", told)


def check_root(root: Path) -> Finding:
    """Whether runs can be created under the root, and where it lies."""
    try:
        make_directory(root)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor."):
            kind = filesystem_of(root).kind
    except OSError as error:
        step = "give a writable directory with --root or HOLDFAST_ROOT"
        return Finding("root", "fail", f"{root}: {error.strerror or error}", step)
    if kind in NODE_LOCAL:
        step = "set HOLDFAST_ROOT to durable storage that all nodes share"
        return Finding("root", "warn", f"{root} lies in memory ({kind})", step)
    return Finding("root", "ok", f"{root} ({kind or 'unknown file system'})")


def check_space(root: Path) -> Finding:
    """Room for checkpoints under the root."""
    there = root
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    told = f"{bytes_text(free)} free"
    if free < FREE_BYTES_MIN:
        step = "`holdfast prune` old checkpoints, or set HOLDFAST_ROOT to a larger disk"
        return Finding("disk space", "warn", told, step)
    return Finding("disk space", "ok", told)


def check_database() -> Finding:
    """Whether the index can be opened, its schema being this version's."""
    from holdfast.lineage.database import open_database

    try:
        with open_database() as database:
            return Finding("database", "ok", database.name)
    except HoldfastError as error:
        return Finding("database", "fail", str(error), "mend what it says; runs are safe on disk")


def check_service() -> Finding:
    """Prefect's API, the deployment and its workers, when an API is configured."""
    from holdfast.flows.start import has_service

    if not has_service():
        told = "no PREFECT_API_URL: `holdfast submit` supervises from a process of this machine"
        return Finding("prefect", "ok", told)
    from holdfast.flows import deployments

    try:
        report = deployments.check_service()
    except HoldfastError as error:
        return Finding("prefect", "fail", str(error), "start the server, then `holdfast deploy`")
    told = f"{report.url}, pool {report.pool}, {report.workers} worker(s)"
    if not report.workers:
        return Finding("prefect", "warn", told, f"prefect worker start --pool {report.pool}")
    return Finding("prefect", "ok", told)


def check_supervisors(root: Path) -> Finding:
    """Whether this user's live runs under the root have a supervisor, those looked at in time."""
    ends_at = time.monotonic() + COMMAND_S_MAX
    found = list_runs(root)
    lost: list[str] = []
    for number, paths in enumerate(found):
        if time.monotonic() > ends_at:
            told = f"only {number} of {len(found)} runs looked at within {COMMAND_S_MAX:.0f} s"
            return Finding("supervisors", "warn", f"{told}{_named(lost)}", command(root, "--all"))
        # A run that cannot be read is listed by `holdfast runs` with the reason.
        with contextlib.suppress(HoldfastError, OSError, ValueError, LookupError):
            if alone(paths) and load_history(paths).state.is_live:
                lost.append(paths.name)
    if lost:
        runs = "run" if len(lost) == 1 else "runs"
        told = f"this host sees no supervisor of {len(lost)} live {runs}"
        step = command(root, *(lost if len(lost) == 1 else ["--all"]))
        return Finding("supervisors", "warn", f"{told}{_named(lost)}", step)
    return Finding("supervisors", "ok", "no live run of yours lacks one")


def _named(runs: list[str]) -> str:
    if not runs:
        return ""
    more = f" and {len(runs) - NAMES_MAX} more" if len(runs) > NAMES_MAX else ""
    return f": {', '.join(runs[:NAMES_MAX])}{more}"


def check_slurm() -> Finding:
    """Slurm's commands and its answer; a machine without any is one for local runs."""
    there = [name for name in SLURM if shutil.which(name)]
    if not there:
        return Finding("slurm", "ok", "not on this machine: only the local executor works here")
    absent = [name for name in SLURM if name not in there]
    if absent:
        step = "install Slurm's client programs, or work from a login node"
        return Finding("slurm", "fail", f"{', '.join(absent)} missing", step)
    from holdfast.workers import slurm_client

    try:
        names = [partition["PartitionName"] for partition in slurm_client.partitions()]
    except HoldfastError as error:
        step = "see that slurmctld answers (`scontrol ping`); until then only local runs work"
        return Finding("slurm", "warn", str(error), step)
    return Finding("slurm", "ok", f"partitions {', '.join(names) or 'none'}")


def check_memory_files() -> Finding:
    """Memory files hold staged checkpoints; torch's loaders also want room in /dev/shm."""
    try:
        os.close(os.memfd_create("holdfast-doctor"))
    except OSError as error:
        step = "run on Linux 3.17 or newer, outside of sandboxes that forbid memfd_create"
        return Finding("memory files", "fail", str(error), step)
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else 0
    told = f"memfd works, {bytes_text(free)} free in /dev/shm"
    if free < SHARED_BYTES_MIN:
        step = "give containers a larger --shm-size: DataLoader workers need it"
        return Finding("memory files", "warn", told, step)
    return Finding("memory files", "ok", told)
