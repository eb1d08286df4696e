"""Every captured ending, judged without and with evidence beyond torchrun's exit and the logs.

The evidence: faults and wear that GPUs count, the error files of the ranks, and the way of repeated
crashes. `test_hangs.py` does the same with flight records.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.endings.endings import CRASHES, JOBS, Crash, JobEnding
from tests.endings.records import FOLDER, read_record
from tests.endings.test_endings import ending_of_crash, ending_of_job
from tests.endings.variants import VARIANTS, VARIANTS_FOLDER

from holdfast.contracts.disk.journal import JournalWriter
from holdfast.contracts.spec.sections import Health
from holdfast.contracts.states import Cause
from holdfast.workers.agent.health.gpus import GpuJudge
from holdfast.workers.agent.node import CrashReport, NodeReport
from holdfast.workers.decisions.blame import crash_facts
from holdfast.workers.decisions.gpu_faults import GpuFinding

FAULTS = (
    GpuFinding(gpu=3, kind="xid-79", text="GPU 3: Xid 79", is_fault=True),
    GpuFinding(gpu=3, kind="nvlink-down", text="GPU 3: 1 NVLink went down", is_fault=True),
)
# These slow a node down, and end nothing.
WEAR = (
    GpuFinding(gpu=3, kind="heat", text="GPU 3: heat", is_fault=False),
    GpuFinding(gpu=3, kind="nvlink", text="GPU 3: 90 new NVLink errors", is_fault=False),
)
# Causes that a fault of a GPU replaces. Memory, storage and bad losses have records of their own.
REPLACED = {Cause.INFRASTRUCTURE, Cause.UNKNOWN, Cause.HANG}
# What the rank's standard error alone shows of the crashes whose cause depends on its error file.
# The records of GPUs are written without standard error, so nothing is left of them.
WITHOUT_ERROR_FILES = dict.fromkeys(
    (
        *("gpu_oom", "gpu_oom_of_driver", "gpu_oom_of_library", "gpu_illegal_access"),
        *("gpu_ecc", "gpu_missing", "gpu_busy", "nccl_system_error", "task_lost_its_server"),
    ),
    Cause.USER_ERROR,
)
EVERY_CRASH = [(one, FOLDER) for one in CRASHES] + [(one, VARIANTS_FOLDER) for one in VARIANTS]
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


@pytest.mark.parametrize(
    ("crash", "captures"), EVERY_CRASH, ids=lambda one: getattr(one, "name", "")
)
def test_a_fault_of_a_gpu_replaces_only_causes_that_it_explains(
    tmp_path: Path, crash: Crash, captures: Path
) -> None:
    ending, _ = ending_of_crash(crash.name, captures)
    for nothing in ((), *((one,) for one in WEAR), WEAR):
        assert judge_with(tmp_path, *nothing).explain(ending, 2) == ending
    for fault in FAULTS:
        explained = judge_with(tmp_path, *WEAR, fault).explain(ending, 2)
        if ending.cause in REPLACED:
            assert explained.cause is Cause.NODE_FAILURE
            assert explained.evidence[0] == f"n2 is unhealthy: gpus: {fault.text}"
            assert explained.evidence[1:] == ending.evidence, "what the ranks said must stay"
        else:
            assert explained == ending


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_fault_of_a_gpu_replaces_no_record_of_the_scheduler_or_an_operator(
    tmp_path: Path, job: JobEnding
) -> None:
    ending = ending_of_job(job.name)
    explained = judge_with(tmp_path, *FAULTS).explain(ending, 2)
    assert (explained.cause is Cause.NODE_FAILURE) is (job.cause in {*REPLACED, Cause.NODE_FAILURE})
    if job.cause not in REPLACED:
        assert explained == ending


def test_the_error_files_of_ranks_correct_some_causes_and_spoil_none() -> None:
    changed = {}
    for crash, captures in EVERY_CRASH:
        report = CrashReport.from_json(read_record(crash.name, captures)["inputs"])
        with_files, _ = report.classify()
        bare = [replace(one, traceback="", timestamp=0.0) for one in report.failures]
        without, _ = replace(report, failures=bare).classify()
        if without.cause is not with_files.cause:
            changed[crash.name] = without.cause
            assert with_files.cause is crash.cause
    assert changed == WITHOUT_ERROR_FILES


@pytest.mark.parametrize("crash", CRASHES, ids=lambda crash: crash.name)
def test_only_crashes_of_the_program_can_blame_a_checkpoint(crash: Crash) -> None:
    ending, first = ending_of_crash(crash.name)
    facts = crash_facts(ending, first, 5)
    may_blame = crash.cause in {Cause.USER_ERROR, Cause.UNKNOWN}
    assert ("crash" in facts) is (may_blame and crash.name not in WITHOUT_A_WAY)
    assert facts == crash_facts(ending, first, 5), "two such crashes are the same"
