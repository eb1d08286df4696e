"""Every captured crash, judged without and with the evidence of GPUs and of repeated crashes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.endings.endings import CRASHES, Crash
from tests.endings.test_endings import ending_of_crash

from holdfast.contracts.disk.journal import JournalWriter
from holdfast.contracts.spec.sections import Health
from holdfast.contracts.states import Cause
from holdfast.workers.agent.health.gpus import GpuJudge
from holdfast.workers.agent.node import NodeReport
from holdfast.workers.decisions.blame import crash_facts
from holdfast.workers.decisions.gpu_faults import GpuFinding

FAULT = GpuFinding(gpu=3, kind="xid-79", text="GPU 3: Xid 79", is_fault=True)
HEAT = GpuFinding(gpu=3, kind="heat", text="GPU 3: heat", is_fault=False)
# Causes that a fault of a GPU replaces. Memory, storage and bad losses have records of their own.
REPLACED = {Cause.INFRASTRUCTURE, Cause.UNKNOWN, Cause.HANG}
# Of the causes that may blame a checkpoint, these crashes say nothing about the state: they left no
# error to compare, or it is one of files, imports or a helper that was killed.
WITHOUT_A_WAY = {
    *("bus_error", "exit_code", "bad_argument", "program_missing", "torchrun_usage"),
    *("import_error", "missing_file", "permission_denied", "pool_worker_killed"),
}


def judge_with(folder: Path, *found: GpuFinding) -> GpuJudge:
    blank: dict[str, Any] = {"registered": 1, "alive": 0, "completed": 5, "resumed": 0}
    reports = {
        host: NodeReport(exit_code=1, phases=("TRAIN",), gpus=gpus, **blank)
        for host, gpus in {"n1": (), "n2": found}.items()
    }
    judge = GpuJudge(Health(), 1, JournalWriter(folder / "node.jsonl"))
    judge.look(reports)
    return judge


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: crash.name)
def test_a_fault_of_a_gpu_replaces_only_causes_that_it_explains(
    tmp_path: Path, crash: Crash
) -> None:
    ending, _ = ending_of_crash(crash.name)
    for nothing in (judge_with(tmp_path), judge_with(tmp_path, HEAT)):
        assert nothing.explain(ending, 2) == ending
        assert nothing.explain(ending, 2).cause is crash.cause
    explained = judge_with(tmp_path, FAULT).explain(ending, 2)
    if crash.cause in REPLACED:
        assert explained.cause is Cause.NODE_FAILURE
        assert explained.evidence[0] == "n2 is unhealthy: gpus: GPU 3: Xid 79"
        assert explained.evidence[1:] == ending.evidence, "what the ranks said must stay"
    else:
        assert explained == ending


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: crash.name)
def test_only_crashes_of_the_program_can_blame_a_checkpoint(crash: Crash) -> None:
    ending, first = ending_of_crash(crash.name)
    facts = crash_facts(ending, first, 5)
    may_blame = crash.cause in {Cause.USER_ERROR, Cause.UNKNOWN}
    assert ("crash" in facts) is (may_blame and crash.name not in WITHOUT_A_WAY)
    assert facts == crash_facts(ending, first, 5), "two such crashes are the same"
