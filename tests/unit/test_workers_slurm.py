"""Slurm's words, times and lists as captured from real clusters."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError
from holdfast.contracts.spec import Resources
from holdfast.contracts.states import AttemptState
from holdfast.workers import slurm_client
from holdfast.workers.executors.slurm import _free_gpus, ranks_that_fit
from holdfast.workers.slurm_states import SLURM_STATES, bare_word, translate

# `squeue --helpstate` of 24.11 and, for the words it leaves out, slurm.h's base states and flags.
HELPSTATE = """
BF   BOOT_FAIL          CA   CANCELLED         CD   COMPLETED         CF   CONFIGURING
CG   COMPLETING         DL   DEADLINE          F    FAILED            LF   LAUNCH_FAILED
NF   NODE_FAIL          OOM  OUT_OF_MEMORY     PD   PENDING           PO   POWER_UP_NODE
PR   PREEMPTED          R    RUNNING           RD   RESV_DEL_HOLD     RF   REQUEUE_FED
RFL  RECONFIG_FAIL      RH   REQUEUE_HOLD      RQ   REQUEUED          RS   RESIZING
RV   REVOKED            S    SUSPENDED         SE   SPECIAL_EXIT      SI   SIGNALING
SO   STAGE_OUT          ST   STOPPED           TO   TIMEOUT           UD   UPDATE_DB
EX   EXPEDITING
"""
WORDS = HELPSTATE.split()[1::2]


@pytest.mark.parametrize("word", WORDS)
def test_no_word_of_slurm_is_missing(word: str) -> None:
    assert translate(word) in set(AttemptState)


def test_the_mapping_has_no_word_that_slurm_has_not() -> None:
    assert set(SLURM_STATES) == set(WORDS)


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CANCELLED by 1000", AttemptState.CANCELLED),
        ("NODE_FAIL+", AttemptState.NODE_FAILED),
        ("COMPLETING*", AttemptState.STOPPING),
        ("SOMETHING_NEW", None),
        ("", None),
    ],
)
def test_what_slurm_adds_to_its_words(word: str, state: AttemptState | None) -> None:
    assert translate(word) is state


def test_terminal_words_are_terminal_and_no_others() -> None:
    ended = {word for word in WORDS if (translate(word) or AttemptState.CREATED).is_terminal}
    assert ended == {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
        "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }  # fmt: skip
    assert bare_word("CANCELLED by 0") == "CANCELLED"


SHOW_JOB = (
    "JobId=12 JobName=holdfast-gpt-0a1b2c3d-a0001 UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Priority=1 Nice=0 Account=root QOS=normal JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:08 TimeLimit=UNLIMITED "
    "TimeMin=N/A StartTime=2026-03-01T10:00:00 EndTime=Unknown PreemptTime=None NodeList=n[1-2] "
    "NumNodes=2 TRES=cpu=2,node=2,billing=2,gres/gpu=8 Command=/a b/x.sh WorkDir=/a b"
)


def test_fields_of_a_job() -> None:
    fields = slurm_client.parse_fields(SHOW_JOB)
    assert fields["JobState"] == "RUNNING"
    assert fields["NodeList"] == "n[1-2]"
    assert fields["Command"] == "/a b/x.sh"
    assert fields["WorkDir"] == "/a b"
    assert fields["TRES"] == "cpu=2,node=2,billing=2,gres/gpu=8"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ("n1",)),
        ("n[1-3]", ("n1", "n2", "n3")),
        ("gpu[008-010,12],login1", ("gpu008", "gpu009", "gpu010", "gpu12", "login1")),
        ("r[1-2]c[1-2]", ("r1c1", "r1c2", "r2c1", "r2c2")),
        ("(null)", ()),
        ("", ()),
    ],
)
def test_host_lists(text: str, hosts: tuple[str, ...]) -> None:
    assert slurm_client.expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30:00", 30), ("1-00:00:00", 1440), ("02:30:00", 150), ("90", 90), ("UNLIMITED", None)],
)
def test_durations(text: str, minutes: float | None) -> None:
    assert slurm_client.parse_minutes(text) == minutes


@pytest.mark.parametrize(
    ("text", "gpus"), [("gpu:4", 4), ("gpu:a100:8(S:0-1),shard:16", 8), ("(null)", 0), ("", 0)]
)
def test_gpus_of_a_gres_string(text: str, gpus: int) -> None:
    assert slurm_client.gpus_of(text) == gpus


@pytest.mark.parametrize(
    ("fields", "free"),
    [
        ({}, 3),
        ({"State": "DOWN+NOT_RESPONDING"}, 0),
        ({"State": "IDLE+DRAIN"}, 0),
        ({"Partitions": "prod"}, 0),
        ({"GresUsed": "gpu:4(IDX:0-3)"}, 0),
        ({"GresUsed": "gpu:0"}, 4),
    ],
)
def test_free_gpus_of_a_node(fields: dict[str, str], free: int) -> None:
    node = {
        "State": "MIXED",
        "Partitions": "spot,all",
        "Gres": "gpu:4",
        "GresUsed": "gpu:1(IDX:0)",
        **fields,
    }
    assert _free_gpus(node, Resources(executor="slurm", partition="spot"), 0) == free


def test_gpus_that_the_attempt_holds_count_as_free() -> None:
    node = {"State": "ALLOCATED", "Gres": "gpu:4", "GresUsed": "gpu:4(IDX:0-3)"}
    assert _free_gpus(node, Resources(executor="slurm"), 2) == 2


def fake(directory: Path, name: str, script: str) -> str:
    """A command of Slurm's that says what the test wants."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_late_command_is_unknown_and_not_absent(tmp_path: Path) -> None:
    with pytest.raises(SchedulerUnavailableError, match="did not answer within 1 s"):
        slurm_client.call([fake(tmp_path, "squeue", "sleep 30")], timeout_s=1)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller", SchedulerUnavailableError),
        ("sbatch: error: Batch job submission failed: Socket timed out", SchedulerUnavailableError),
        ("slurm_load_jobs error: Invalid job id specified", SchedulerError),
    ],
)
def test_refusals_and_silences(tmp_path: Path, words: str, kind: type[SchedulerError]) -> None:
    with pytest.raises(SchedulerError) as caught:
        slurm_client.call([fake(tmp_path, "x", f"echo '{words}' >&2; exit 1")])
    assert type(caught.value) is kind


def test_a_missing_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    with pytest.raises(SchedulerUnavailableError, match="no such command"):
        slurm_client.call(["squeue"])


@pytest.mark.parametrize(
    ("free", "resources", "ranks"),
    [
        ([4, 4, 0, 2], {"nodes": 2, "gpus_per_node": 4}, 8),
        ([3, 1, 0], {"nodes": 2, "gpus_per_node": 4}, 3),
        ([0, 0], {"gpus_per_node": 4}, 0),
        ([4, 4, 3], {"nodes": 3, "gpus_per_node": 1, "gres": "gpu:4"}, 2),
        ([4, 3], {"nodes": 2, "gpus_per_node": 2, "gres": "gpu:a100:4"}, 2),
        ([0], {"gpus_per_node": 2, "gres": "none"}, None),
        ([], {"gpus_per_node": 2}, 0),
    ],
)
def test_ranks_that_fit_into_what_is_free(
    free: list[int], resources: dict[str, Any], ranks: int | None
) -> None:
    assert ranks_that_fit(free, Resources(executor="slurm", **resources)) == ranks
