"""The sbatch options that a spec must not contain, and what to use instead of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final

from pydantic import AfterValidator, ValidationInfo

from holdfast.contracts.spec.part import is_recorded

# sbatch reads the options of other batch systems too.
_DIRECTIVE: Final = re.compile(r"^\s*#(SBATCH|PBS|BSUB)\b", re.MULTILINE)
_LONG_NAME: Final = re.compile(r"[a-z][a-z0-9-]+")
_BY_GRES: Final = "set resources.gpus_per_node, or resources.gres such as 'gpu:h100:8'"
_BY_CPUS: Final = "set resources.cpus_per_gpu"
_BY_MEMORY: Final = "set resources.memory_gb_per_node"
_ONE_TASK: Final = (
    "leave it out: Holdfast starts one task on each node, and torchrun starts the ranks"
)
_FILES: Final = "leave it out: Holdfast writes the output to the run's folder, see holdfast logs"
_ONE_JOB: Final = "leave it out: a run is one job with the same resources on each node"
_RELAUNCH: Final = "leave it out: only the supervisor relaunches a run"
# Options that Holdfast sets itself, or that would make Holdfast lose its job.
REFUSED: Final[Mapping[str, str]] = {
    "job-name": "leave it out: Holdfast finds its jobs by their name",
    "clusters": "leave it out: submit on a host of that cluster, with its own HOLDFAST_ROOT",
    "cluster-constraint": "leave it out: Holdfast cannot watch a job on another cluster",
    "array": "leave it out: a run is one job; submit one run for each member of a sweep",
    "hetjob": _ONE_JOB,
    "packjob": _ONE_JOB,
    "het-group": _ONE_JOB,
    "pack-group": _ONE_JOB,
    "requeue": _RELAUNCH,
    "no-requeue": _RELAUNCH,
    "no-kill": "leave it out: Holdfast always sets it, so that the other nodes can save",
    "kill-on-bad-exit": "leave it out: the other nodes must save when one of them fails",
    "signal": "set supervision.grace_s",
    "partition": "set resources.partition",
    "account": "set resources.account",
    "qos": "set resources.qos",
    "constraint": "set resources.constraint",
    "time": "set resources.time_limit_min",
    "time-min": "set resources.time_limit_min",
    "nodes": "set resources.nodes",
    "gres": "set resources.gres",
    "gpus": _BY_GRES,
    "gpus-per-node": _BY_GRES,
    "gpus-per-task": _BY_GRES,
    "gpus-per-socket": _BY_GRES,
    "cpus-per-gpu": _BY_CPUS,
    "cpus-per-task": _BY_CPUS,
    "mem": _BY_MEMORY,
    "mem-per-cpu": "set resources.memory_gb_per_cpu",
    "mem-per-gpu": f"{_BY_MEMORY}, or resources.memory_gb_per_cpu",
    "ntasks": _ONE_TASK,
    "ntasks-per-node": _ONE_TASK,
    "ntasks-per-gpu": _ONE_TASK,
    "ntasks-per-core": _ONE_TASK,
    "ntasks-per-socket": _ONE_TASK,
    "exclude": "leave it out: Holdfast excludes failed nodes; to choose nodes, use nodelist",
    "output": _FILES,
    "error": _FILES,
    "input": _FILES,
    "open-mode": _FILES,
    "chdir": "set launch.working_directory",
    "export": "set launch.export, or environment",
    "export-file": "set environment",
    "get-user-env": "set launch.setup",
    "wrap": "set command",
    "wait": "leave it out: use holdfast submit --wait",
    "test-only": "leave it out: use holdfast submit --dry-run",
    "parsable": "leave it out: it changes what sbatch prints",
    "quiet": "leave it out: it changes what sbatch prints",
    "uid": "leave it out: a run belongs to the user who submits it",
    "gid": "leave it out: a run belongs to the user who submits it",
}
# The same for the job of a consumer. It has one node, and may require other features of it.
REFUSED_IN_JOBS: Final[Mapping[str, str]] = {
    **{name: text for name, text in REFUSED.items() if name != "constraint"},
    **dict.fromkeys(("signal", "time", "time-min"), "set timeout_min of the consumer"),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), "set job.gpus"),
    **dict.fromkeys(("gpus-per-socket",), "set job.gpus"),
    **dict.fromkeys(("cpus-per-gpu", "cpus-per-task"), "set job.cpus"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), "set job.memory_gb"),
    **{name: f"set job.{name}" for name in ("partition", "account", "qos")},
    "nodes": "leave it out: the job has one node",
    "wrap": "set command of the consumer",
}
# With these, Holdfast could not find its job, or there would be several jobs. They are refused in
# recorded specs too.
LOSES_JOB: Final = (
    *("job-name", "clusters", "cluster-constraint", "array", "requeue"),
    *("wrap", "wait", "test-only", "parsable", "quiet"),
    *("hetjob", "packjob", "het-group", "pack-group"),
)


def problem_with_option(
    name: str, among: Iterable[str] = REFUSED, instead: Mapping[str, str] = REFUSED
) -> str:
    """Return why `extra` must not contain the sbatch option `name`; empty if it may.

    sbatch accepts unique abbreviations of long names, so prefixes of refused names are refused too.
    `among` are the refused names: `REFUSED` for new specs, `LOSES_JOB` for recorded ones.
    `instead` says what to do instead of each.
    """
    if not _LONG_NAME.fullmatch(name):
        return f"option {name!r}: expected the long name of an sbatch option, such as 'reservation'"
    refused = next((each for each in among if each.startswith(name)), None)
    if refused is None:
        return ""
    return f"option {name!r} is not for extra: {instead[refused]}"


def _leave_holdfasts(
    options: dict[str, str | int | bool], info: ValidationInfo, refused: Mapping[str, str] = REFUSED
) -> dict[str, str | int | bool]:
    found = (problem_with_option(name, refused, refused) for name in options)
    problems = [problem for problem in found if problem]
    # The option was accepted when the run was made. The executor refuses a submission that would
    # lose the job, see decision 44.
    if problems and not is_recorded(info):
        raise ValueError("; ".join(problems))
    return options


def _leave_those_of_jobs(
    options: dict[str, str | int | bool], info: ValidationInfo
) -> dict[str, str | int | bool]:
    return _leave_holdfasts(options, info, REFUSED_IN_JOBS)


# Options of a spec by their long names. Those that Holdfast sets itself are refused.
SbatchOptions = Annotated[dict[str, str | int | bool], AfterValidator(_leave_holdfasts)]
JobOptions = Annotated[dict[str, str | int | bool], AfterValidator(_leave_those_of_jobs)]


def problem_with_setup(lines: Iterable[str]) -> str:
    """Return why shell lines must not be in an sbatch script; empty if they may.

    The lines follow the options of the script, so sbatch would read further options from them.
    """
    found = next((match for line in lines if (match := _DIRECTIVE.search(line))), None)
    if found is None:
        return ""
    word = found[0].strip()
    return f"a line starts with {word}, which sbatch reads as an option: set resources.extra"
