"""Queries to Slurm before a run is queued or grown, with answers in the form of Slurm 22.05."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from tests.support.histories import spec_of

from holdfast.contracts.errors import PreflightError
from holdfast.contracts.spec.resources import Resources
from holdfast.workers.runs import preflight
from holdfast.workers.schedulers.slurm import SlurmExecutor

ME: Final = getpass.getuser()
PARTITIONS: Final = (
    "PartitionName=spot AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES "
    "QoS=N/A GraceTime=30 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=n[1-4] "
    "PreemptMode=REQUEUE State=UP TotalCPUs=64 TotalNodes=4 TRES=cpu=64,mem=250G,gres/gpu=16"
)
RESERVATION: Final = (
    "ReservationName=ours StartTime=2026-03-01T16:11:36 EndTime=2026-03-01T17:11:36 "
    "Duration=01:00:00 Nodes=n3 NodeCnt=1 CoreCnt=16 Features=(null) PartitionName=(null) "
    f"Flags=SPEC_NODES TRES=cpu=16 Users={ME} Groups=(null) Accounts=(null) State=ACTIVE"
)
# GrpTRES, MaxTRES and MaxTRESPU.
LIMITS: Final = {
    "low": "gres/gpu=9||",
    "each": "||cpu=40,gres/gpu=5",
    "job": "|gres/gpu=2|",
    "open": "||",
}
JOBS: Final = (
    ("other", "cpu=8,mem=8G,node=1,billing=8,gres/gpu=2"),
    (ME, "cpu=4,mem=4G,node=1,billing=4,gres/gpu=1"),
    ("other", "cpu=4,mem=4G,node=1,billing=4"),
)


def node_line(name: str, state: str, used: int) -> str:
    """A node with four GPUs in the form of `scontrol -o -d show node`."""
    return (
        f"NodeName={name} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUTot=16 CPULoad=0.06 "
        "AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:4 GresDrain=N/A "
        f"GresUsed=gpu:{used} NodeHostName={socket.gethostname()} Version=22.05.8 State={state} "
        "Partitions=spot,prod  CfgTRES=cpu=16,mem=62.50G,billing=16,gres/gpu=4 AllocTRES= "
    )


NODES: Final = "\n".join(
    [
        node_line("n1", "IDLE", 0),
        node_line("n2", "MIXED", 1),
        node_line("n3", "IDLE+RESERVED", 0),
        node_line("n4", "IDLE", 0),
    ]
)


def answers_of(enforce: str, federation: str, accounting: str) -> dict[str, str]:
    """Each query's command line and its answer."""
    limits = "sacctmgr -n -P show qos name={} format=GrpTRES,MaxTRES,MaxTRESPU"
    jobs = "squeue -h -a -t R,CG,CF,S -q {} -O UserName:128,tres-alloc:1024"
    held = "\n".join(f"{user:<128}{tres:<1024}" for user, tres in JOBS)
    return {
        "scontrol --all -o -d show node": NODES,
        "scontrol --all -o show partition": PARTITIONS,
        "scontrol -o show reservation ours": RESERVATION,
        "scontrol show config": f"AccountingStorageEnforce = {enforce}\nPreemptMode = REQUEUE\n"
        f"AccountingStorageType   = {accounting}",
        "scontrol show federation": federation,
        **{limits.format(qos): line for qos, line in LIMITS.items()},
        **{jobs.format(qos): held for qos in LIMITS},
    }


def set_up_slurm(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    enforce: str = "none",
    federation: str = "",
    accounting: str = "accounting_storage/slurmdbd",
    others: Mapping[str, str] | None = None,
) -> None:
    """Put fake Slurm commands first in PATH; they fail for queries without an answer.

    `others` are more queries with their answers, and those that replace the answers above.
    """
    place.mkdir()
    cases, answers = "", {**answers_of(enforce, federation, accounting), **(others or {})}
    for number, (question, answer) in enumerate(answers.items()):
        (place / f"answer-{number}").write_text(f"{answer}\n" if answer else "")
        cases += f"'{question}') cat {place}/answer-{number};;\n"
    refusal = '*) echo "$* not found" >&2; exit 1;;'
    script = f'#!/bin/sh\ncase "${{0##*/}} $*" in\n{cases}{refusal}\nesac\n'
    for name in (*preflight.SLURM_COMMANDS, "sacctmgr"):
        (place / name).write_text(script)
        (place / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("resources", "enforce", "held", "gpus"),
    [
        # n1 and n4 are free, one GPU of n2 is in use, and n3 is reserved.
        ({}, "none", {}, 8),
        ({}, "none", {"n2": 1}, 12),
        ({"extra": {"reservation": "ours"}}, "none", {}, 4),
        ({"extra": {"reservation": "theirs"}}, "none", {}, None),
        ({"qos": "low"}, "associations,limits,qos", {}, 6),
        ({"qos": "low"}, "associations,limits", {"n2": 1}, 7),
        ({"qos": "each"}, "associations,limits,qos", {}, 4),
        ({"qos": "job"}, "associations,limits,qos", {}, 2),
        ({"qos": "open"}, "associations,limits,qos", {}, 8),
        ({"qos": "low"}, "associations", {}, 8),
    ],
)
def test_capacity_respects_nodes_reservation_and_qos(
    resources: dict[str, Any],
    enforce: str,
    held: dict[str, int],
    gpus: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_up_slurm(tmp_path / "slurm", monkeypatch, enforce=enforce)
    asked = Resources(executor="slurm", partition="spot", gpus_per_node=4, **resources)
    assert SlurmExecutor().capacity(asked, held) == gpus


def test_preflight_refuses_a_cluster_in_a_federation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.py").write_text("")
    resources = {"executor": "slurm", "gpus_per_node": 4}
    spec = spec_of(launch={"working_directory": str(tmp_path)}, resources=resources)
    set_up_slurm(tmp_path / "alone", monkeypatch)
    preflight.check(spec, tmp_path / "root")
    federation = (
        "Federation: fed1\n"
        "Self:       here:127.0.0.1:6817 ID:1 FedState:ACTIVE Features:\n"
        "Sibling:    there:10.0.0.2:6817 ID:2 FedState:ACTIVE Features: "
        "PersistConnSend/Recv:Yes/Yes Synced:Yes"
    )
    set_up_slurm(tmp_path / "federated", monkeypatch, federation=federation)
    with pytest.raises(PreflightError, match=r"is in the federation 'fed1'.*outside a federation"):
        preflight.check(spec, tmp_path / "root")


@pytest.mark.parametrize("storage", ["(null)", "accounting_storage/none"])
def test_preflight_refuses_a_cluster_without_records_of_ended_jobs(
    storage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.py").write_text("")
    resources = {"executor": "slurm", "gpus_per_node": 4}
    spec = spec_of(launch={"working_directory": str(tmp_path)}, resources=resources)
    set_up_slurm(tmp_path / "slurm", monkeypatch, accounting=storage)
    with pytest.raises(PreflightError, match=r"keeps no records of ended jobs .*run slurmdbd") as e:
        preflight.check(spec, tmp_path / "root")
    assert f"AccountingStorageType = {storage}" in str(e.value)


def test_preflight_refuses_a_root_whose_path_slurm_would_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.py").write_text("")
    resources = {"executor": "slurm", "gpus_per_node": 4}
    spec = spec_of(launch={"working_directory": str(tmp_path)}, resources=resources)
    set_up_slurm(tmp_path / "slurm", monkeypatch)
    with pytest.raises(PreflightError, match=r"/%j/runs: it contains %.*--root"):
        preflight.check(spec, tmp_path / "%j" / "runs")
