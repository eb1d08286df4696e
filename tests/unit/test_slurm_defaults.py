"""Warnings about the CPUs and the memory that a spec leaves to Slurm's defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import spec_of

from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers.slurm_defaults import default_warnings, warnings_of_defaults

# Lines of `scontrol show config` and `scontrol -o show partition`, as Slurm 24.11 prints them.
CONFIG = """Configuration data as of 2026-01-01T00:00:00
AccountingStorageEnforce = associations,limits,qos
DefMemPerNode           = UNLIMITED
JobDefaults             = (null)
PreemptType             = preempt/partition_prio
PreemptExemptTime       = 00:00:00
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
"""
PARTITION = (
    "PartitionName=gpu AllowGroups=ALL Default=YES OverSubscribe=NO JobDefaults=(null) "
    "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
    "TRES=cpu=256,mem=4000G,node=4,billing=256,gres/gpu=32"
)
GPUS = {"executor": "slurm", "nodes": 2, "gpus_per_node": 4}


def settings(changes: dict[str, str] | None = None) -> dict[str, str]:
    return {**slurm_client.settings(ask=lambda _: CONFIG), **(changes or {})}


def partition(**changes: str) -> dict[str, str]:
    return {**slurm_client.parse_fields(PARTITION), **changes}


def warned(
    resources: dict[str, Any] | None = None,
    changes: dict[str, str] | None = None,
    **fields: str,
) -> list[str]:
    spec = spec_of(resources={**GPUS, **(resources or {})})
    return default_warnings(spec, settings(changes), [partition(**fields)])


def test_one_cpu_for_all_ranks_of_a_node_is_warned_about() -> None:
    (text,) = warned()
    assert text == (
        "partition gpu gives this job 1 CPU on a node for 4 ranks, because the spec leaves it to "
        "Slurm's default: set resources.cpus_per_gpu; the partition has 8 CPUs for each GPU"
    )


@pytest.mark.parametrize(
    ("resources", "changes", "fields", "cpus"),
    [
        ({"cpus_per_gpu": 1}, {}, {}, None),
        ({}, {"JobDefaults": "DefCpuPerGPU=2"}, {}, None),
        ({}, {"JobDefaults": "DefCpuPerGPU=8"}, {"JobDefaults": "DefCpuPerGPU=1"}, "4 CPUs"),
        ({"nproc_per_node": 8}, {"JobDefaults": "DefCpuPerGPU=2"}, {}, "8 CPUs on a node for 8"),
        ({"nproc_per_node": 1}, {}, {}, "1 CPU on a node for 1 rank,"),
        ({"gpus_per_node": 0, "nproc_per_node": 4}, {}, {}, None),
        ({"gres": "none"}, {}, {}, None),
        ({"extra": {"exclusive": True}}, {}, {}, None),
        ({}, {}, {"OverSubscribe": "EXCLUSIVE"}, None),
        ({}, {}, {"Exclusive": "NODE"}, None),
        ({}, {"SelectType": "select/linear"}, {}, None),
        ({"partition": "other"}, {}, {}, None),
        ({"partition": "other,gpu"}, {}, {}, "1 CPU"),
    ],
)
def test_cpus_by_default(
    resources: dict[str, Any],
    changes: dict[str, str],
    fields: dict[str, str],
    cpus: str | None,
) -> None:
    spec = spec_of(resources={**GPUS, **resources})
    if not spec.resources.gpus_on_node:
        assert warnings_of_defaults(spec) == []
        return
    found = warned(resources, changes, **fields)
    assert [line for line in found if "CPU" in line] == found
    assert (cpus is None) == (not found)
    assert all(f"gives this job {cpus}" in line for line in found)


@pytest.mark.parametrize(
    ("resources", "changes", "fields", "memory"),
    [
        ({}, {}, {}, None),
        ({}, {"DefMemPerCPU": "1024"}, {}, "4 GB"),
        ({"cpus_per_gpu": 16}, {"DefMemPerCPU": "1024"}, {}, None),
        ({}, {"DefMemPerCPU": "1024"}, {"DefMemPerCPU": "16G"}, None),
        ({}, {}, {"DefMemPerNode": "2000"}, "1.95 GB"),
        ({}, {}, {"JobDefaults": "DefMemPerGPU=4096"}, "16 GB"),
        ({}, {}, {"JobDefaults": "DefCpuPerGPU=4,DefMemPerGPU=65536"}, None),
        ({"memory_gb_per_node": 1}, {"DefMemPerCPU": "1024"}, {}, None),
        ({"memory_gb_per_cpu": 1}, {"DefMemPerCPU": "1024"}, {}, None),
        ({}, {"DefMemPerCPU": "1024", "SelectTypeParameters": "CR_CORE"}, {}, None),
    ],
)
def test_memory_by_default(
    resources: dict[str, Any],
    changes: dict[str, str],
    fields: dict[str, str],
    memory: str | None,
) -> None:
    cpus = {"cpus_per_gpu": 1, **resources}
    found = [line for line in warned(cpus, changes, **fields) if "memory" in line]
    assert (memory is None) == (not found)
    for line in found:
        assert f"gives this job {memory} of memory on a node for 4 ranks" in line
        assert line.endswith("memory_gb_per_node; its nodes have 1000 GB on average")


def test_slurm_is_asked_and_without_an_answer_there_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = tmp_path / "scontrol"
    answers = f"case \"$*\" in *config*) echo '{CONFIG}';; *) echo '{PARTITION}';; esac"
    command.write_text(f"#!/bin/sh\n{answers}\n")
    command.chmod(0o755)
    (text,) = warnings_of_defaults(spec_of(resources=GPUS))
    assert "1 CPU on a node for 4 ranks" in text
    command.write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    assert warnings_of_defaults(spec_of(resources=GPUS)) == []
    assert warnings_of_defaults(spec_of()) == []


def test_settings_are_read_by_their_whole_name() -> None:
    assert settings()["PreemptType"] == "preempt/partition_prio"
    assert slurm_client.enforces_qos(lambda _: CONFIG)


BY_AGE = {"PriorityType": "priority/multifactor", "PriorityWeightAge": "1000"}


@pytest.mark.parametrize(
    ("standby", "changes", "is_warned"),
    [
        ("successor", BY_AGE, True),
        ("none", BY_AGE, False),
        # Slurm's version is unknown here, so a successor would wait.
        ("auto", BY_AGE, True),
        ("expedite", BY_AGE, False),
        ("successor", {**BY_AGE, "PriorityWeightAge": "0"}, False),
        ("successor", {**BY_AGE, "PriorityFlags": "ACCRUE_ALWAYS,MAX_TRES"}, False),
        ("successor", {"PriorityType": "priority/basic"}, False),
    ],
)
def test_a_successor_without_priority_by_age_is_warned_about(
    standby: str, changes: dict[str, str], is_warned: bool
) -> None:
    found = warned({"standby": standby, "cpus_per_gpu": 8, "memory_gb_per_node": 64}, changes)
    assert [text.partition(":")[0] for text in found] == ["resources.standby"] * is_warned
