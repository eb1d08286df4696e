"""What can be known to be missing before anything is queued; every problem found is told."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from holdfast.contracts.durable import make_directory
from holdfast.contracts.errors import PreflightError, SchedulerError, SchedulerUnavailableError
from holdfast.contracts.filesystems import NODE_LOCAL, filesystem_of
from holdfast.contracts.spec import Resources, RunSpec
from holdfast.workers import slurm_client
from holdfast.workers.request import NO_GRES

PYTHON_TIMEOUT_S: Final = 20.0
SLURM_COMMANDS: Final = ("sbatch", "squeue", "sacct", "scontrol", "scancel", "srun")
_FIND_MODULES = (
    "import importlib.util as u, sys; "
    "print('\\n'.join(m for m in sys.argv[1:] if u.find_spec(m) is None))"
)


def check(spec: RunSpec, root: Path) -> None:
    """Raise `PreflightError` naming everything that this run would miss; queues nothing."""
    problems = [*_root_problems(root), *_program_problems(spec)]
    if spec.resources.executor == "slurm":
        problems += _slurm_problems(spec, root)
    if problems:
        listing = "\n".join(f"  - {problem}" for problem in problems)
        raise PreflightError(
            f"run {spec.name} cannot start, {len(problems)} thing(s) to mend:\n{listing}", problems
        )


def _root_problems(root: Path) -> list[str]:
    """Whether a file can be made under `root`; the only test that quotas and ACLs obey."""
    try:
        make_directory(root)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".preflight.") as file:
            file.write(b"\0")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return [
            (
                f"root {root}: cannot be written ({error.strerror or error}); give a writable "
                "directory with --root or HOLDFAST_ROOT"
            )
        ]
    return _lock_and_link_problems(root)


def _lock_and_link_problems(root: Path) -> list[str]:
    """Whether the file system has what keeps two processes from the same work.

    Exclusive creation needs hard links, and one supervisor per run needs locks that hold between
    hosts. FUSE programs and Lustre without `-o flock` lack one of them.
    """
    problems = []
    advice = "give another directory with --root or HOLDFAST_ROOT"
    with tempfile.TemporaryDirectory(dir=root, prefix=".preflight.") as place:
        first, second = Path(place, "first"), Path(place, "second")
        first.touch()
        try:
            os.link(first, second)
        except OSError as error:
            problems.append(
                f"root {root}: has no hard links ({error.strerror}), by which checkpoints are "
                f"committed and attempts are claimed; {advice}"
            )
        with open(first, "rb") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                problems.append(
                    f"root {root}: has no file locks ({error.strerror}), which keep a run from "
                    f"having two supervisors; mount it with locks (Lustre: -o flock), or {advice}"
                )
    mounted = filesystem_of(root)
    if local := mounted.local_lock_option:
        problems.append(
            f"root {root}: is mounted with {local}, so locks hold on one host only and a run could "
            f"have two supervisors; mount it without that option, or {advice}"
        )
    return problems


def _program_problems(spec: RunSpec) -> list[str]:
    directory = Path(spec.launch.working_directory)
    if not directory.is_dir():
        return [f"launch.working_directory {directory}: no such directory"]
    python = spec.launch.python or sys.executable
    if spec.launch.container:
        # The interpreter and its modules are in an image that only the job sees.
        return []
    if shutil.which(python) is None:
        if spec.launch.setup:
            return []
        return [f"launch.python {python}: no such interpreter; give the job environment's python"]
    problems = []
    modules = ["torch", "holdfast.trainer", "holdfast.workers.agent.main", "submitit"]
    if spec.command[0] == "-m":
        if len(spec.command) < 2:
            return ["command: -m needs the name of a module after it"]
        modules.append(spec.command[1])
    elif not (directory / spec.command[0]).is_file():
        problems.append(
            f"command: {spec.command[0]} is no file under {directory}; give the program's path "
            "from launch.working_directory"
        )
    return problems + _module_problems(python, modules, directory)


def _module_problems(python: str, modules: list[str], directory: Path) -> list[str]:
    """Which modules the job's interpreter does not have; it only looks, it imports nothing big."""
    try:
        done = subprocess.run(
            [python, "-c", _FIND_MODULES, *modules],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=PYTHON_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"launch.python {python}: could not be asked for its modules ({error})"]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [
            (
                f"launch.python {python}: has no usable holdfast or program ({last}); install "
                "`holdfast[trainer]` there, or name another interpreter"
            )
        ]
    missing = done.stdout.split()
    return [
        f"launch.python {python}: has no module {name}; install `holdfast[trainer]` and the "
        "program's own needs there, or name another interpreter"
        for name in missing
    ]


def _slurm_problems(spec: RunSpec, root: Path) -> list[str]:
    absent = [name for name in SLURM_COMMANDS if shutil.which(name) is None]
    if absent:
        return [
            (
                f"Slurm commands {', '.join(absent)} are not on this machine; submit from a login "
                "node, or set resources.executor = 'local'"
            )
        ]
    try:
        partitions = slurm_client.partitions()
        nodes = slurm_client.show_nodes()
        federation = slurm_client.federation()
    except SchedulerError as error:
        return [f"Slurm: {error}"]
    problems = _partition_problems(spec.resources, partitions)
    if federation:
        problems.append(
            f"Slurm: this cluster is in the federation {federation!r}, where another cluster may "
            "take the job and this one no longer shows it; submit to a cluster outside a federation"
        )
    problems += _gpu_problems(spec.resources, nodes)
    problems += _account_problems(spec.resources)
    return problems + _sharing_problems(root, nodes)


def _partition_problems(resources: Resources, partitions: list[dict[str, str]]) -> list[str]:
    known = {p["PartitionName"]: p for p in partitions}
    wanted = (resources.partition or "").split(",") if resources.partition else []
    problems = [
        f"resources.partition {name!r}: no such partition; there are {', '.join(sorted(known))}"
        for name in wanted
        if name not in known
    ]
    if not wanted and not any(p.get("Default") == "YES" for p in partitions):
        problems.append(
            f"resources.partition: Slurm has no default; choose of {', '.join(sorted(known))}"
        )
    for name in wanted:
        limit = slurm_client.parse_minutes(known.get(name, {}).get("MaxTime", ""))
        asked = resources.time_limit_min
        if limit is not None and asked is not None and asked > limit:
            problems.append(
                f"resources.time_limit_min {asked}: partition {name} allows {limit:.0f} minutes"
            )
    return problems


def _gpu_problems(resources: Resources, nodes: list[dict[str, str]]) -> list[str]:
    wanted = (resources.partition or "").split(",") if resources.partition else []
    if resources.gres == NO_GRES:
        return []
    mine = [n for n in nodes if not wanted or set(wanted) & set(n.get("Partitions", "").split(","))]
    kind = slurm_client.gpu_kind(resources.gres or "")
    most = max((slurm_client.gpus_of(n.get("Gres", ""), kind) for n in mine), default=0)
    where = f"partition {resources.partition}" if resources.partition else "the cluster"
    if resources.gpus_per_node > most:
        return [
            (
                f"resources.gpus_per_node {resources.gpus_per_node}: no node of {where} has more "
                f"than {most} {f'of kind {kind}' if kind else 'GPUs'}; on CPU nodes set "
                f"resources.gres = '{NO_GRES}'"
            )
        ]
    return []


def _account_problems(resources: Resources) -> list[str]:
    """Unknown accounts and QOS; a site without accounting knows none and refuses none."""
    problems = []
    for kind, name, column in (
        ("account", resources.account, "Account"),
        ("qos", resources.qos, "Name"),
    ):
        if name is None:
            continue
        try:
            out = slurm_client.call(["sacctmgr", "-n", "-P", "show", kind, f"format={column}"])
        except SchedulerUnavailableError as error:
            problems.append(f"resources.{kind} {name!r}: cannot be checked: {error}")
            continue
        except SchedulerError:
            continue
        known = sorted(set(out.split()))
        if known and name not in known:
            problems.append(
                f"resources.{kind} {name!r}: Slurm does not know it; there are "
                f"{', '.join(known[:20])}"
            )
    return problems


def _sharing_problems(root: Path, nodes: list[dict[str, str]]) -> list[str]:
    """Whether the cluster's nodes can see `root`, as far as a file system's type tells."""
    own = {socket.gethostname(), socket.gethostname().split(".")[0]}
    elsewhere = sorted(
        n.get("NodeName", "?") for n in nodes if n.get("NodeHostName", "") not in own
    )
    if not elsewhere:
        return []
    mounted = filesystem_of(root)
    if mounted.may_be_shared:
        return []
    kind = mounted.kind
    words = "lies in memory" if kind in NODE_LOCAL else f"is a local file system ({kind or '?'})"
    return [
        (
            f"root {root} {words}: node {elsewhere[0]} would not see it; give a directory that all "
            "nodes share with --root or HOLDFAST_ROOT"
        )
    ]
