"""Slurm's states, times and lists as captured from real clusters."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.histories import record_of, spec_of

from holdfast.contracts.disk.paths import AttemptPaths
from holdfast.contracts.errors import SchedulerError, SchedulerUnavailableError
from holdfast.contracts.node import clocks
from holdfast.contracts.records.documents import Request, Submission
from holdfast.contracts.spec.resources import Resources, gpus_of
from holdfast.contracts.states import AttemptState
from holdfast.workers.agent.stops.sources import slurm_lead_s
from holdfast.workers.runs.request import build_request
from holdfast.workers.schedulers import slurm_client
from holdfast.workers.schedulers.slurm import SlurmExecutor
from holdfast.workers.schedulers.slurm_capacity import (
    free_gpus,
    gpus_that_fit,
    gpus_under_qos,
    satisfies,
    wanted_of,
)
from holdfast.workers.schedulers.slurm_client import SLURM_STATES, bare_state, translate

# `squeue --helpstate` of 24.11, and the base states and flags of slurm.h that it leaves out.
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
def test_every_slurm_state_is_mapped(word: str) -> None:
    assert translate(word) in set(AttemptState)


def test_the_mapping_has_only_slurm_states() -> None:
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
def test_suffixes_of_slurm_states_are_ignored(word: str, state: AttemptState | None) -> None:
    assert translate(word) is state


def test_which_slurm_states_are_terminal() -> None:
    ended = {word for word in WORDS if (translate(word) or AttemptState.CREATED).is_terminal}
    assert ended == {
        "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
        "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
    }  # fmt: skip
    assert bare_state("CANCELLED by 0") == "CANCELLED"


SHOW_JOB = (
    "JobId=12 JobName=holdfast-gpt-0a1b2c3d-a0001 UserId=root(0) GroupId=root(0) MCS_label=N/A "
    "Priority=1 Nice=0 Account=root QOS=normal JobState=RUNNING Reason=None Dependency=(null) "
    "Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:08 TimeLimit=UNLIMITED "
    "TimeMin=N/A StartTime=2026-03-01T10:00:00 EndTime=Unknown PreemptTime=None NodeList=n[1-2] "
    "NumNodes=2 TRES=cpu=2,node=2,billing=2,gres/gpu=8 Command=/a b/x.sh WorkDir=/a b"
)


def test_job_fields_are_parsed() -> None:
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
def test_host_lists_are_expanded(text: str, hosts: tuple[str, ...]) -> None:
    assert slurm_client.expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30:00", 30), ("1-00:00:00", 1440), ("02:30:00", 150), ("90", 90), ("UNLIMITED", None)],
)
def test_time_limits_are_parsed_to_minutes(text: str, minutes: float | None) -> None:
    assert slurm_client.parse_minutes(text) == minutes


@pytest.mark.parametrize(
    ("text", "gpus", "of_kind"),
    [
        ("gpu:4", 4, 0),
        ("gpu:a100:8(S:0-1),shard:16", 8, 0),
        ("gpu:a100:2(S:0,1),gpu:h100:4(S:2)", 6, 4),
        ("gpu:h100:2(IDX:0,3)", 2, 2),
        ("gpu:2080ti:4", 4, 0),
        ("gres:gpu:h100:3", 3, 3),
        ("gpu:h100", 1, 1),
        ("gpu", 1, 0),
        ("(null)", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_gpus_of_a_gres_string_are_counted(text: str, gpus: int, of_kind: int) -> None:
    assert gpus_of(text) == gpus
    assert gpus_of(text, "h100") == of_kind


@pytest.mark.parametrize(
    ("fields", "resources", "free"),
    [
        ({}, {}, 3),
        ({"State": "DOWN+NOT_RESPONDING"}, {}, 0),
        ({"State": "IDLE+DRAIN"}, {}, 0),
        # Slurm allocates no new work on a node that does not respond.
        ({"State": "IDLE*"}, {}, 0),
        ({"State": "IDLE+CLOUD+POWERED_DOWN"}, {}, 3),
        ({"State": "IDLE+POWERING_DOWN"}, {}, 0),
        ({"Partitions": "prod"}, {}, 0),
        ({"GresUsed": "gpu:4(IDX:0-3)"}, {}, 0),
        ({"GresUsed": "gpu:0"}, {}, 4),
        ({"State": "IDLE+RESERVED"}, {}, 0),
        ({"State": "IDLE+RESERVED", "NodeName": "n2"}, {"extra": {"reservation": "mine"}}, 3),
        ({"State": "IDLE+MAINT", "NodeName": "n2"}, {"extra": {"reservation": "mine"}}, 3),
        ({"NodeName": "n3"}, {"extra": {"reservation": "mine"}}, 0),
        ({"Gres": "gpu:a100:4,gpu:h100:2", "GresUsed": "gpu:a100:4,gpu:h100:1"},
         {"gres": "gpu:h100:2"}, 1),
        ({"ActiveFeatures": "a100,ib"}, {"constraint": "h100"}, 0),
        ({"ActiveFeatures": "h100,ib"}, {"constraint": "h100&ib"}, 3),
    ],
)  # fmt: skip
def test_the_free_gpus_of_a_node(
    fields: dict[str, str], resources: dict[str, Any], free: int
) -> None:
    node = {
        "State": "MIXED",
        "Partitions": "spot,all",
        "Gres": "gpu:4",
        "GresUsed": "gpu:1(IDX:0)",
        **fields,
    }
    asked = Resources(executor="slurm", partition="spot", **resources)
    wanted = wanted_of(asked, ["n2"] if asked.extra else None)
    assert free_gpus(node, wanted) == free


def test_gpus_that_the_attempt_holds_count_as_free() -> None:
    node = {"State": "ALLOCATED", "Gres": "gpu:4", "GresUsed": "gpu:4(IDX:0-3)"}
    assert free_gpus(node, wanted_of(Resources(executor="slurm")), 2) == 2


@pytest.mark.parametrize(
    ("constraint", "is_satisfied"),
    [
        ("", True),
        ("ib", True),
        ("h100", False),
        ("ib&a100", True),
        ("ib,h100", False),
        ("h100|a100", True),
        ("(h100|a100)&ib", True),
        ("[rack1*2|rack2*2]", False),
        ("[rack1*2|ib*4]", True),
        ("a100!", True),
        ("(a100", True),
    ],
)
def test_whether_a_node_satisfies_a_constraint(constraint: str, is_satisfied: bool) -> None:
    assert satisfies(constraint, {"a100", "ib"}) is is_satisfied


@pytest.mark.parametrize(
    ("limits", "held", "gpus"),
    [
        ({}, 0, None),
        ({"GrpTRES": "cpu=100"}, 0, None),
        ({"GrpTRES": "gres/gpu=12"}, 0, 7),
        ({"MaxTRESPU": "cpu=4,gres/gpu=6"}, 0, 3),
        ({"MaxTRESPU": "gres/gpu=6"}, 3, 6),
        ({"MaxTRES": "gres/gpu=4", "GrpTRES": "gres/gpu=12"}, 0, 4),
        ({"GrpTRES": "gres/gpu=2"}, 0, 0),
    ],
)
def test_the_gpus_that_a_qos_still_allows(
    limits: dict[str, str], held: int, gpus: int | None
) -> None:
    in_use = [("me", "cpu=3,gres/gpu=3"), ("you", "cpu=2,node=1,gres/gpu=2"), ("you", "cpu=2")]
    assert gpus_under_qos(limits, in_use, "me", held) == gpus


def request_of(**fields: Any) -> Request:
    spec = spec_of(**fields)
    return build_request(record_of(spec), spec, attempt=1, gpus=spec.gpus, reason="test")


def fake_command(directory: Path, name: str, script: str) -> str:
    """Write a fake Slurm command that runs `script`."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_command_that_times_out_raises_unavailable(tmp_path: Path) -> None:
    with pytest.raises(SchedulerUnavailableError, match="did not answer within 1 s"):
        slurm_client.call([fake_command(tmp_path, "squeue", "sleep 30")], timeout_s=1)


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller", SchedulerUnavailableError),
        ("sbatch: error: Batch job submission failed: Socket timed out", SchedulerUnavailableError),
        ("slurm_load_jobs error: Invalid job id specified", SchedulerError),
    ],
)
def test_slurm_refusals_and_timeouts_raise_different_errors(
    tmp_path: Path, words: str, kind: type[SchedulerError]
) -> None:
    with pytest.raises(SchedulerError) as caught:
        slurm_client.call([fake_command(tmp_path, "x", f"echo '{words}' >&2; exit 1")])
    assert type(caught.value) is kind


def test_command_that_a_signal_killed_is_repeated(tmp_path: Path) -> None:
    """Slurm signals all processes of a step, so also a scontrol that an agent has just started."""
    fake = fake_command(tmp_path, "scontrol", f"mkdir {tmp_path}/once && kill $$; echo JobId=7")
    assert slurm_client.call([fake]) == "JobId=7\n"
    doomed = fake_command(tmp_path, "squeue", f"echo >> {tmp_path}/tries; kill $$")
    with pytest.raises(SchedulerUnavailableError, match="killed by signal 15"):
        slurm_client.call([doomed])
    assert (tmp_path / "tries").read_text().count("\n") == 1 + slurm_client.KILLED_MAX


def test_slurm_settings_in_the_environment_do_not_reach_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_TIME_FORMAT", "SQUEUE_FORMAT", "SACCT_FORMAT", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "relative")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/other.conf")
    seen = slurm_client.call(
        [fake_command(tmp_path, "squeue", "env | grep -E '^(SLURM|SQUEUE|SACCT)_'")]
    )
    assert seen == "SLURM_CONF=/etc/slurm/other.conf\n"


def test_an_allocation_around_the_supervisor_does_not_reach_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep = f'env > {tmp_path}/seen; cp "$1" {tmp_path}/script'
    fake_command(tmp_path, "sbatch", f"{keep}; echo Submitted batch job 7")
    fake_command(tmp_path, "srun", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("SLURM_MEM_PER_NODE", "SBATCH_JOB_NAME", "SBATCH_ACCOUNT", "SBATCH_QOS"):
        monkeypatch.setenv(name, "theirs")
    request = request_of(resources={"executor": "slurm", "qos": "low"})
    submission = SlurmExecutor().submit(AttemptPaths(tmp_path / "0001"), request)
    seen = (tmp_path / "seen").read_text()
    assert submission.job_id == "7"
    assert "SBATCH_ACCOUNT=theirs" in seen
    assert not any(name in seen for name in ("MEM_PER_NODE", "SBATCH_JOB_NAME", "SBATCH_QOS"))
    script = (tmp_path / "script").read_text()
    assert f"#SBATCH --job-name={request.job_name}\n" in script
    # submitit sets its own wckey, which sites that check wckeys refuse.
    assert "wckey" not in script


@pytest.mark.parametrize(
    ("state", "held"),
    [("COMPLETING", {"n1": 2, "n2": 2}), ("COMPLETED", {}), ("RUNNING", {})],
)
def test_gpus_of_an_ended_attempt_count_while_its_job_is_completing(
    state: str, held: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(resources={"executor": "slurm", "nodes": 2, "gpus_per_node": 2})
    line = f"JobId=7 JobName={request.job_name} JobState={state} NodeList=n[1-2]"
    fake_command(tmp_path, "scontrol", f"echo '{line}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    submission = Submission(job_id="7", executor="slurm", submitted_at=1.0)
    assert SlurmExecutor().held_after_end(request, submission) == held


@pytest.mark.parametrize(
    "words",
    [
        "Message receive failure",
        "Message send failure",
        "Zero Bytes were transmitted or received",
        "Unable to contact slurm controller (connect failure)",
        "Socket timed out on send/recv operation",
        "Connection reset by peer",
    ],
)
def test_a_lost_answer_is_not_a_refusal(words: str) -> None:
    assert not slurm_client.is_refusal(f"sbatch: error: Batch job submission failed: {words}")


@pytest.mark.parametrize(
    ("words", "may_pass"),
    [
        ("Job violates accounting/QOS policy (job submit limit, user's size)", True),
        ("Required partition not available (inactive or drain)", True),
        ("Requested partition configuration not available now", True),
        ("Unspecified error", True),
        ("Invalid account or account/partition combination specified", False),
        ("Invalid partition name specified", False),
        ("Requested node configuration is not available", False),
        ("User's group not permitted to use this partition", False),
    ],
)
def test_refusals_that_are_temporary_are_recognized(words: str, may_pass: bool) -> None:
    said = f"sbatch: error: Batch job submission failed: {words}"
    assert slurm_client.is_refusal(said)
    assert slurm_client.may_pass(said) is may_pass


def test_a_missing_slurm_command_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_number_of_gpus_that_fit_into_the_free_gpus(
    free: list[int], resources: dict[str, Any], ranks: int | None
) -> None:
    assert gpus_that_fit(free, Resources(executor="slurm", **resources)) == ranks


def test_hidden_partitions_are_queried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = 'case "$*" in *--all*) echo "PartitionName=hidden NodeName=n1";; esac'
    fake_command(tmp_path, "scontrol", hidden)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [p["PartitionName"] for p in slurm_client.partitions()] == ["hidden"]
    fake_command(tmp_path, "scontrol", hidden.replace("PartitionName=hidden ", ""))
    assert [n["NodeName"] for n in slurm_client.show_nodes()] == ["n1"]


@pytest.mark.parametrize(
    ("name", "cancelled"), [("holdfast-r-0001", True), ("another", False), (None, False)]
)
def test_only_a_job_of_the_attempts_name_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, name: str | None, cancelled: bool
) -> None:
    """The id comes from a file. Slurm also reuses ids."""
    request = build_request(record_of(spec_of()), spec_of(), attempt=1, gpus=1, reason="first")
    request = request.model_copy(update={"job_name": "holdfast-r-0001", "cluster": None})
    job = Submission(job_id="4711", executor="slurm", submitted_at=1.0)
    calls: list[list[str]] = []

    def call(command: list[str], timeout_s: float = 0.0) -> str:
        calls.append(command)
        if command[0] == "scancel":
            return ""
        if name is None:
            raise SchedulerError("scontrol: Invalid job id specified")
        return f"JobId=4711 JobName={name} JobState=PENDING"

    monkeypatch.setattr(slurm_client, "call", call)
    SlurmExecutor().cancel(request, job)
    SlurmExecutor().withdraw(request, job)
    sent = [command[1:] for command in calls if command[0] == "scancel"]
    assert sent == ([["4711"], ["--state=PENDING", "4711"]] if cancelled else [])


def test_nothing_is_cancelled_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    request = build_request(record_of(spec_of()), spec_of(), attempt=1, gpus=1, reason="first")
    job = Submission(job_id="4711", executor="slurm", submitted_at=1.0)
    calls: list[str] = []

    def call(command: list[str], timeout_s: float = 0.0) -> str:
        calls.append(command[0])
        raise SchedulerUnavailableError("slurmctld does not answer")

    monkeypatch.setattr(slurm_client, "call", call)
    for ends in (SlurmExecutor().cancel, SlurmExecutor().withdraw):
        with pytest.raises(SchedulerUnavailableError):
            ends(request.model_copy(update={"cluster": None}), job)
    assert set(calls) == {"scontrol"}


CLOCK_CHANGE = 1_792_891_800.0
"""02:30 in Berlin on 2026-10-25, for the second time: 01:30 in UTC."""


def test_times_are_asked_in_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The local hour that a clock change repeats would be one of two."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    time.tzset()
    try:
        shown = f"date -d @{CLOCK_CHANGE:.0f} +%FT%T"
        config = f"Configuration data as of $({shown})"
        job = f"JobId=7 JobName=x JobState=RUNNING EndTime=$({shown})"
        fake_command(
            tmp_path, "scontrol", f'case "$*" in *config) echo "{config}";; *) echo "{job}";; esac'
        )
        fake_command(tmp_path, "sacct", f'echo "$*" > {tmp_path}/asked')
        line = slurm_client.show_job("7")
        assert line is not None
        assert line.ended_at == CLOCK_CHANGE
        monkeypatch.setattr(clocks, "now", lambda: CLOCK_CHANGE + 600)
        assert slurm_lead_s() == -600
        slurm_client.recorded_jobs(name="x", since=CLOCK_CHANGE + 24 * 3600)
        assert "-S2026-10-25T01:30:00" in (tmp_path / "asked").read_text()
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("act", [SlurmExecutor.cancel, SlurmExecutor.withdraw])
def test_only_a_job_id_is_passed_to_slurm(
    act: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id comes from a file, and could be an option."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("scontrol", "scancel"):
        fake_command(tmp_path, name, f'echo "$*" >> {tmp_path}/called')
    known = Submission(job_id="17", executor="slurm", submitted_at=1.0)
    for text in ("--user=root", "17 18", "", "0", "-1", "1\n2", "²", "9" * 30):
        other = known.model_copy(update={"job_id": text})
        with pytest.raises(SchedulerError, match="expected a number"):
            act(SlurmExecutor(), request_of(), other)
    assert not (tmp_path / "called").exists()
