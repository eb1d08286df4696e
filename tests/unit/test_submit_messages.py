"""Messages of the page on troubleshooting about submitting: each appears, and its advice helps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.histories import record_of, spec_of
from tests.unit.test_workers_slurm_questions import (
    NODES,
    PARTITIONS,
    answers_of,
    set_up_slurm,
)

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import (
    PreflightError,
    SchedulerUnavailableError,
    SubmissionRefusedError,
)
from holdfast.contracts.records.documents import Request, Submission
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.runs import preflight
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers.slurm import SlurmExecutor

SLURM = {"executor": "slurm", "gpus_per_node": 4}
SHOW_PARTITIONS = "scontrol --all -o show partition"
SHOW_NODES = "scontrol --all -o -d show node"
SHOW_CONFIG = "scontrol show config"
DBD = "accounting_storage/slurmdbd"

Make = Callable[..., RunSpec]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a spec whose program exists. Its arguments are keys of `resources`."""
    (tmp_path / "t.py").write_text("")

    def spec(launch: dict[str, Any] | None = None, **resources: Any) -> RunSpec:
        given = {"working_directory": str(tmp_path), **(launch or {})}
        return spec_of(launch=given, resources={**SLURM, **resources})

    return spec


def refusal(spec: RunSpec, root: Path) -> str:
    """The only problem that the preflight finds."""
    with pytest.raises(PreflightError) as refused:
        preflight.check(spec, root)
    (problem,) = refused.value.problems
    return problem


def test_without_slurms_commands_a_login_node_or_the_local_executor_is_needed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    problem = refusal(make(), tmp_path / "root")
    assert "sbatch, squeue, sacct" in problem
    assert "are not on this machine; submit from a login node" in problem
    preflight.check(make(executor="local"), tmp_path / "root")
    monkeypatch.setenv("PATH", os.defpath)
    set_up_slurm(tmp_path / "login-node", monkeypatch)
    preflight.check(make(), tmp_path / "root")


def test_a_cluster_without_a_default_partition_needs_one(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_default = {SHOW_PARTITIONS: PARTITIONS.replace("Default=YES", "Default=NO")}
    set_up_slurm(tmp_path / "slurm", monkeypatch, others=no_default)
    problem = refusal(make(), tmp_path / "root")
    assert problem.endswith("Slurm has no default partition; choose from spot")
    preflight.check(make(partition="spot"), tmp_path / "root")


def test_more_spare_nodes_than_the_partition_has_are_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_slurm(tmp_path / "slurm", monkeypatch)
    problem = refusal(make(partition="spot", nodes=3, spare_nodes=2), tmp_path / "root")
    assert problem == (
        "resources.spare_nodes 2: with resources.nodes 3 a job has 5 nodes, and partition spot has "
        "4; set resources.spare_nodes to 1 or less"
    )
    preflight.check(make(partition="spot", nodes=3, spare_nodes=1), tmp_path / "root")


@pytest.mark.parametrize(
    ("version", "parameters", "problem"),
    [
        ("22.05.8", "", "Slurm 22.05.8 has no expedited requeue; 25.11 added it"),
        ("26.05.5", "", "this cluster does not allow expedited requeue (SlurmctldParameters="),
        ("26.05.5", "enable_expedited_requeue", ""),
    ],
)
def test_an_expedited_requeue_is_refused_where_slurm_has_none(
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    parameters: str,
    problem: str,
) -> None:
    settings = f"SLURM_VERSION = {version}\nSlurmctldParameters = {parameters}"
    config = f"{answers_of('none', '', DBD)[SHOW_CONFIG]}\n{settings}"
    set_up_slurm(tmp_path / "slurm", monkeypatch, others={SHOW_CONFIG: config})
    spec = make(nodes=2, standby="expedite")
    if problem:
        found = refusal(spec, tmp_path / "root")
        assert found.startswith(f"resources.standby 'expedite': {problem}")
        assert "set 'successor', which acts on every version of Slurm, or 'auto'" in found
    else:
        preflight.check(spec, tmp_path / "root")
    preflight.check(make(nodes=2, standby="auto"), tmp_path / "root")


def test_a_time_limit_above_the_partitions_is_lowered(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = {SHOW_PARTITIONS: PARTITIONS.replace("MaxTime=UNLIMITED", "MaxTime=01:00:00")}
    set_up_slurm(tmp_path / "slurm", monkeypatch, others=hour)
    problem = refusal(make(partition="spot", time_limit_min=90), tmp_path / "root")
    assert problem == "resources.time_limit_min 90: partition spot allows at most 60 min"
    preflight.check(make(partition="spot", time_limit_min=60), tmp_path / "root")


@pytest.mark.parametrize(("kind", "column"), [("account", "Account"), ("qos", "Name")])
def test_an_unknown_account_or_qos_lists_those_that_exist(
    kind: str, column: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {f"sacctmgr -n -P show {kind} format={column}": "low\nhigh"}
    set_up_slurm(tmp_path / "slurm", monkeypatch, others=known)
    problem = refusal(make(**{kind: "gold"}), tmp_path / "root")
    assert problem.endswith(f"'gold': Slurm has no such {kind}; choose from high, low")
    preflight.check(make(**{kind: "high"}), tmp_path / "root")


def test_a_root_that_other_nodes_do_not_see_is_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = NODES.splitlines()
    lines[1] = lines[1].replace("NodeHostName=", "NodeHostName=far-")
    set_up_slurm(tmp_path / "slurm", monkeypatch, others={SHOW_NODES: "\n".join(lines)})
    in_memory = Path("/dev/shm") / f"holdfast-{os.getpid()}-{tmp_path.name}"
    try:
        problem = refusal(make(), in_memory)
    finally:
        in_memory.rmdir()
    assert "is in memory, so node n2 would not see it; give a directory on storage" in problem
    assert "HOLDFAST_ROOT" in problem


def test_a_job_of_another_cluster_is_only_asked_about_there(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make()
    request = build_request(record_of(spec), spec, attempt=1, gpus=4, reason="x")
    request = request.model_copy(update={"cluster": "theirs"})
    job = Submission(job_id="7", executor="slurm", submitted_at=1.0)
    config = answers_of("none", "", "accounting_storage/slurmdbd")[SHOW_CONFIG]
    line = f"JobId=7 JobName={request.job_name} JobState=RUNNING NodeList=n1"
    for name in ("ours", "theirs"):
        others = {
            SHOW_CONFIG: f"{config}\nClusterName = {name}",
            "scontrol --all -o show job 7": line,
        }
        set_up_slurm(tmp_path / name, monkeypatch, others=others)
        scancel = f'#!/bin/sh\necho "$*" > {tmp_path}/cancelled-by-{name}\n'
        (tmp_path / name / "scancel").write_text(scancel)
        if name == "ours":
            with pytest.raises(
                SchedulerUnavailableError,
                match=r"was submitted to the Slurm cluster 'theirs', but .* run the command on",
            ):
                SlurmExecutor().cancel(request, job)
    SlurmExecutor().cancel(request, job)
    assert [path.name for path in tmp_path.glob("cancelled-by-*")] == ["cancelled-by-theirs"]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            "Socket timed out on send/recv operation",
            SchedulerUnavailableError,
            r"it is unknown whether Slurm accepted holdfast-r-\S+: .*; it is looked up by name",
        ),
        (
            "Invalid account or account/partition combination specified",
            SubmissionRefusedError,
            r"Slurm refused holdfast-r-\S+: .*Invalid account",
        ),
    ],
)
def test_a_lost_answer_of_sbatch_is_no_refusal(
    answer: str,
    kind: type[Exception],
    words: str,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_up_slurm(tmp_path / "slurm", monkeypatch)
    said = f"sbatch: error: Batch job submission failed: {answer}"
    (tmp_path / "slurm" / "sbatch").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    spec = make()
    request: Request = build_request(record_of(spec), spec, attempt=1, gpus=4, reason="x")
    with pytest.raises(kind, match=words):
        SlurmExecutor().submit(AttemptPaths(tmp_path / "0001"), request)


def test_an_interpreter_that_cannot_import_holdfast_is_replaced(make: Make, tmp_path: Path) -> None:
    """The first interpreter has no packages, like that of a new environment."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    problem = refusal(make({"python": str(bare)}, executor="local"), tmp_path / "root")
    assert "it cannot import the program or holdfast (ModuleNotFoundError: " in problem
    preflight.check(make({"python": sys.executable}, executor="local"), tmp_path / "root")


def test_a_working_directory_that_does_not_exist_is_named(make: Make, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    spec = make({"working_directory": str(folder)}, executor="local")
    problem = refusal(spec, tmp_path / "root")
    assert problem == f"launch.working_directory {folder}: no such directory"
    folder.mkdir()
    (folder / "t.py").write_text("")
    preflight.check(spec, tmp_path / "root")


def test_memory_is_given_for_a_node_or_for_a_cpu() -> None:
    both = {**SLURM, "memory_gb_per_node": 64, "memory_gb_per_cpu": 4}
    with pytest.raises(
        ValidationError, match="per_cpu 4: Slurm takes one of them, so leave the other out"
    ):
        spec_of(resources=both)
    for key in ("memory_gb_per_node", "memory_gb_per_cpu"):
        spec_of(resources={name: value for name, value in both.items() if name != key})


def test_a_directory_for_checkpoints_that_is_not_mounted_is_named(
    make: Make, tmp_path: Path
) -> None:
    away = tmp_path / "scratch"
    away.symlink_to(tmp_path / "mount" / "scratch")
    checkpoint = spec_of(checkpoint={"directory": str(away / "checkpoints")}).checkpoint
    spec = make(executor="local").model_copy(update={"checkpoint": checkpoint})
    problem = refusal(spec, tmp_path / "root")
    assert problem.startswith("checkpoint.directory ")
    assert "cannot write there (a file, or a link to a folder that does not exist)" in problem
    (tmp_path / "mount" / "scratch").mkdir(parents=True)
    preflight.check(spec, tmp_path / "root")
