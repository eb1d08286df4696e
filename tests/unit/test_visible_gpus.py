"""The GPUs that a local job may use, from the submitter's `CUDA_VISIBLE_DEVICES`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import record_of, spec_of

from holdfast.contracts.errors import PreflightError, SpecError
from holdfast.workers.executors.local_launch import _gpus_of
from holdfast.workers.nodes import visible_gpus
from holdfast.workers.runs import preflight
from holdfast.workers.runs.request import build_request

UUIDS = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1d6c7a2e"
INSTANCES = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0,MIG-41b36fb4-36c6-5a7b-9e1b-3f4a"


def request_of(gpus: int, **fields: object) -> dict[str, Any]:
    spec = spec_of(resources={"gpus_per_node": gpus}, **fields)
    request = build_request(record_of(spec), spec, attempt=1, gpus=gpus, reason="test")
    return request.model_dump(mode="json")


@pytest.fixture(autouse=True)
def machine_with_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    control = tmp_path / "nvidiactl"
    control.touch()
    monkeypatch.setattr(visible_gpus, "CONTROL", control)
    return control


@pytest.mark.parametrize(
    ("given", "gpus", "names"),
    [
        (UUIDS, 2, UUIDS.split(",")),
        (INSTANCES, 2, INSTANCES.split(",")),
        (INSTANCES, 1, INSTANCES.split(",")),
        (" 3, 5 ", 2, ["3", "5"]),
        ("7,4,-1,6", 2, ["7", "4"]),
    ],
)
def test_a_job_gets_the_named_gpus(
    monkeypatch: pytest.MonkeyPatch, given: str, gpus: int, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert _gpus_of(request_of(gpus)) == {"visible_gpus": tuple(names)}


def test_without_the_variable_submitit_counts_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _gpus_of(request_of(2)) == {}


@pytest.mark.parametrize("given", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_stay_hidden(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert _gpus_of(request_of(2)) == {"gpus_per_node": 0}


@pytest.mark.parametrize("given", ["3", "GPU-8932f937", "3,-1,4", "3,cuda:4"])
def test_more_gpus_than_are_visible_are_refused(
    monkeypatch: pytest.MonkeyPatch, machine_with_gpus: Path, given: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    with pytest.raises(SpecError, match=f"{given} makes 1 of this machine's GPUs visible.* 2"):
        _gpus_of(request_of(2))
    machine_with_gpus.unlink()
    assert _gpus_of(request_of(2)) == {"visible_gpus": (given.split(",")[0],)}


def test_the_specs_environment_counts_before_the_submitters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    request = request_of(2, environment={"CUDA_VISIBLE_DEVICES": "4,5"})
    assert _gpus_of(request) == {"visible_gpus": ("4", "5")}


def test_preflight_refuses_more_gpus_than_are_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    (tmp_path / "t.py").touch()
    fields = {"launch": {"working_directory": str(tmp_path)}}
    with pytest.raises(PreflightError, match=r"CUDA_VISIBLE_DEVICES=3 makes 1 .* needs 2"):
        preflight.check(spec_of(resources={"gpus_per_node": 2}, **fields), tmp_path / "root")
    preflight.check(spec_of(resources={"gpus_per_node": 1}, **fields), tmp_path / "root")
