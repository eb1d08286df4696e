"""`holdfast init`: files that start a run here, and what it says of partitions."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.support.cli_calls import Call

from holdfast.contracts.spec.run_spec import RunSpec
from holdfast.workers.schedulers.slurm_defaults import choose_partition, read_partitions

PARTITIONS = [
    {"PartitionName": "prod", "Default": "NO", "MaxTime": "UNLIMITED", "PreemptMode": "OFF"},
    {"PartitionName": "spot", "Default": "NO", "MaxTime": "04:00:00", "PreemptMode": "REQUEUE"},
    {"PartitionName": "cpu", "Default": "NO", "MaxTime": "1-00:00:00"},
]
NODES = [
    {"NodeName": "n1", "Gres": "gpu:h100:8(S:0-1)", "Partitions": "prod,spot"},
    {"NodeName": "n2", "Gres": "gpu:h100:4", "Partitions": "spot"},
    {"NodeName": "n3", "Gres": "(null)", "Partitions": "cpu"},
]


def test_partitions_are_described_by_their_nodes() -> None:
    prod, spot, cpu = read_partitions(PARTITIONS, NODES)
    assert str(prod) == "prod (1 node, 8 h100 GPUs each)"
    assert str(spot) == (
        "spot (2 nodes, 8 h100 GPUs each, at most 240 min, jobs are preempted by REQUEUE)"
    )
    assert str(cpu) == "cpu (1 node, no GPUs, at most 1440 min)"
    assert choose_partition([cpu, spot, prod]) == spot, "the first with most GPUs"
    default, *_ = read_partitions([{**PARTITIONS[2], "Default": "YES"}], NODES)
    assert choose_partition([prod, spot, default]) == default
    assert choose_partition([]) is None


def test_files_of_a_new_project_are_valid_and_never_overwritten(call: Call, tmp_path: Path) -> None:
    place = tmp_path / "my first: run.v2"
    done = call("init", str(place), "--executor", "local", "--json")
    assert done.json["files"] == ["run.toml", "run.schema.json", "train.py", "prefect.yaml"]
    spec = RunSpec.model_validate(tomllib.loads((place / "run.toml").read_text()))
    assert (spec.name, spec.command) == ("my-first-run-v2", ("train.py",))
    compile((place / "train.py").read_text(), "train.py", "exec")
    (deployment,) = yaml.safe_load((place / "prefect.yaml").read_text())["deployments"]
    assert deployment["parameters"]["spec"] == str(place / "run.toml")
    (place / "run.toml").write_text("mine")
    again = call("init", str(place), "--executor", "local")
    assert again.status != 0
    assert "run.toml and run.schema.json and train.py and prefect.yaml exist already" in again.err
    assert (place / "run.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--executor", "kubernetes"], "expected slurm or local"),
        (["--executor", "local", "--partition", "spot"], "the local executor has none"),
        (["--name", "../x"], "expected letters"),
        (["--name", "v1.2"], "expected letters"),
    ],
)
def test_wrong_options_write_nothing(
    call: Call, tmp_path: Path, words: list[str], problem: str
) -> None:
    done = call("init", str(tmp_path / "new"), *words)
    assert done.status != 0
    assert problem in done.err
    assert not (tmp_path / "new").exists()


def test_host_without_a_cluster_is_told_of_the_local_executor(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    # Slurm's commands look for a missing file for a minute, and refuse an empty one at once.
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    done = call("init", str(tmp_path / "new"))
    assert done.status != 0
    assert "give --executor local" in done.err
