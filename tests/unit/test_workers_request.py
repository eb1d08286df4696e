"""Requests: deterministic, printable, and with every option that a Holdfast job needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.histories import record_of, spec_of

from holdfast.contracts.disk.digests import command_digest
from holdfast.contracts.records.documents import Request
from holdfast.workers.agent.launch.command import build_command, build_environment
from holdfast.workers.runs.request import LOCAL_TIMEOUT_MIN, build_request


def request_of(attempt: int = 1, gpus: int | None = None, **fields: Any) -> Request:
    spec = spec_of(**fields)
    return build_request(
        record_of(spec), spec, attempt=attempt, gpus=gpus or spec.gpus, reason="test"
    )


def slurm(**resources: Any) -> dict[str, Any]:
    given = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4, **resources}
    return {"resources": given}


def test_the_job_name_contains_run_uid_and_attempt() -> None:
    assert request_of(attempt=12).job_name == "holdfast-r-uuuuuuuu-a0012"


def test_requests_are_deterministic_and_round_trip_through_json() -> None:
    one = request_of(**slurm())
    assert one == request_of(**slurm())
    assert Request.model_validate_json(one.model_dump_json()) == one


def test_a_slurm_job_is_never_requeued_and_survives_a_node_failure() -> None:
    parameters = request_of(**slurm(time_limit_min=30)).scheduler
    options = parameters["additional_parameters"]
    assert options["no-requeue"] is True
    assert options["no-kill"] is True
    assert options["signal"] == "USR2@60"
    assert "--no-kill" in parameters["srun_args"]
    assert "--kill-on-bad-exit=0" in parameters["srun_args"]
    assert parameters["ntasks_per_node"] == 1
    assert (parameters["nodes"], parameters["gpus_per_node"]) == (2, 4)
    assert parameters["time"] == 30


@pytest.mark.parametrize(("limit_min", "warning"), [(3, "USR2@0"), (4, "USR2@60")])
def test_a_job_too_short_for_an_early_warning_signal_gets_none(
    limit_min: int, warning: str
) -> None:
    parameters = request_of(**slurm(time_limit_min=limit_min)).scheduler
    assert parameters["additional_parameters"]["signal"] == warning


def test_without_a_time_limit_the_partitions_default_applies() -> None:
    assert request_of(**slurm()).scheduler["time"] is None


@pytest.mark.parametrize(
    ("gres", "present", "absent"),
    [(None, "gpus_per_node", "gres"), ("gpu:h100:4", "gres", "gpus_per_node")],
)
def test_a_request_uses_either_gpus_per_node_or_gres(
    gres: str | None, present: str, absent: str
) -> None:
    parameters = request_of(**slurm(gres=gres)).scheduler
    assert present in parameters
    assert absent not in parameters


def test_gres_none_requests_no_gpus() -> None:
    parameters = request_of(**slurm(gres="none")).scheduler
    assert not {"gres", "gpus_per_node"} & set(parameters)


def test_all_slurm_options_of_the_spec_are_in_the_request() -> None:
    fields = slurm(
        partition="spot",
        account="lab",
        qos="low",
        constraint="h100",
        cpus_per_gpu=2,
        memory_gb_per_node=1.5,
        extra={"comment": "hi", "exclusive": True},
    )
    launch = {"setup": ["module load cuda"], "container": ["--container-image=x"], "srun": ["-v"]}
    spec = spec_of(**fields, launch=launch)
    request = build_request(
        record_of(spec), spec, attempt=1, gpus=8, reason="test", exclude=("n1", "n2")
    )
    got = request.scheduler
    assert (got["partition"], got["account"], got["qos"]) == ("spot", "lab", "low")
    assert (got["constraint"], got["cpus_per_task"], got["mem"]) == ("h100", 8, "1536M")
    assert got["exclude"] == "n1,n2"
    assert got["setup"] == ["module load cuda"]
    assert got["srun_args"][-2:] == ["--container-image=x", "-v"]
    assert "--cpus-per-task=8" in got["srun_args"]
    assert got["additional_parameters"]["comment"] == "hi"
    assert got["additional_parameters"]["exclusive"] is True


def test_memory_per_cpu_is_requested_instead_of_memory_per_node() -> None:
    request = request_of(**slurm(memory_gb_per_cpu=0.293, cpus_per_gpu=2))
    assert request.scheduler["mem_per_cpu"] == "301M"
    assert "mem" not in request.scheduler
    assert "mem_per_cpu" not in request_of(**slurm(memory_gb_per_node=1)).scheduler


def test_memory_per_cpu_and_per_node_exclude_each_other() -> None:
    with pytest.raises(ValueError, match=r"_per_node 2 and resources\.memory_gb_per_cpu 1:"):
        request_of(**slurm(memory_gb_per_cpu=1, memory_gb_per_node=2))


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "300M"])
def test_memory_per_cpu_is_a_positive_number(value: object) -> None:
    with pytest.raises(ValueError, match="memory_gb_per_cpu"):
        request_of(**slurm(memory_gb_per_cpu=value))


def test_mem_per_cpu_in_extra_names_its_key() -> None:
    with pytest.raises(ValueError, match=r"set resources\.memory_gb_per_cpu"):
        request_of(**slurm(extra={"mem-per-cpu": "300M"}))


def test_a_local_job_has_the_longest_timeout() -> None:
    assert request_of().scheduler["timeout_min"] == LOCAL_TIMEOUT_MIN


@pytest.mark.parametrize(("gpus", "nodes", "per_node"), [(8, 2, 4), (4, 1, 4), (2, 1, 2)])
def test_fewer_gpus_are_split_into_nodes(gpus: int, nodes: int, per_node: int) -> None:
    request = request_of(gpus=gpus, **slurm())
    assert (request.nodes, request.gpus_per_node) == (nodes, per_node)


def test_the_command_is_the_same_at_every_size() -> None:
    sizes = [request_of(gpus=g, **slurm()) for g in (2, 4, 8)]
    assert len({r.command_digest for r in sizes}) == 1
    assert sizes[0].command_digest == command_digest(("t.py",), ".")


def test_a_code_snapshot_runs_from_the_run_folder() -> None:
    request = request_of(launch={"code": "snapshot", "working_directory": "/somewhere"})
    assert request.working_directory == "/srv/r/code"


def test_what_the_ranks_must_know_is_in_their_environment() -> None:
    request = request_of(supervision={"flush_timeout_s": 90})
    run = SimpleNamespace(directory=Path("/runs/r"))
    context: Any = SimpleNamespace(request=request, run=run, node=0, nodes=1)
    handles: Any = SimpleNamespace(status_table="b", flusher="f")
    around = {"HOLDFAST_FLUSH_TIMEOUT_S": "7", "HOLDFAST_ROOT": "/other"}
    built = build_environment(context, 1, handles, around, {})
    assert built["HOLDFAST_FLUSH_TIMEOUT_S"] == "90.0"
    # By it, the program names checkpoints of other runs.
    assert built["HOLDFAST_ROOT"] == "/runs"


def test_the_gpu_type_scales_with_the_gpu_count() -> None:
    sized = {"gpu_type": "h100", **slurm()["resources"]}
    assert request_of(resources=sized).scheduler["gpus_per_node"] == "h100:4"
    smaller = request_of(resources=sized, elastic={"min_gpus": 1}, gpus=2).scheduler
    assert (smaller["nodes"], smaller["gpus_per_node"]) == (1, "h100:2")
    with pytest.raises(ValueError, match=r"gpu_type 'h100' and resources.gres 'gpu:8': expected"):
        spec_of(**slurm(gpu_type="h100", gres="gpu:8"))
    with pytest.raises(ValueError, match="gpu_type"):
        spec_of(**slurm(gpu_type="h100:8"))


def test_a_job_can_start_with_the_environment_of_a_login() -> None:
    assert "export" not in request_of(**slurm()).scheduler["additional_parameters"]
    parameters = request_of(**slurm(), launch={"export": "none"}).scheduler
    assert parameters["additional_parameters"]["export"] == "NONE"
    assert "--export=ALL" in parameters["srun_args"]


def command_of(tmp_path: Path, **launch: Any) -> list[str]:
    request = request_of(launch=launch)
    return build_command(request, node=0, launch=1, address="here", port=1, logs=tmp_path)


def test_each_node_runs_its_setup_lines_before_torchrun(tmp_path: Path) -> None:
    plain = command_of(tmp_path)
    lines = ("export A='1 2'", "B=$A; export B")
    command = command_of(tmp_path, node_setup=lines, torchrun=("--numa-binding=node",))
    assert [word for word in command if word not in plain][-1] == "--numa-binding=node"
    words = [*command[: command.index(sys.executable)], "sh", "-c", 'echo "$A-$B"']
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "1 2-1 2\n"
    failing = command_of(tmp_path, node_setup=("false", "true"))
    words = [*failing[: failing.index(sys.executable)], "echo", "never"]
    assert subprocess.run(words, capture_output=True, timeout=30).stdout == b""


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("--nnodes=2", "set resources.nodes"),
        ("--nproc_per_node=2", "set resources.nproc_per_node"),
        ("--rdzv_back=c10d", "leave it out"),
        ("--standalone", "leave it out"),
        ("--max-restarts=3", "the agent restarts"),
        ("train.py", "expected one option with its value"),
        ("-m", "expected one option with its value"),
    ],
)
def test_torchrun_options_that_holdfast_sets_are_refused(option: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        spec_of(launch={"torchrun": [option]})
    spec_of(launch={"torchrun": ["--numa-binding=node", "--duplicate-stdout-filters=x_y"]})
