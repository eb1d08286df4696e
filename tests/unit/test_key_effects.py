"""Each key of a spec: set to another value than its default, and what follows from it.

Most effects are in what a job is started with: the scheduler's parameters, torchrun's command and
the environment of the ranks. Others are in decisions. The rest need runs, and their tests are
named. A key without a row fails the test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from tests.histories import NOW, attempt_of, history_of, record_of
from tests.runs import RunFolder
from tests.unit.test_contracts_keep_rules import BRANCH
from tests.unit.test_contracts_keep_rules import NOW as BRANCH_NOW
from tests.unit.test_key_pairs import RULES
from tests.unit.test_spec_effects import ON_SLURM, OPAQUE, merged, with_key

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.keep_rules import kept_by_rules
from holdfast.contracts.spec import RunSpec
from holdfast.contracts.spec_effects import ACTS
from holdfast.contracts.states import Cause
from holdfast.flows.parameters import load_spec
from holdfast.trainer.numerics.detector import Detector
from holdfast.workers.agent.launch_command import build_command, build_environment
from holdfast.workers.agent.notices.watch import build_clouds
from holdfast.workers.agent.standby_plan import free_port
from holdfast.workers.executors.local import LocalExecutor
from holdfast.workers.policy import decide
from holdfast.workers.request import build_request
from holdfast.workers.sizes import allowed_sizes

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


def sizes(**elastic: Any) -> tuple[int, ...]:
    return allowed_sizes(load_spec(merged(BASE, {"elastic": elastic})))


LOCAL: Final = {"resources": {"executor": "local", "nodes": 1}}
BASE: Final = {
    "name": "kelp",
    "command": ["train.py"],
    "resources": {"executor": "slurm", "nodes": 2, "gpus_per_node": 4},
}


def decision(
    cause: Cause, number: int, supervision: dict[str, Any] | None = None, **more: Any
) -> Any:
    spec = load_spec(merged(BASE, {"supervision": supervision or {}}, more))
    attempts = [attempt_of(spec, n, cause, committed=n * 10) for n in range(1, number + 1)]
    return decide(history_of(spec, *attempts), None, now=NOW)


def kept(key: str) -> bool:
    """Whether a keep rule keeps some checkpoints, and not all as without it."""
    keep = load_spec(merged(BASE, {"checkpoint": {"keep": {key: RULES[key]}}})).checkpoint.keep
    return 0 < len(kept_by_rules(BRANCH, keep, now=BRANCH_NOW)) < len(BRANCH)


def bad_step(**numerics: Any) -> int | None:
    """The step at which a loss is first bad: small ripples, 4 at step 30, and 9 at step 60."""
    table = {"supervision": {"numerics": {"on_spike": "warn", **numerics}}}
    detector = Detector(load_spec(merged(BASE, table)).supervision.numerics)
    losses = {30: 4.0, 60: 9.0}
    for step in range(1, 81):
        if detector.look(step, losses.get(step, 1.0 + 0.1 * (step % 3))):
            return step
    return None


# Effects on decisions.
DECISIONS: Final[dict[str, Callable[[], bool]]] = {
    "elastic.min_gpus": lambda: sizes(min_gpus=4) == (4, 8) != sizes(),
    "elastic.max_gpus": lambda: sizes(max_gpus=12) == (8, 12) != sizes(),
    "elastic.choices": lambda: sizes(choices=[4, 8]) == (4, 8),
    "elastic.on_preemption": lambda: (
        decision(Cause.PREEMPTION, 1, elastic={"on_preemption": [4]}).gpus == 4
    ),
    "supervision.budgets": lambda: (
        [decision(Cause.HANG, 1, one).action for one in ({}, {"budgets": {"hang": 0}})]
        == ["relaunch", "stop"]
    ),
    "supervision.attempts_max": lambda: (
        [decision(Cause.PREEMPTION, 2, one).action for one in ({}, {"attempts_max": 2})]
        == ["relaunch", "stop"]
    ),
    "supervision.backoff_s": lambda: (
        decision(Cause.INFRASTRUCTURE, 1, {"backoff_s": 500}).delay_s
        > decision(Cause.INFRASTRUCTURE, 1).delay_s
    ),
    "supervision.ports": lambda: (
        free_port(
            load_spec(
                merged(BASE, {"supervision": {"ports": "23456-23499"}})
            ).supervision.port_range
        )
        in range(23456, 23500)
    ),
    "supervision.notices": lambda: (
        [[one.name for one in build_clouds(name, "", {})] for name in ("off", "gcp")]
        == [[], ["gcp"]]
    ),
    "supervision.numerics.spike_mads": lambda: (bad_step(), bad_step(spike_mads=60)) == (30, 60),
    "supervision.numerics.window": lambda: (bad_step(), bad_step(window=200)) == (30, 60),
    **{
        f"checkpoint.keep.{key}": (lambda key=key: kept(key))  # type: ignore[misc]
        for key in RULES
    },
}
# Effects that need a run, and tests that observe them.
RUNS: Final = {
    "name": "tests/api/test_parameters.py",
    "program.complete": "tests/unit/test_program_watch.py",
    "program.settle_s": "tests/unit/test_program_watch.py",
    "program.progress": "tests/process/test_opaque_programs.py",
    "program.signal_to": "tests/process/test_opaque_programs.py",
    "resources.fallbacks": "tests/unit/test_workers_places.py",
    "resources.return_after_min": "tests/slurm/test_fallbacks.py",
    "elastic.grow": "tests/unit/test_workers_growth.py",
    "elastic.grow_after_s": "tests/unit/test_workers_growth.py",
    "checkpoint.budget": "tests/process/test_flush_space.py",
    "checkpoint.directory": "tests/process/test_checkpoint_directory.py",
    "supervision.heartbeat_s": "tests/process/test_flow_supervise.py",
    "supervision.poll_s": "tests/process/test_flow_supervise.py",
    "supervision.notices_url": "tests/process/test_notices.py",
    "supervision.join_timeout_s": "tests/unit/test_workers_lead.py",
    "supervision.pending_timeout_min": "tests/unit/test_workers_pending.py",
    "supervision.restarts_in_place": "tests/process/test_hangs.py",
    "supervision.standby_after_s": "tests/process/test_agent.py",
    "supervision.hangs": "tests/process/test_hangs.py",
    "supervision.silence_s": "tests/process/test_hangs.py",
    "supervision.numerics.metric": "tests/process/test_metric_names.py",
    "supervision.numerics.margin_steps": "tests/process/test_numerics.py",
    "supervision.numerics.skip_steps": "tests/process/test_numerics.py",
    "supervision.numerics.changes_max": "tests/unit/test_numerics.py",
    "supervision.allow_early_exit": "tests/frameworks/test_transformers.py",
    "health.before": "tests/process/test_node_health.py",
    "health.after": "tests/process/test_node_health.py",
    "health.timeout_s": "tests/process/test_node_health.py",
    "cost.gpu_hour": "tests/api/test_totals.py",
    "cost.on_demand_per_gpu_hour": "tests/unit/test_simulation.py",
    "cost.currency": "tests/api/test_totals.py",
    "alerts.targets": "tests/process/test_alerts.py",
    "alerts.on": "tests/process/test_alerts.py",
    "alerts.ettr_min": "tests/unit/test_limits.py",
    "alerts.checkpoint_age_max_min": "tests/unit/test_limits.py",
    "alerts.gpu_hours_max": "tests/unit/test_limits.py",
    "blocks.cluster": "tests/prefect/test_blocks.py",
    "blocks.storage": "tests/prefect/test_blocks.py",
}
# The words with which the local executor starts an agent.
WORDS: Final = {"launch.python", "launch.wrapper"}
# A key with one value only.
NONE: Final = {"checkpoint.staging"}


def test_each_key_has_an_effect_row() -> None:
    assert JOBS.keys() | DECISIONS.keys() | RUNS.keys() | WORDS | NONE == ACTS.keys()
    assert len(JOBS) + len(DECISIONS) + len(RUNS) + len(WORDS | NONE) == len(ACTS)
    for key, path in RUNS.items():
        assert re.search(rf"\b{key.rpartition('.')[2]}\b", (CHECKOUT / path).read_text()), key


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
