"""`RunSpec`: what is accepted, what is refused, and stable digests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from holdfast.contracts.disk.digests import canonical_json, command_digest, document_digest
from holdfast.contracts.spec.checkpoint import Checkpointing
from holdfast.contracts.spec.resources import NodeShare, Resources, share_of
from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.contracts.spec.sections import Launch


def make_spec(**changes: Any) -> RunSpec:
    return RunSpec.model_validate({"name": "run", "command": ["train.py"], **changes})


@pytest.mark.parametrize(
    ("interval", "steps", "seconds"),
    [
        ("auto", None, None),
        (50, 50, None),
        ("300s", None, 300.0),
        ("1.5m", None, 90.0),
        ("2 h", None, 7200.0),
    ],
)
def test_intervals_are_steps_or_seconds(
    interval: int | str, steps: int | None, seconds: float | None
) -> None:
    checkpoint = Checkpointing(interval=interval)
    assert (checkpoint.interval_steps, checkpoint.interval_s) == (steps, seconds)


@pytest.mark.parametrize(
    "interval", [0, -1, "0s", "0.0m", "often", "50", "5 days", True, 1.5, None]
)
def test_invalid_intervals_are_refused(interval: Any) -> None:
    with pytest.raises(ValidationError):
        Checkpointing(interval=interval)


@pytest.mark.parametrize(
    ("gpus", "per_node", "expected"),
    [(1, 8, (1, 1)), (8, 8, (1, 8)), (16, 8, (2, 8)), (3, 4, (1, 3)), (12, 4, (3, 4))],
)
def test_gpus_are_split_into_whole_nodes(
    gpus: int, per_node: int, expected: tuple[int, int]
) -> None:
    nodes, each = expected
    assert share_of(gpus, per_node) == NodeShare(nodes, each, each)


@given(gpus=st.integers(1, 4096), per_node=st.integers(1, 16))
def test_a_split_uses_all_gpus_or_is_refused(gpus: int, per_node: int) -> None:
    if gpus > per_node and gpus % per_node:
        with pytest.raises(ValueError, match="do not fill nodes"):
            share_of(gpus, per_node)
    else:
        nodes, each, ranks = share_of(gpus, per_node)
        assert nodes * each == gpus
        assert 1 <= each == ranks <= per_node


SLURM = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "expected up to 100 letters"),
        ({"name": "a.r2"}, "expected up to 100 letters"),
        ({"name": "../etc"}, "expected up to 100 letters"),
        ({"name": "n" * 101}, "expected up to 100 letters"),
        ({"command": []}, "at least 1 item"),
        ({"comand": ["x"]}, "Extra inputs are not permitted"),
        ({"resources": {"nodes": 2}}, "the local executor has one node"),
        ({"resources": {"nodes": 0}}, "greater than or equal to 1"),
        ({"resources": {"executor": "pbs"}}, "'local' or 'slurm'"),
        ({"resources": SLURM, "elastic": {"choices": [6]}}, "do not fill nodes"),
        ({"resources": SLURM, "elastic": {"max_gpus": 4}}, "min_gpus 8 is above"),
        (
            {"resources": SLURM, "elastic": {"min_gpus": 4, "max_gpus": 8, "choices": [12]}},
            "12 GPUs: outside elastic 4 to 8",
        ),
        ({"elastic": {"min_gpus": 4, "max_gpus": 2}}, "is above elastic.max_gpus"),
        ({"environment": {"1BAD": "x"}}, "expected names such as"),
        ({"checkpoint": {"keep": {"last": 0}}}, "greater than or equal to 1"),
        ({"supervision": {"budgets": {"bad_luck": 1}}}, "budgets"),
        ({"cost": {"gpu_hour": -1}}, "greater than or equal to 0"),
    ],
)
def test_invalid_specs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_spec(**changes)


@pytest.mark.parametrize("key", ["container", "srun"])
def test_arguments_of_srun_are_refused_on_the_local_executor(key: str) -> None:
    launch = {key: ["--container-image=x"]}
    with pytest.raises(
        ValidationError, match=rf"launch\.{key} .*the local executor starts no srun"
    ):
        make_spec(launch=launch)
    assert make_spec(launch=launch, resources=SLURM).launch.model_dump()[key]
    recorded = {**make_spec().model_dump(mode="json"), "launch": launch}
    assert RunSpec.read(recorded).launch.model_dump()[key], "a recorded run stays readable"


def test_sizes_follow_from_resources_and_elastic() -> None:
    spec = make_spec(resources=SLURM, elastic={"on_preemption": [4], "choices": [4, 8, 16]})
    assert (spec.gpus, spec.gpus_min, spec.gpus_max) == (8, 4, 16)
    assert (make_spec().gpus, make_spec().gpus_min, make_spec().gpus_max) == (1, 1, 1)


def test_a_spec_cannot_be_changed_after_construction() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_spec().name = "other"  # type: ignore[misc]


def test_a_digest_is_the_same_after_writing_and_reading() -> None:
    spec = make_spec(config={"b": 1, "a": {"z": 0.5, "y": None}}, environment={"B": "2", "A": "1"})
    again = RunSpec.model_validate_json(spec.model_dump_json())
    turned = make_spec(
        environment={"A": "1", "B": "2"}, config={"a": {"y": None, "z": 0.5}, "b": 1}
    )
    assert spec.digest == again.digest == turned.digest
    assert spec.digest != make_spec(config={"b": 2}).digest


def test_digests_are_the_same_in_every_process() -> None:
    program = (
        "from holdfast.contracts.disk.digests import command_digest;"
        "print(command_digest(['train.py', '--lr', '3e-4'], '/home/me'))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    # A fixed value: if the digest changed, every run of an earlier version would be a new run.
    expected = "bf9c4ffde20bec5a7833342a003ad177f1e47f071da8f8326e87a7dd238c0678"
    assert seen == {expected} == {command_digest(("train.py", "--lr", "3e-4"), "/home/me")}


def test_a_command_digest_depends_on_arguments_and_directory() -> None:
    base = command_digest(["train.py", "a b"], "/home/me")
    assert base != command_digest(["train.py", "a", "b"], "/home/me")
    assert base != command_digest(["train.py", "a b"], "/home/you")


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=5))
def test_equal_documents_have_equal_digests(document: dict[str, int | str]) -> None:
    turned = dict(reversed(document.items()))
    assert canonical_json(document) == canonical_json(turned)
    assert document_digest(document) == document_digest(turned)


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("job-name", "finds its jobs by their name"),
        ("job-na", "finds its jobs by their name"),
        ("gpus-per-node", "resources.gres such as"),
        ("clusters", "on a host of that cluster"),
        ("array", "one run for each member"),
        ("requeue", "only the supervisor relaunches"),
        ("signal", "supervision.grace_s"),
        ("J", "the long name"),
        ("job_name", "the long name"),
        ("--job-name", "the long name"),
    ],
)
def test_an_option_that_holdfast_sets_is_refused_with_advice(option: str, advice: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(advice)):
        Resources(executor="slurm", extra={option: "x"})


@pytest.mark.parametrize("option", ["reservation", "wckey", "nodelist", "begin", "gres-flags"])
def test_other_options_of_sbatch_are_accepted(option: str) -> None:
    assert Resources(executor="slurm", extra={option: "x"}).extra == {option: "x"}


def test_a_heterogeneous_job_is_refused() -> None:
    with pytest.raises(ValidationError, match="does not start heterogeneous jobs"):
        Launch(srun=("--het-group=0",))
