"""`holdfast doctor`: check whether this machine and its services can run jobs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from holdfast.cli.shared.arguments import RunArgument
from holdfast.cli.shared.index import choose_root, locate_checkpoint, locate_run
from holdfast.cli.shared.output import AsJson, RootOption, answer, bytes_text, print_facts, say
from holdfast.cli.supervise import command, supervisor_warning
from holdfast.contracts.disk import durable, filesystems, visits
from holdfast.contracts.disk.paths import LATEST, RunPaths, checkpoint_id, list_runs
from holdfast.contracts.errors import HoldfastError, NotFoundError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.checkpoint_choice import choose_checkpoint
from holdfast.contracts.records.consumers import needs_supervisor
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.checkpoints.trainer_call import ask_trainer, interpreter_of
from holdfast.workers.nodes.root_probe import ADVICE, describe, find_problems

# The checks of `holdfast doctor`. Each one takes limited time and raises no error.

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
class CheckResult:
    """One result: the check's name, its level, the details, and the next step."""

    name: str
    level: Level
    detail: str
    next_step: str = ""


def run_checks(root: Path) -> list[CheckResult]:
    """Run every check, in the order in which a run needs them."""
    checks: tuple[Callable[[], CheckResult], ...] = (
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


def check_python() -> CheckResult:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < PYTHON_MIN:
        return CheckResult("python", "fail", found, "install Python 3.11 or newer")
    return CheckResult("python", "ok", found)


def check_torch() -> CheckResult:
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
        return CheckResult("job environment", "fail", str(error), "repair this Python interpreter")
    found = done.stdout.strip() or done.stderr.strip()[-200:]
    if done.returncode or found.startswith("missing"):
        step = (
            "install Holdfast with the extra `trainer` here, or set another launch.python in the "
            "spec"
        )
        return CheckResult("job environment", "warn", found, step)
    return CheckResult("job environment", "ok", found)


def check_root(root: Path) -> CheckResult:
    """Check what the root's file system can do, and that it is not in memory."""
    try:
        durable.make_directory(root)
        problems = find_problems(root)
    except OSError as error:
        step = "give a writable directory with --root or HOLDFAST_ROOT"
        return CheckResult("root", "fail", f"{root}: {error.strerror or error}", step)
    if problems:
        return CheckResult("root", "fail", f"{describe(root)}: {problems[0].text}", ADVICE)
    kind = filesystems.filesystem_of(root).kind
    if kind in filesystems.NODE_LOCAL:
        step = "set HOLDFAST_ROOT to durable storage that all nodes share"
        return CheckResult("root", "warn", f"{root} is in memory ({kind})", step)
    return CheckResult("root", "ok", describe(root))


def check_space(root: Path) -> CheckResult:
    there = root
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    found = f"{bytes_text(free)} free"
    if free < FREE_BYTES_MIN:
        step = "`holdfast prune` old checkpoints, or set HOLDFAST_ROOT to a larger disk"
        return CheckResult("disk space", "warn", found, step)
    return CheckResult("disk space", "ok", found)


def check_database() -> CheckResult:
    """Check that the index can be opened and has this version's schema."""
    from holdfast.lineage.database.transactions import open_database

    try:
        with open_database() as database:
            return CheckResult("database", "ok", database.name)
    except HoldfastError as error:
        return CheckResult(
            "database", "fail", str(error), "fix this problem; runs are safe on disk"
        )


def check_service() -> CheckResult:
    """Check Prefect's API, the deployment and its workers, if an API is configured."""
    from holdfast.flows.start import has_service

    if not has_service():
        found = "no PREFECT_API_URL: `holdfast submit` starts the supervisor on this machine"
        return CheckResult("prefect", "ok", found)
    from holdfast.flows import deployments

    try:
        report = deployments.check_service()
    except HoldfastError as error:
        return CheckResult(
            "prefect", "fail", str(error), "start the server, then `holdfast deploy`"
        )
    found = f"{report.url}, pool {report.pool}, {report.workers} worker(s)"
    if not report.workers:
        return CheckResult("prefect", "warn", found, f"prefect worker start --pool {report.pool}")
    return CheckResult("prefect", "ok", found)


def check_supervisors(root: Path) -> CheckResult:
    """Check that this user's live runs under the root have a supervisor, within a time limit."""
    ends_at = time.monotonic() + COMMAND_S_MAX
    found = list_runs(root)
    lost: list[str] = []
    for number, paths in enumerate(found):
        if time.monotonic() > ends_at:
            detail = f"checked only {number} of {len(found)} runs within {COMMAND_S_MAX:.0f} s"
            return CheckResult(
                "supervisors", "warn", f"{detail}{_named(lost)}", command(root, "--all")
            )
        # A run that cannot be read is listed by `holdfast runs` with the reason.
        lost += [
            one.paths.name for one in visits.visit([paths], _has_lost_supervisor) if one.result
        ]
    if lost:
        runs = "run" if len(lost) == 1 else "runs"
        detail = f"this host sees no supervisor of {len(lost)} live {runs}"
        step = command(root, *(lost if len(lost) == 1 else ["--all"]))
        return CheckResult("supervisors", "warn", f"{detail}{_named(lost)}", step)
    return CheckResult("supervisors", "ok", "all your live runs have one")


def _has_lost_supervisor(paths: RunPaths) -> bool:
    return bool(supervisor_warning(paths)) and needs_supervisor(load_history(paths))


def _named(runs: list[str]) -> str:
    if not runs:
        return ""
    more = f" and {len(runs) - NAMES_MAX} more" if len(runs) > NAMES_MAX else ""
    return f": {', '.join(runs[:NAMES_MAX])}{more}"


def check_slurm() -> CheckResult:
    """Check Slurm's commands and that Slurm responds. Without any command, Slurm is optional."""
    there = [name for name in SLURM if shutil.which(name)]
    if not there:
        return CheckResult("slurm", "ok", "not installed: only the local executor is available")
    absent = [name for name in SLURM if name not in there]
    if absent:
        step = "install Slurm's client programs, or use a login node"
        return CheckResult("slurm", "fail", f"{', '.join(absent)} missing", step)
    from holdfast.workers.schedulers import slurm_client

    try:
        names = [partition["PartitionName"] for partition in slurm_client.partitions()]
        version = slurm_client.version()
    except HoldfastError as error:
        step = "check that slurmctld responds (`scontrol ping`); until then, only local runs work"
        return CheckResult("slurm", "warn", str(error), step)
    found = f"Slurm {version or 'of an unknown version'}, partitions {', '.join(names) or 'none'}"
    if slurm_client.is_tested(version):
        return CheckResult("slurm", "ok", found)
    step = (
        f"Holdfast was tested with Slurm {', '.join(slurm_client.TESTED)}; before you rely on it, "
        "rehearse a preemption and a lost node on this cluster"
    )
    return CheckResult("slurm", "warn", found, step)


def check_memory_files() -> CheckResult:
    """Check memory files, which hold staged checkpoints, and /dev/shm for data loaders."""
    try:
        os.close(os.memfd_create("holdfast-doctor"))
    except OSError as error:
        step = "use Linux 3.17 or newer, outside of sandboxes that forbid memfd_create"
        return CheckResult("memory files", "fail", str(error), step)
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.is_dir() else 0
    found = f"memfd works, {bytes_text(free)} free in /dev/shm"
    if free < SHARED_BYTES_MIN:
        step = "give containers a larger --shm-size: DataLoader workers need it"
        return CheckResult("memory files", "warn", found, step)
    return CheckResult("memory files", "ok", found)


# `holdfast doctor fit RUN --gpus N`: check whether a run's checkpoint fits N GPUs.

# Keys in the output of `python -m holdfast.trainer.shape` → labels.
PARTS: Final = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "other": "other state",
    "device": "total",
    "staging": "staging",
}
# In the answer, beside these parts.
ON_DISK: Final = "staging_on_disk"


def examine(run: str, gpus: int, checkpoint: str | None, root: str | None) -> dict[str, Any]:
    """Return whether `gpus` GPUs can resume from the checkpoint, and the bytes each rank needs.

    `counts` in the answer are the GPU counts that the checkpoint and the spec allow. Raises
    `NotFoundError` if the run has no committed checkpoint, `CheckpointError` if the checkpoint is
    invalid, and `PreflightError` if the job's environment cannot be called.
    """
    from holdfast.flows.supervisor import secrets
    from holdfast.workers.checkpoints.verification import directory_to_verify
    from holdfast.workers.decisions.sizes import problem_with
    from holdfast.workers.schedulers.slurm_defaults import warnings_of_defaults

    paths = locate_run(run, root)
    spec = load_history(paths).spec
    directory = directory_to_verify(paths, _choose(paths, checkpoint, root))
    python = interpreter_of(paths, spec)
    ranks = spec.ranks(gpus) if spec.can_split(gpus) else gpus
    shape = ask_trainer(python, "shape", str(directory.absolute()), "--ranks", str(ranks))
    problem = problem_with(spec, gpus) or shape.pop("problem")
    sizes = [size for count in shape["counts"] if (size := spec.size_of(count)) is not None]
    return {
        "ok": problem is None,
        "run": paths.name,
        "gpus": gpus,
        "checkpoint": checkpoint_id(paths.name, directory.name),
        "problem": problem,
        "ranks": ranks,
        "counts": [size for size in sizes if problem_with(spec, size) is None],
        "secrets": secrets.report(paths, spec),
        "warnings": warnings_of_defaults(spec),
        "bytes_per_rank": bytes_by_staging(spec, {part: shape[part] for part in PARTS}),
    }


def bytes_by_staging(spec: RunSpec, parts: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of a rank, whose `staging` has two images, by `checkpoint.staging`."""
    # The trainer of the job may have another version, so its answer is the same for every spec.
    mode, two = spec.checkpoint.staging, parts["staging"]
    in_memory = {"memory": two, "single": two // 2, "disk": 0}[mode]
    return {**parts, "staging": in_memory, ON_DISK: two if mode == "disk" else 0}


def render(facts: dict[str, Any]) -> None:
    memory = dict(facts["bytes_per_rank"])
    on_disk = memory.pop(ON_DISK)
    fits = "fits" if facts["ok"] else "does not fit"
    say(f"{facts['checkpoint']} {fits} {counted(facts['gpus'], 'GPU')}")
    for line in facts["secrets"]:
        say(f"  {line}")
    for line in facts["warnings"]:
        say(f"  warning: {line}")
    if facts["problem"]:
        say(f"  {facts['problem']}")
        return
    say("memory of the largest rank, without activations")
    print_facts({f"  {PARTS[part]}": bytes_text(size) for part, size in memory.items()})
    if on_disk:
        say(f"and {bytes_text(on_disk)} of staging on the node's disk")


def _choose(paths: RunPaths, checkpoint: str | None, root: str | None) -> str:
    """Return the directory name of `checkpoint`, or of the newest one on the run's branch."""
    if checkpoint is not None:
        owner, name = locate_checkpoint(checkpoint, root)
        if owner.directory.resolve() != paths.directory.resolve():
            raise NotFoundError(
                f"{checkpoint}: this checkpoint belongs to {owner.name}, not to {paths.name}"
            )
        return name
    return choose_checkpoint(paths, LATEST)


doctor = typer.Typer(invoke_without_command=True)


@doctor.callback()
def check(context: typer.Context, root: RootOption = None, as_json: AsJson = False) -> None:
    """Check whether this machine and its services can run jobs."""
    if context.invoked_subcommand is not None:
        if root is not None or as_json:
            raise typer.BadParameter(
                f"give --root and --json after the command, as in `{context.command_path} "
                f"{context.invoked_subcommand} --json`"
            )
        return
    if not _check_machine(root, as_json):
        raise typer.Exit(1)


@doctor.command()
def fit(
    run: RunArgument,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="The number of GPUs.")],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="The checkpoint. Default: the newest.")
    ] = None,
    root: RootOption = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a run's checkpoint fits a number of GPUs, and how much memory each needs."""
    facts = examine(run, gpus, checkpoint, root)
    answer(facts, as_json, render)
    if not facts["ok"]:
        raise typer.Exit(1)


def _check_machine(root: str | None, as_json: bool) -> bool:
    findings = run_checks(choose_root(root))
    ok = all(finding.level != "fail" for finding in findings)
    facts: dict[str, Any] = {"ok": ok, "checks": [vars(finding) for finding in findings]}
    answer(facts, as_json, lambda _: _render(findings))
    return ok


def _render(findings: list[CheckResult]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(f"{finding.level:4}  {finding.name.ljust(width)}  {finding.detail}")
        if finding.next_step:
            say(f"{'':{width + 8}}next: {finding.next_step}")
