"""Keys that cannot act in a run, and keys that contradict each other, are refused at submit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli_calls import Call
from tests.support.histories import spec_of
from tests.support.spec_keys import spec_keys

from holdfast.contracts.errors import SpecError
from holdfast.contracts.spec.effects import ACTS
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.flows.parameters import load_spec

SECRET = {"from_env": "HOOK"}
ON_SLURM: dict[str, Any] = {"resources": {"executor": "slurm", "gpus_per_node": 4}}
OPAQUE: dict[str, Any] = {"program": {"checkpoints": "out/checkpoint-{step}"}}
WITHOUT_TORCHRUN = {"program": {"checkpoints": "out/checkpoint-{step}", "launcher": "none"}}
ONCE = {"supervision": {"attempts_max": 1}}
ELSEWHERE = [{"partition": "prod"}]
ROLLBACK = {"supervision": {"numerics": {"on_nan": "rollback"}}}

# Of each key that acts only under a condition: a value, what keeps it from acting, and what lets
# it act.
KEYS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "launch.container": (["--container-image=x"], {}, ON_SLURM),
    "launch.srun": (["--mpi=none"], {}, ON_SLURM),
    "launch.torchrun": (["--numa-binding=node"], WITHOUT_TORCHRUN, {}),
    "launch.export": ("none", {}, ON_SLURM),
    "program.complete": (["state.json"], {}, OPAQUE),
    "program.settle_s": (9, {}, OPAQUE),
    "program.progress": (r"step (?P<step>\d+)", {}, OPAQUE),
    "program.signal": ("SIGTERM", {}, OPAQUE),
    "program.signal_to": ("all", {}, OPAQUE),
    "program.launcher": ("none", {}, OPAQUE),
    "resources.spare_nodes": (1, ON_SLURM, {"resources": {**ON_SLURM["resources"], "nodes": 2}}),
    "resources.memory_gb_per_node": (8, {}, ON_SLURM),
    "resources.memory_gb_per_cpu": (2, {}, ON_SLURM),
    "resources.partition": ("gpu", {}, ON_SLURM),
    "resources.account": ("lab", {}, ON_SLURM),
    "resources.qos": ("high", {}, ON_SLURM),
    "resources.constraint": ("a100", {}, ON_SLURM),
    "resources.gpu_type": ("h100", {}, ON_SLURM),
    "resources.gres": ("gpu:4", {}, ON_SLURM),
    "resources.extra": ({"reservation": "x"}, {}, ON_SLURM),
    "resources.fallbacks": (ELSEWHERE, {}, ON_SLURM),
    "resources.return_after_min": (
        10.0,
        ON_SLURM,
        {"resources": {**ON_SLURM["resources"], "fallbacks": ELSEWHERE}},
    ),
    "resources.standby": ("successor", {}, ON_SLURM),
    "resources.commit_comment": (True, {}, ON_SLURM),
    "elastic.on_preemption": ([1], ONCE, {}),
    "elastic.grow": (True, {"elastic": {"max_gpus": 2}}, {**ON_SLURM, "elastic": {"min_gpus": 1}}),
    "elastic.grow_after_s": (
        60,
        ON_SLURM,
        {**ON_SLURM, "elastic": {"min_gpus": 1, "grow": True}},
    ),
    "on": ([{"name": "eval", "command": ["true"]}], OPAQUE, {}),
    "checkpoint.interval": ("auto", OPAQUE, {}),
    "checkpoint.doubling_steps": (1, OPAQUE, {}),
    "checkpoint.keep.last": (3, OPAQUE, {}),
    "checkpoint.keep.best": ({"metric": "loss"}, OPAQUE, {}),
    "checkpoint.keep.every_steps": (100, OPAQUE, {}),
    "checkpoint.keep.doubling_steps": (1, OPAQUE, {}),
    "checkpoint.keep.every_hours": (6, OPAQUE, {}),
    "checkpoint.keep.ttl": ("7d", OPAQUE, {}),
    "checkpoint.budget": ("500GB", OPAQUE, {}),
    "checkpoint.mirror": ("s3://bucket/x", OPAQUE, {}),
    "checkpoint.local": (
        "/scratch",
        {**OPAQUE, "checkpoint": {"mirror": "s3://bucket/x"}},
        {"checkpoint": {"mirror": "s3://bucket/x"}},
    ),
    "checkpoint.snapshots": (100, OPAQUE, {}),
    "checkpoint.neighbour": (True, {}, {"resources": {**ON_SLURM["resources"], "nodes": 2}}),
    "checkpoint.overlap": (True, OPAQUE, {}),
    "checkpoint.staging": ("single", OPAQUE, {}),
    "checkpoint.staging_directory": ("/scratch", {"checkpoint": {"staging": "single"}}, {}),
    "checkpoint.write_limit": ("200MB", OPAQUE, {}),
    "supervision.notices_url": (
        "http://169.254.169.254",
        {"supervision": {"notices": "off"}},
        {},
    ),
    "supervision.join_timeout_s": (60, {}, ON_SLURM),
    "supervision.pending_timeout_min": (60, {}, ON_SLURM),
    "supervision.standby_after_s": (9, {"supervision": {"restarts_in_place": 0}}, {}),
    "supervision.hangs": (True, OPAQUE, {}),
    "supervision.silence_s": ({"train": 60}, {"supervision": {"hangs": False}}, {}),
    "supervision.numerics.on_nan": ("stop", OPAQUE, {}),
    "supervision.numerics.on_spike": ("warn", OPAQUE, {}),
    "supervision.numerics.metric": ("loss", OPAQUE, {}),
    "supervision.numerics.window": (50, OPAQUE, {}),
    "supervision.numerics.spike_mads": (9, OPAQUE, {}),
    "supervision.numerics.margin_steps": (5, {}, ROLLBACK),
    "supervision.numerics.skip_steps": (5, {}, ROLLBACK),
    "supervision.numerics.changes_max": (2, {}, ROLLBACK),
    "supervision.budgets": ({"hang": 2}, ONCE, {}),
    "supervision.backoff_s": (5, ONCE, {}),
    "health.after": (["true"], {"supervision": {"restarts_in_place": 0}}, {}),
    "health.timeout_s": (5, {}, {"health": {"before": ["true"]}}),
    "health.slowdown": ("ask", {}, {"resources": {**ON_SLURM["resources"], "nodes": 2}}),
    "health.gpus": ("exclude", {"resources": {"gpus_per_node": 0, "nproc_per_node": 2}}, {}),
    "health.throttled_s_max": (60, {"health": {"gpus": "off"}}, {}),
    "health.link_errors_max": (100, {"health": {"gpus": "off"}}, {}),
    "cost.currency": ("EUR", {}, {"cost": {"gpu_hour": 2}}),
    "alerts.on": (["failed"], {}, {"alerts": {"targets": {"ops": SECRET}}}),
}

# Other tables, and parts of the message that refuses them.
REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # A fallback that Slurm could not be asked for is found before the run waits for it.
    (
        {"resources": {"executor": "slurm", "gres": "gpu:4", "fallbacks": [{"gpu_type": "a100"}]}},
        ["resources.fallbacks[0]", "a100", "resources.gres 'gpu:4'"],
    ),
    (
        {
            "resources": {
                "executor": "slurm",
                "gpus_per_node": 0,
                "nproc_per_node": 2,
                "fallbacks": [*ELSEWHERE, {"gpu_type": "a100"}],
            }
        },
        ["resources.fallbacks[1]", "a100", "gpus_per_node 0"],
    ),
    (
        {
            "resources": {
                "executor": "slurm",
                "partition": "spot",
                "fallbacks": [{"partition": "spot"}],
            }
        },
        ["resources.fallbacks[0]", "the same place as the first choice"],
    ),
    (
        {"resources": {"executor": "slurm", "fallbacks": [*ELSEWHERE, {"partition": "prod"}]}},
        ["resources.fallbacks[1]", "the same place as resources.fallbacks[0]"],
    ),
    (
        {**ONCE, "resources": {"executor": "slurm", "fallbacks": ELSEWHERE}},
        ["resources.fallbacks", "supervision.attempts_max = 1"],
    ),
    (
        {"resources": {"executor": "slurm", "nodes": 2, "spare_nodes": 1, "standby": "expedite"}},
        ["resources.spare_nodes 1", "'expedite'", "set standby to 'successor' or 'auto'"],
    ),
    (
        {**ONCE, "resources": {"executor": "slurm", "standby": "successor"}},
        ["resources.standby 'successor'", "supervision.attempts_max = 1"],
    ),
    (
        {
            "supervision": {"attempts_max": 2},
            "resources": {"executor": "slurm", "fallbacks": [*ELSEWHERE, {"partition": "big"}]},
        },
        ["supervision.attempts_max 2", "set attempts_max to 3 or more"],
    ),
    (
        {"resources": {"time_limit_min": 2}, "supervision": {"grace_s": 120}},
        ["supervision.grace_s 120", "resources.time_limit_min 2", "before its first step"],
    ),
    (
        {
            "resources": {"executor": "slurm", "time_limit_min": 2},
            "supervision": {"join_timeout_s": 150},
        },
        ["supervision.join_timeout_s 150", "resources.time_limit_min 2"],
    ),
    (
        {
            "resources": {"executor": "slurm", "time_limit_min": 60, "gpus_per_node": 4},
            "elastic": {"min_gpus": 1, "grow": True, "grow_after_s": 7200},
        },
        ["elastic.grow_after_s 7200", "resources.time_limit_min 60"],
    ),
    (
        {"supervision": {"grace_s": 120, "flush_timeout_s": 60}},
        ["supervision.grace_s 120", "supervision.flush_timeout_s 60"],
    ),
    ({**ON_SLURM, "elastic": {"grow": True}}, ["elastic.grow", "fewer than 4 GPUs"]),
    (
        {**ON_SLURM, "elastic": {"grow": True, "choices": [2]}},
        ["elastic.grow", "fewer than 2 GPUs"],
    ),
    (
        {**ON_SLURM, "elastic": {"choices": [2, 4], "on_preemption": [1]}},
        ["elastic.on_preemption 1", "elastic.choices [2, 4]"],
    ),
    (
        {**ON_SLURM, "elastic": {"choices": [2, 4], "min_gpus": 1}},
        ["elastic.min_gpus 1", "elastic.choices [2, 4]", "allows no other; leave one of them out"],
    ),
    (
        {**ON_SLURM, "elastic": {"choices": [2, 4], "max_gpus": 8}},
        ["elastic.max_gpus 8", "elastic.choices [2, 4]"],
    ),
    ({"supervision": {"budgets": {"operator": 3}}}, ["supervision.budgets.operator"]),
    (
        {"checkpoint": {"interval": 50, "snapshots": 100}},
        ["checkpoint.snapshots 100", "checkpoint.interval 50"],
    ),
    (
        {"checkpoint": {"mirror": "file://elsewhere/copies"}},
        ["checkpoint.mirror", "'elsewhere' has no effect", "'file:///copies'"],
    ),
    (
        {"checkpoint": {"mirror": "s3:///bucket/copies"}},
        ["checkpoint.mirror 's3:///bucket/copies'", "names no bucket", "'s3://bucket/copies'"],
    ),
    (
        {"launch": {"python": "./venv/bin/python", "wrapper": ["apptainer", "exec", "x.sif"]}},
        ["launch.python './venv/bin/python'", "launch.wrapper"],
    ),
    ({"environment": {"LOCAL_WORLD_SIZE": "2"}}, ["environment.LOCAL_WORLD_SIZE: torchrun sets"]),
    ({"environment": {"MASTER_ADDR": SECRET}}, ["environment.MASTER_ADDR: torchrun sets"]),
    (
        {**WITHOUT_TORCHRUN, "environment": {"NODE_RANK": "1"}},
        ["environment.NODE_RANK: the node's agent sets"],
    ),
]

# What is near a refused table, and has an effect or asks for nothing.
ACCEPTED: list[dict[str, Any]] = [
    {},
    {"resources": {"partition": None, "extra": {}, "fallbacks": []}, "elastic": {"grow": False}},
    {**OPAQUE, "checkpoint": {"snapshots": "off"}, "supervision": {"hangs": False}},
    {"resources": {"time_limit_min": 3}, "supervision": {"grace_s": 120}},
    # Not written: the default of 300 s for the nodes to meet.
    {"resources": {"executor": "slurm", "time_limit_min": 2}},
    {**ON_SLURM, "elastic": {"choices": [2], "min_gpus": 2, "max_gpus": 4, "on_preemption": [2]}},
    {"checkpoint": {"interval": 50, "snapshots": 30, "mirror": "file:///copies"}},
    # Without torchrun, nobody sets a rank. With it, nobody sets the number of nodes.
    {**WITHOUT_TORCHRUN, "environment": {"RANK": "0", "WORLD_SIZE": "1"}},
    {"environment": {"NNODES": "2", "TORCHELASTIC_HEALTH_CHECK_PORT": "8080"}},
    # The timeout applies at the last place, so these do not contradict each other.
    {
        "resources": {"executor": "slurm", "fallbacks": [{"partition": "prod", "after_min": 30}]},
        "supervision": {"pending_timeout_min": 10, "attempts_max": 2},
    },
]


def merged(*tables: dict[str, Any]) -> dict[str, Any]:
    """The tables together, deeply."""
    found: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = merged(found[key], value) if both else value
    return found


def with_key(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    table: dict[str, Any] = value
    return table


def problems_of(table: dict[str, Any]) -> list[str]:
    try:
        load_spec({"name": "kelp", "command": ["train.py"], **table})
    except SpecError as error:
        return list(error.problems)
    return []


def test_every_key_says_where_it_acts() -> None:
    assert set(ACTS) == spec_keys(RunSpec)
    assert set(KEYS) == {key for key, scopes in ACTS.items() if scopes}


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_key_that_cannot_act_is_refused_by_its_name(key: str) -> None:
    value, without, condition = KEYS[key]
    table = merged(without, with_key(key, value))
    assert [one for one in problems_of(table) if one.startswith(f"{key} ")], problems_of(table)
    acts = merged(condition, with_key(key, value))
    assert problems_of(acts) == []


@pytest.mark.parametrize(("table", "parts"), REFUSED)
def test_keys_that_contradict_each_other_are_refused(
    table: dict[str, Any], parts: list[str]
) -> None:
    (problem,) = problems_of(table)
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize("table", ACCEPTED)
def test_what_has_an_effect_or_asks_for_nothing_is_accepted(table: dict[str, Any]) -> None:
    assert problems_of(table) == []


@pytest.mark.parametrize("table", [{}, OPAQUE, ON_SLURM, ONCE])
def test_a_table_with_all_its_defaults_counts_as_unwritten(table: dict[str, Any]) -> None:
    spec = spec_of(**table)
    assert load_spec(spec.model_dump(mode="json")).resources == spec.resources


def test_submit_names_every_problem_and_queues_nothing(call: Call, tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(
        'name = "kelp"\ncommand = ["train.py"]\n[resources]\npartition = "gpu"\nqos = "high"\n'
        'time_limit_min = 1\n[supervision]\ngrace_s = 90\n[checkpoint]\nmirror = "file://h/x"\n'
    )
    for more in ([], ["--dry-run"]):
        refused = call("submit", spec, *more, "--root", tmp_path / "root")
        assert refused.status == 2
        assert "4 problems; nothing was queued" in refused.err
        for words in ("resources.partition 'gpu'", "resources.qos 'high'", "grace_s 90", "'h'"):
            assert words in refused.err
    assert not (tmp_path / "root").exists()
    (tmp_path / "train.py").touch()
    fixed = ["resources.executor=slurm", "supervision.grace_s=30", "checkpoint.mirror=file:///x"]
    shown = call("submit", spec, "--dry-run", *[w for f in fixed for w in ("--set", f)])
    assert json.loads(shown.out)["scheduler"]["partition"] == "gpu", shown.err


def test_a_relative_python_starts_at_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    table = {"name": "kelp", "command": ["train.py"]}
    launch = {"working_directory": "code", "python": "./venv/bin/python"}
    spec = load_spec({**table, "launch": launch}, base=tmp_path)
    assert spec.launch.python == str(tmp_path / "code/venv/bin/python")
    named = load_spec({**table, "launch": {**launch, "python": "python3"}}, base=tmp_path)
    assert named.launch.python == "python3"
    inside = {**launch, "container": ["--container-image=x"]}
    with pytest.raises(SpecError, match=r"launch\.python"):
        load_spec({**table, **ON_SLURM, "launch": inside}, base=tmp_path)


def test_a_relative_wrapper_starts_at_the_working_directory(tmp_path: Path) -> None:
    launch = {"working_directory": "code", "wrapper": ["./bind.sh", "--near", "./gpu"]}
    table = {"name": "kelp", "command": ["train.py"]}
    spec = load_spec({**table, "launch": launch}, base=tmp_path)
    assert spec.launch.wrapper == (str(tmp_path / "code/bind.sh"), "--near", "./gpu")
    named = load_spec({**table, "launch": {**launch, "wrapper": ["numactl"]}}, base=tmp_path)
    assert named.launch.wrapper == ("numactl",)
    # In a container, it is a path of the image.
    inside = {**launch, "container": ["--container-image=x"]}
    kept = load_spec({**table, **ON_SLURM, "launch": inside}, base=tmp_path)
    assert kept.launch.wrapper[0] == "./bind.sh"
