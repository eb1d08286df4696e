"""Each key of a spec: set to another value than its default, and what follows from it.

Most effects are in what a job is started with: the scheduler's parameters, torchrun's command and
the environment of the ranks. Others are in decisions. The rest need runs, and their tests are
named. A key without a row fails the test.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from tests.support.histories import NOW, record_of
from tests.support.runs import RunFolder
from tests.unit.key_decisions import BASE, DECISIONS
from tests.unit.test_spec_effects import ON_SLURM, OPAQUE, merged, with_key

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.spec.effects import ACTS
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.flows.parameters import load_spec
from holdfast.workers.agent.launch.command import build_command, build_environment
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers.local import LocalExecutor

CHECKOUT: Final = Path(__file__).resolve().parents[2]
MIRROR: Final = {"checkpoint": {"mirror": "s3://bucket/y"}}
# Of each key that a job is started with: a value, what lets it act, and a text that follows.
JOBS: Final[dict[str, tuple[Any, dict[str, Any], str]]] = {
    "command": (["other.py"], {}, '"other.py"]'),
    "environment": ({"MODE": "fast"}, {}, '"MODE": "fast"'),
    "config": ({"lr": 77}, {}, r"{\"lr\": 77}"),
    "launch.setup": (["module load x"], ON_SLURM, '"setup": ["module load x"]'),
    "launch.container": (["--container-image=x"], ON_SLURM, '"--container-image=x"'),
    "launch.srun": (["--mpi=none"], ON_SLURM, '"--mpi=none"'),
    "launch.node_setup": (["export A=1"], {}, "export A=1"),
    "launch.network_interface": ("ib0", {}, '"NCCL_SOCKET_IFNAME": "=ib0"'),
    "launch.torchrun": (["--numa-binding=node"], {}, '"--numa-binding=node"'),
    "launch.export": ("none", ON_SLURM, '"export": "NONE"'),
    "launch.working_directory": ("/code", {}, '"directory": "/code"'),
    "launch.code": ("snapshot", {}, '"directory": "/srv/r/code"'),
    "program.checkpoints": ("out/{step}", {}, '"--no-python"'),
    "program.signal": ("SIGUSR1", OPAQUE, '"SIGUSR1"'),
    "program.launcher": ("none", OPAQUE, "command/attempt_0/0"),
    "resources.executor": ("slurm", {}, '"ntasks_per_node": 1'),
    "resources.nodes": (3, ON_SLURM, '"--nnodes=3"'),
    "resources.spare_nodes": (2, merged(ON_SLURM, {"resources": {"nodes": 3}}), '"nodes": 5'),
    "resources.gpus_per_node": (3, {}, '"--nproc-per-node=3"'),
    "resources.nproc_per_node": (5, {}, '"--nproc-per-node=5"'),
    "resources.cpus_per_gpu": (6, {}, '"OMP_NUM_THREADS": "6"'),
    "resources.memory_gb_per_node": (9, ON_SLURM, '"mem": "9216M"'),
    "resources.memory_gb_per_cpu": (9, ON_SLURM, '"mem_per_cpu": "9216M"'),
    "resources.partition": ("big", ON_SLURM, '"partition": "big"'),
    "resources.account": ("lab", ON_SLURM, '"account": "lab"'),
    "resources.qos": ("high", ON_SLURM, '"qos": "high"'),
    "resources.constraint": ("a100", ON_SLURM, '"constraint": "a100"'),
    "resources.time_limit_min": (77, ON_SLURM, '"time": 77'),
    "resources.gpu_type": ("h100", ON_SLURM, '"gpus_per_node": "h100:4"'),
    "resources.gres": ("gpu:a:4", ON_SLURM, '"gres": "gpu:a:4"'),
    "resources.extra": ({"reservation": "x"}, ON_SLURM, '"reservation": "x"'),
    "checkpoint.interval": ("7m", {}, '"HOLDFAST_CHECKPOINT_INTERVAL": "7m"'),
    "checkpoint.snapshots": (7, {}, '"HOLDFAST_CHECKPOINT_SNAPSHOTS": "7"'),
    "checkpoint.overlap": (True, {}, '"HOLDFAST_CHECKPOINT_OVERLAP": "True"'),
    "checkpoint.staging": ("single", {}, '"HOLDFAST_CHECKPOINT_STAGING": "single"'),
    "checkpoint.staging_directory": ("/scratch", {}, '"HOLDFAST_STAGING_DIRECTORY": "/scratch"'),
    "checkpoint.write_limit": ("5MB", {}, '"HOLDFAST_CHECKPOINT_WRITE_LIMIT": "5000000"'),
    "checkpoint.doubling_steps": (3, {}, '"HOLDFAST_CHECKPOINT_DOUBLING_STEPS": "3"'),
    "checkpoint.mirror": ("s3://b/x", {}, '"HOLDFAST_CHECKPOINT_MIRROR": "s3://b/x"'),
    "checkpoint.local": ("/scratch", MIRROR, '"HOLDFAST_CHECKPOINT_LOCAL": "/scratch"'),
    "supervision.grace_s": (100, ON_SLURM, '"signal": "USR2@130"'),
    "supervision.flush_timeout_s": (99, {}, '"HOLDFAST_FLUSH_TIMEOUT_S": "99.0"'),
    "supervision.numerics.on_nan": ("warn", {}, r"\"on_nan\":\"warn\""),
    "supervision.numerics.on_spike": ("stop", {}, r"\"on_spike\":\"stop\""),
}


def started(spec: RunSpec) -> str:
    """What a job of a spec is started with, as JSON."""
    request = build_request(record_of(spec), spec, attempt=1, gpus=spec.gpus, reason="test")
    logs = Path("/logs")
    run = SimpleNamespace(directory=Path("/runs/r"))
    context: Any = SimpleNamespace(request=request, run=run, node=0, nodes=request.nodes)
    handles: Any = SimpleNamespace(status_table="b", flusher="f")
    given = {name: str(value) for name, value in request.environment.items()}
    facts = {
        "scheduler": request.scheduler,
        "directory": request.working_directory,
        "command": build_command(request, node=0, launch=1, address="a", port=1, logs=logs),
        "environment": build_environment(context, 1, handles, {}, given),
    }
    return json.dumps(facts)


def spec_with(key: str, value: Any, condition: dict[str, Any]) -> RunSpec:
    table = {"name": "kelp", "command": ["train.py"], "launch": {"working_directory": "/here"}}
    return load_spec(merged(table, condition, with_key(key, value)))


LOCAL: Final = {"resources": {"executor": "local", "nodes": 1}}
# Effects that need a run, and tests that observe them.
RUNS: Final = {
    "tags": "unit/test_annotations.py::test_commands_change_and_show_them",
    "on": "unit/test_consumers.py::test_an_evaluation_reports_metrics_and_keeps_its_checkpoint",
    "resources.commit_comment": "slurm/test_commit_comments.py::"
    "test_a_job_s_comment_has_its_newest_commit_and_keeps_its_own_words",
    "resources.standby": "slurm/test_successors.py::"
    "test_a_run_with_a_successor_does_not_wait_for_the_queue",
    "name": "process/test_cli_local.py::test_run_is_submitted_awaited_and_forked",
    "program.progress": "process/test_opaque_programs.py::"
    "test_a_program_is_preempted_killed_and_finished",
    "program.signal_to": "process/test_opaque_programs.py::"
    "test_processes_below_a_shell_get_the_signal_too",
    "checkpoint.budget": "process/test_flush_space.py::"
    "test_storage_budget_limits_the_size_of_all_checkpoints",
    "checkpoint.directory": "process/test_checkpoint_directory.py::"
    "test_run_is_preempted_and_resumes_with_its_checkpoints_elsewhere",
    "checkpoint.neighbour": "slurm/test_neighbour.py::"
    "test_newest_snapshot_is_committed_with_the_bits_of_an_uninterrupted_run",
    "supervision.poll_s": "process/test_flow_supervise.py::"
    "test_the_wait_between_two_looks_is_that_of_the_spec",
    "supervision.notices_url": "process/test_notices.py::"
    "test_rebalance_notice_saves_early_and_interruption_loses_no_step",
    "supervision.join_timeout_s": "unit/test_workers_lead.py::"
    "test_the_join_timeout_of_the_spec_limits_the_wait_for_nodes",
    "supervision.standby_after_s": "process/test_agent.py::"
    "test_killed_rank_is_restarted_in_the_same_job",
    "supervision.hangs": "process/test_hangs.py::"
    "test_hang_that_holdfast_does_not_end_is_accounted_as_hung",
    "supervision.numerics.metric": "process/test_metric_names.py::"
    "test_a_metric_that_is_not_logged_is_reported_and_deletes_nothing",
    "health.before": "process/test_node_health.py::test_no_rank_starts_on_an_unhealthy_node",
    "health.after": "process/test_node_health.py::"
    "test_a_node_that_fails_after_a_crash_gets_no_other_launch",
    "health.timeout_s": "process/test_node_health.py::"
    "test_a_check_that_takes_too_long_ends_with_all_its_processes",
    "health.slowdown": "unit/test_workers_hangs.py::test_a_slow_node_is_reported_as_the_spec_says",
    "health.gpus": "unit/test_gpu_faults.py::test_a_fault_of_a_gpu_is_a_cause",
    "health.throttled_s_max": "unit/test_gpu_faults.py::test_wear_beyond_a_limit_excludes_a_host",
    "health.link_errors_max": "unit/test_gpu_faults.py::test_wear_beyond_a_limit_excludes_a_host",
    "alerts.targets": "process/test_alerts.py::"
    "test_people_are_told_of_a_failed_run_and_addresses_stay_secret",
    "alerts.on": "process/test_alerts.py::"
    "test_people_are_told_of_a_failed_run_and_addresses_stay_secret",
    "blocks.cluster": "prefect/test_blocks.py::"
    "test_a_spec_takes_its_defaults_and_its_root_from_blocks",
    "blocks.storage": "prefect/test_blocks.py::"
    "test_a_spec_takes_its_defaults_and_its_root_from_blocks",
}
# The words with which the local executor starts an agent.
WORDS: Final = {"launch.python", "launch.wrapper"}


def test_each_key_has_an_effect_row() -> None:
    assert JOBS.keys() | DECISIONS.keys() | RUNS.keys() | WORDS == ACTS.keys()
    assert len(JOBS) + len(DECISIONS) + len(RUNS) + len(WORDS) == len(ACTS)
    for key, named in RUNS.items():
        path, _, name = named.partition("::")
        text = (CHECKOUT / "tests" / path).read_text()
        assert f"def {name}(" in text, key
        assert re.search(rf"\b{key.rpartition('.')[2]}\b", text), key


@pytest.mark.parametrize("key", JOBS)
def test_a_job_is_started_with_what_a_key_says(key: str) -> None:
    value, condition, follows = JOBS[key]
    table = {"name": "kelp", "command": ["train.py"], "launch": {"working_directory": "/here"}}
    with_it = started(spec_with(key, value, condition))
    assert follows in with_it
    assert follows not in started(load_spec(merged(table, condition)))


@pytest.mark.parametrize("key", DECISIONS)
def test_a_decision_follows_a_key(key: str) -> None:
    assert DECISIONS[key]()


def test_a_wrapper_and_a_python_start_the_agent(tmp_path: Path) -> None:
    """The wrapper writes its arguments and fails."""
    made = RunFolder(tmp_path, "r", "u" * 32)
    attempt = made.submit(1, 1, NOW)
    seen = tmp_path / "seen"
    wrapper = ["sh", "-c", f'echo "$@" > {seen}; exit 3', "sh"]
    spec = load_spec(merged(BASE, LOCAL, {"launch": {"wrapper": wrapper, "python": "/x/python"}}))
    request = build_request(record_of(spec), spec, attempt=1, gpus=spec.gpus, reason="test")
    with pytest.raises(HoldfastError):
        LocalExecutor().submit(attempt, request)
    assert seen.read_text().startswith("/x/python -m holdfast.")
