"""Check what a run needs before anything is queued, and report every problem found."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk import durable, filesystems
from holdfast.contracts.environment import problems_with_addresses
from holdfast.contracts.errors import PreflightError, SchedulerError, SchedulerUnavailableError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.resources import Resources, gpu_kind, gpus_of
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.nodes import root_probe, visible_gpus
from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers.slurm_restarts import problem_with_cluster

PYTHON_TIMEOUT_S: Final = 20.0
_PYTHON: Final = re.compile(r"python(3(\.[0-9]+)?)?")
SLURM_COMMANDS: Final = ("sbatch", "squeue", "sacct", "scontrol", "scancel", "srun")
_FIND_MODULES = (
    "import importlib.util as u, sys; "
    "print('\\n'.join(m for m in sys.argv[1:] if u.find_spec(m) is None))"
)


@dataclass(frozen=True)
class _Place:
    """A folder that the run writes to, what it is, and how to give another one."""

    folder: Path
    name: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} {self.folder}"

    def give(self, what: str) -> str:
        return f"give {self.remedy.format(what)}"


def check(spec: RunSpec, root: Path) -> None:
    """Raise `PreflightError` with everything that this run would lack; queue nothing."""
    places = _places(spec, root)
    problems = [one for place in places for one in _place_problems(place)]
    problems += _program_problems(spec)
    problems += problems_with_addresses({**os.environ, **spec.environment})
    if spec.resources.executor == "slurm":
        problems += _slurm_problems(spec, places)
    elif not spec.launch.wrapper:
        environment = {**os.environ, **spec.environment}
        problem = visible_gpus.problem_with_gpus(environment, spec.resources.gpus_per_node)
        problems += [problem] * bool(problem)
    if problems:
        listing = "\n".join(f"  - {problem}" for problem in problems)
        raise PreflightError(
            f"run {spec.name} cannot start, {counted(len(problems), 'problem')} to fix:\n{listing}",
            problems,
        )


def _places(spec: RunSpec, root: Path) -> list[_Place]:
    places = [_Place(root, "root", "a {} with --root or HOLDFAST_ROOT")]
    if spec.checkpoint.directory:
        key = "checkpoint.directory"
        places.append(_Place(Path(spec.checkpoint.directory), key, f"a {{}} as {key}"))
    return places


def _place_problems(place: _Place) -> list[str]:
    """Try what the place's file system can do, on this host; agents do the same on the nodes."""
    try:
        durable.make_directory(place.folder)
        found = root_probe.find_problems(place.folder)
    except OSError as error:
        problem = f"cannot write there ({error.strerror or error})"
        return [f"{place}: {problem}; {place.give('writable directory')}"]
    described, advice = root_probe.describe(place.folder), place.give("directory on other storage")
    problems = [
        f"{place.name} {described}: {one.text}; {advice}, or mount it with what is missing"
        for one in found
    ]
    return problems + _lock_option_problems(place)


def _lock_option_problems(place: _Place) -> list[str]:
    """Check that locks hold between hosts, as far as mount options show it."""
    # Where two hosts can lock the same file, a run could have two supervisors. Mount options show
    # only some of these mounts, so the nodes try it too, see decision 62.
    if local := filesystems.filesystem_of(place.folder).local_lock_option:
        return [
            (
                f"{place}: it is mounted with {local}, so locks hold on one host only and a run "
                "could have two supervisors; mount it without that option, or "
                f"{place.give('directory on other storage')}"
            )
        ]
    return []


def _program_problems(spec: RunSpec) -> list[str]:
    directory = Path(spec.launch.working_directory)
    if not directory.is_dir():
        return [f"launch.working_directory {directory}: no such directory"]
    python = spec.launch.python or sys.executable
    if spec.launch.container or spec.launch.wrapper:
        # The interpreter and its modules are in an image that only the job can see.
        return _wrapper_problems(spec)
    if shutil.which(python) is None:
        if spec.launch.setup:
            return []
        return [
            f"launch.python {python}: no such interpreter; give the Python of the job's environment"
        ]
    problems = []
    modules = ["torch", "holdfast.trainer", "holdfast.workers.agent.main", "submitit"]
    if spec.program.launcher == "none":
        return _command_problems(spec, directory) + _module_problems(python, modules[1:], directory)
    if spec.command[0] == "-m":
        if len(spec.command) < 2:
            return ["command: -m needs a module name after it"]
        modules.append(spec.command[1])
    elif not (directory / spec.command[0]).is_file():
        problems.append(_script_problem(spec.command[0], directory))
    return problems + _module_problems(python, modules, directory)


def _wrapper_problems(spec: RunSpec) -> list[str]:
    # On a cluster, only the nodes may have it. Set-up lines may change PATH.
    command = next(iter(spec.launch.wrapper), "")
    is_elsewhere = spec.resources.executor != "local" or spec.launch.setup
    if is_elsewhere or shutil.which(command):
        return []
    return [f"launch.wrapper {command}: no such command; give its name on PATH, or its path"]


def is_python(word: str) -> bool:
    """Return whether a command's first word is a Python interpreter."""
    return _PYTHON.fullmatch(Path(word).name) is not None


def _script_problem(name: str, directory: Path) -> str:
    """Return why torchrun cannot start the script `name`, and what to write instead."""
    if is_python(name):
        return (
            f"command: torchrun starts Python itself: leave {name!r} out, or set program.launcher "
            "= 'none' for a program that needs no torchrun"
        )
    if name == "torchrun":
        return "command: Holdfast starts torchrun: leave 'torchrun' and its options out"
    if name.startswith("~") or "$" in name:
        whole = os.path.expandvars(os.path.expanduser(name))
        is_known = "$" not in whole and not whole.startswith("~")
        step = f"{whole!r}" if is_known else "the whole path"
        return f"command: {name!r}: nothing expands ~ and variables: write {step}"
    return (
        f"command: {name} is not a file under {directory}; give the program's path relative to "
        "launch.working_directory"
    )


def _command_problems(spec: RunSpec, directory: Path) -> list[str]:
    """Return a problem if a command without torchrun cannot be found, where that can be known."""
    name = spec.command[0]
    is_set_up = spec.launch.setup or spec.launch.node_setup
    found = shutil.which(directory / name if "/" in name else name)
    if found or (is_set_up and "/" not in name):
        return []
    return [
        (
            f"command: {name} is not an executable file; with program.launcher = 'none' the "
            "command itself is run, such as ['python', 'train.py']"
        )
    ]


def _module_problems(python: str, modules: list[str], directory: Path) -> list[str]:
    """Return problems for modules that the job's interpreter lacks, without importing them."""
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
        return [f"launch.python {python}: it could not list its modules ({error})"]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        return [
            (
                f"launch.python {python}: it cannot import the program or holdfast ({last}); "
                "install Holdfast with the extra `trainer` there, or give another interpreter"
            )
        ]
    missing = done.stdout.split()
    return [
        f"launch.python {python}: module {name} is missing; install Holdfast with the extra "
        "`trainer`, and the program's own requirements, there, or give another interpreter"
        for name in missing
    ]


def _pattern_problems(root: Path) -> list[str]:
    if "%" not in str(root):
        return []
    return [
        (
            f"root {root}: it contains %, which Slurm and submitit replace in the paths of logs, "
            "so the jobs would log elsewhere; give a root without % with --root or HOLDFAST_ROOT"
        )
    ]


def _slurm_problems(spec: RunSpec, places: Sequence[_Place]) -> list[str]:
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
        settings = slurm_client.settings()
    except SchedulerError as error:
        return [f"Slurm: {error}"]
    problems = _pattern_problems(places[0].folder)
    accounting = settings.get("AccountingStorageType", "")
    if spec.resources.standby == "expedite" and (problem := problem_with_cluster(settings)):
        problems.append(
            f"resources.standby 'expedite': {problem}; set 'successor', which acts on every "
            "version of Slurm, or 'auto', which takes it here"
        )
    if federation:
        problems.append(
            f"Slurm: this cluster is in the federation {federation!r}, so another cluster may run "
            "the job, where Holdfast cannot see it; submit to a cluster outside a federation"
        )
    if accounting and not accounting.endswith("/slurmdbd"):
        problems.append(
            f"Slurm: this cluster keeps no records of ended jobs (AccountingStorageType = "
            f"{accounting}), so nobody could tell a job that ended unseen from one that never "
            "started; ask its operators to run slurmdbd"
        )
    for number in range(len(spec.resources.fallbacks) + 1):
        if spec.resources.problem_at(number):
            # Only a recorded spec has such a place, which the run passes over.
            continue
        chosen = spec.resources.at(number)
        found = _partition_problems(chosen, partitions)
        found += _gpu_problems(chosen, nodes)
        found += _spare_problems(chosen, nodes)
        found += _account_problems(chosen)
        which = f"fallback {number} of resources.fallbacks: " if number else ""
        problems += [f"{which}{problem}" for problem in found]
    return problems + [one for place in places for one in _sharing_problems(place, nodes)]


def _partition_problems(resources: Resources, partitions: list[dict[str, str]]) -> list[str]:
    known = {p["PartitionName"]: p for p in partitions}
    names = ", ".join(sorted(known))
    wanted = resources.partition.split(",") if resources.partition else []
    problems = [
        f"resources.partition {name!r}: no such partition; choose from {names}"
        for name in wanted
        if name not in known
    ]
    if not wanted and not any(p.get("Default") == "YES" for p in partitions):
        problems.append(f"resources.partition: Slurm has no default partition; choose from {names}")
    for name in wanted:
        limit = slurm_client.parse_minutes(known.get(name, {}).get("MaxTime", ""))
        asked = resources.time_limit_min
        if limit is not None and asked is not None and asked > limit:
            problems.append(
                f"resources.time_limit_min {asked}: partition {name} allows at most {limit:.0f} min"
            )
    return problems


def _gpu_problems(resources: Resources, nodes: list[dict[str, str]]) -> list[str]:
    if not resources.gpus_on_node:
        return []
    mine = _nodes_of(resources, nodes)
    kind = resources.gpu_type or gpu_kind(resources.gres or "")
    most = max((gpus_of(n.get("Gres", ""), kind) for n in mine), default=0)
    where = f"partition {resources.partition}" if resources.partition else "the cluster"
    if resources.gpus_on_node > most:
        given = "gres" if resources.gres else "gpus_per_node"
        return [
            (
                f"resources.{given} {getattr(resources, given)}: no node of {where} has more "
                f"than {most} {f'of kind {kind}' if kind else 'GPUs'}; on CPU nodes set "
                "resources.gpus_per_node = 0 and resources.nproc_per_node = the number of ranks"
            )
        ]
    return []


def _spare_problems(resources: Resources, nodes: list[dict[str, str]]) -> list[str]:
    """Check that the nodes of a job and its spare nodes exist together."""
    most, asked = len(_nodes_of(resources, nodes)), resources.nodes + resources.spare_nodes
    if not resources.spare_nodes or asked <= most:
        return []
    where = f"partition {resources.partition}" if resources.partition else "the cluster"
    return [
        (
            f"resources.spare_nodes {resources.spare_nodes}: with resources.nodes "
            f"{resources.nodes} a job has {asked} nodes, and {where} has {most}; set "
            f"resources.spare_nodes to {max(0, most - resources.nodes)} or less"
        )
    ]


def _nodes_of(resources: Resources, nodes: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the nodes of the partitions that the job may run in, or all without a partition."""
    wanted = resources.partition.split(",") if resources.partition else []
    of_node = [(node, node.get("Partitions", "").split(",")) for node in nodes]
    return [node for node, names in of_node if not wanted or set(wanted) & set(names)]


def _account_problems(resources: Resources) -> list[str]:
    """Check that Slurm knows the account and QOS; a site without accounting refuses none."""
    problems = []
    given = (("account", resources.account, "Account"), ("qos", resources.qos, "Name"))
    for kind, name, column in given:
        if name is None:
            continue
        try:
            out = slurm_client.call(["sacctmgr", "-n", "-P", "show", kind, f"format={column}"])
        except SchedulerUnavailableError as error:
            problems.append(f"resources.{kind} {name!r}: it could not be checked: {error}")
            continue
        except SchedulerError:
            continue
        known = sorted(set(out.split()))
        if known and name not in known:
            problems.append(
                f"resources.{kind} {name!r}: Slurm has no such {kind}; choose from "
                f"{', '.join(known[:20])}"
            )
    return problems


def _sharing_problems(place: _Place, nodes: list[dict[str, str]]) -> list[str]:
    """Check that the cluster's nodes can see the place, as far as its file system type shows."""
    own = {socket.gethostname(), socket.gethostname().split(".")[0]}
    elsewhere = sorted(
        n.get("NodeName", "?") for n in nodes if n.get("NodeHostName", "") not in own
    )
    if not elsewhere:
        return []
    mounted = filesystems.filesystem_of(place.folder)
    if mounted.may_be_shared:
        return []
    kind = mounted.kind
    location = (
        "is in memory"
        if kind in filesystems.NODE_LOCAL
        else f"is a local file system ({kind or '?'})"
    )
    return [
        (
            f"{place} {location}, so node {elsewhere[0]} would not see it; "
            f"{place.give('directory on storage that all nodes share')}"
        )
    ]
