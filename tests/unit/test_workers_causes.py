"""Causes: `classify`, `classify_crash` and the judgement of signals, for many records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records.documents import Outcome, StopFile
from holdfast.contracts.records.history import stopped_for_numerics
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.agent.lead import Ended
from holdfast.workers.agent.node import CrashReport, NodeReport
from holdfast.workers.agent.stops.signals import judge
from holdfast.workers.decisions.causes import (
    STATE_OF_CAUSE,
    RankFailure,
    SaveFailure,
    classify,
    classify_crash,
    hung_ending,
    with_numerics_stop,
)
from holdfast.workers.decisions.evidence import (
    TRACEBACK,
    find_cause,
    last_message,
    last_traceback,
    messages,
)
from holdfast.workers.schedulers import JobStatus
from holdfast.workers.schedulers.slurm_client import format_time, translate

STOP = StopFile(action="pause", by="ann", requested_at=1.0)
PREEMPTED = {"cause": "preemption", "name": "SIGTERM", "source": "signal"}


def outcome_of(cause: Cause | None, *evidence: str) -> Outcome:
    state = STATE_OF_CAUSE[cause] if cause else AttemptState.COMPLETED
    return Outcome(
        state=state,
        cause=cause,
        evidence=evidence,
        job_id="7",
        world_size=2,
        started_at=0,
        ended_at=1,
    )


def heard(cause: Cause, preempted: str = "None") -> Outcome:
    """The outcome of an agent that received a signal and judged it."""
    return outcome_of(cause, f"signal: SIGTERM (JobState=RUNNING PreemptTime={preempted})")


def slurm(word: str) -> JobStatus:
    return JobStatus(state=translate(word), raw=word, evidence=(f"Slurm: job 7 is {word}",))


GONE = JobStatus(state=AttemptState.LOST, raw="gone", evidence=("the process is gone",))
REBOOTED = JobStatus(state=AttemptState.LOST, raw="rebooted", evidence=("it has rebooted",))


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_a_terminal_state(cause: Cause) -> None:
    assert STATE_OF_CAUSE[cause].is_terminal


@pytest.mark.parametrize(
    ("outcome", "status", "cause"),
    [
        (outcome_of(None), slurm("COMPLETED"), None),
        (outcome_of(None), slurm("CANCELLED"), None),
        (outcome_of(None), None, None),
        (outcome_of(Cause.PREEMPTION), slurm("COMPLETED"), Cause.PREEMPTION),
        (outcome_of(Cause.PREEMPTION), slurm("FAILED"), Cause.PREEMPTION),
        (heard(Cause.PREEMPTION), slurm("CANCELLED"), Cause.OPERATOR),
        (heard(Cause.PREEMPTION, "2026-01-01T00:00:00"), slurm("CANCELLED"), Cause.PREEMPTION),
        (heard(Cause.PREEMPTION), slurm("TIMEOUT"), Cause.TIME_LIMIT),
        (heard(Cause.PREEMPTION), slurm("NODE_FAIL"), Cause.NODE_FAILURE),
        (heard(Cause.PREEMPTION), slurm("COMPLETED"), Cause.PREEMPTION),
        (heard(Cause.OPERATOR), slurm("PREEMPTED"), Cause.PREEMPTION),
        (heard(Cause.OPERATOR), slurm("CANCELLED"), Cause.OPERATOR),
        (outcome_of(Cause.OPERATOR), slurm("PREEMPTED"), Cause.OPERATOR),
        (outcome_of(Cause.TIME_LIMIT), slurm("CANCELLED"), Cause.TIME_LIMIT),
        (outcome_of(Cause.USER_ERROR), slurm("CANCELLED"), Cause.USER_ERROR),
        (outcome_of(Cause.USER_ERROR), slurm("FAILED"), Cause.USER_ERROR),
        (outcome_of(Cause.INFRASTRUCTURE), slurm("OUT_OF_MEMORY"), Cause.HOST_OOM),
        (outcome_of(Cause.INFRASTRUCTURE), slurm("CANCELLED"), Cause.INFRASTRUCTURE),
        (outcome_of(Cause.UNKNOWN), slurm("NODE_FAIL"), Cause.NODE_FAILURE),
        (outcome_of(Cause.PREEMPTION), GONE, Cause.PREEMPTION),
    ],
)
def test_the_ending_of_an_attempt_with_an_outcome(
    outcome: Outcome, status: JobStatus | None, cause: Cause | None
) -> None:
    ending = classify(outcome=outcome, status=status, stop=STOP, claimed=True)
    assert ending.cause is cause
    expected = AttemptState.COMPLETED if cause is None else STATE_OF_CAUSE[cause]
    assert ending.state is expected


@pytest.mark.parametrize(
    ("status", "signals", "stop", "claimed", "state", "cause"),
    [
        (slurm("PREEMPTED"), [], None, True, "preempted", Cause.PREEMPTION),
        (slurm("PREEMPTED"), [], None, False, "preempted", Cause.PREEMPTION),
        (slurm("TIMEOUT"), [PREEMPTED], None, True, "timed_out", Cause.TIME_LIMIT),
        (slurm("NODE_FAIL"), [], None, True, "node_failed", Cause.NODE_FAILURE),
        (slurm("BOOT_FAIL"), [], None, False, "node_failed", Cause.NODE_FAILURE),
        (slurm("OUT_OF_MEMORY"), [], None, True, "failed", Cause.HOST_OOM),
        (slurm("CANCELLED"), [], None, True, "cancelled", Cause.OPERATOR),
        (slurm("CANCELLED"), [PREEMPTED], None, True, "preempted", Cause.PREEMPTION),
        (slurm("CANCELLED"), [], STOP, False, "cancelled", Cause.OPERATOR),
        (slurm("COMPLETED"), [], None, True, "lost", Cause.UNKNOWN),
        (slurm("FAILED"), [PREEMPTED], None, True, "preempted", Cause.PREEMPTION),
        (slurm("FAILED"), [], None, False, "lost", Cause.INFRASTRUCTURE),
        (slurm("LAUNCH_FAILED"), [], None, False, "failed", Cause.INFRASTRUCTURE),
        (slurm("RECONFIG_FAIL"), [], None, False, "failed", Cause.INFRASTRUCTURE),
        (slurm("DEADLINE"), [], None, True, "timed_out", Cause.TIME_LIMIT),
        (GONE, [], None, True, "lost", Cause.INFRASTRUCTURE),
        (REBOOTED, [], None, True, "lost", Cause.NODE_FAILURE),
        (GONE, [], None, False, "lost", Cause.INFRASTRUCTURE),
        (GONE, [PREEMPTED], None, True, "preempted", Cause.PREEMPTION),
        (GONE, [], STOP, True, "cancelled", Cause.OPERATOR),
        (None, [], None, True, "lost", Cause.UNKNOWN),
    ],
)
def test_the_ending_of_an_attempt_without_an_outcome(
    status: JobStatus | None,
    signals: list[dict[str, Any]],
    stop: StopFile | None,
    claimed: bool,
    state: str,
    cause: Cause,
) -> None:
    ending = classify(outcome=None, status=status, signals=signals, stop=stop, claimed=claimed)
    assert (ending.state, ending.cause) == (state, cause)
    assert ending.evidence


def test_a_job_cancelled_after_a_lost_node_is_a_node_failure() -> None:
    status = JobStatus(state=AttemptState.CANCELLED, raw="CANCELLED")
    ending = classify(outcome=None, status=status, claimed=True, lost_hosts=["n1"])
    assert (ending.state, ending.cause) == (AttemptState.NODE_FAILED, Cause.NODE_FAILURE)
    assert ending.evidence[0] == "n1: its agent is lost"


@pytest.mark.parametrize(
    ("name", "detail", "cause"),
    [
        ("SIGHUP", "JobState=RUNNING PreemptTime=None", Cause.NODE_FAILURE),
        ("SIGHUP", "JobState=RUNNING PreemptTime=2026-11-21T10:00:00", Cause.PREEMPTION),
        ("SIGTERM", "JobState=RUNNING PreemptTime=None", Cause.PREEMPTION),
    ],
)
def test_sighup_with_a_lost_node_is_a_node_failure(name: str, detail: str, cause: Cause) -> None:
    signals = [{"cause": "preemption", "name": name, "source": "signal", "detail": detail}]
    status = slurm("CANCELLED")
    ending = classify(outcome=None, status=status, signals=signals, claimed=True, lost_hosts=["n1"])
    assert ending.cause is cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", Cause.GPU_OOM),
        ("torch.OutOfMemoryError: HIP out of memory. Tried", Cause.GPU_OOM),
        ("torch.OutOfMemoryError: XPU out of memory. Tried", Cause.GPU_OOM),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", Cause.GPU_OOM),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", Cause.UNKNOWN),
        ("RuntimeError: CUDA error: uncorrectable NVLink error detected", Cause.INFRASTRUCTURE),
        ("NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus.", Cause.INFRASTRUCTURE),
        ("OSError: [Errno 122] Disk quota exceeded", Cause.STORAGE_FULL),
        ("RuntimeError: std::bad_alloc", Cause.HOST_OOM),
        ("RuntimeError: unable to write to file </torch_1>: out of shared memory", Cause.HOST_OOM),
        (
            "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",
            Cause.HOST_OOM,
        ),
        ("OSError: [Errno 28] No space left on device", Cause.STORAGE_FULL),
        ("MemoryError", Cause.HOST_OOM),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", Cause.HOST_OOM),
        ("FloatingPointError: loss is not finite", Cause.NUMERICS),
        ("torch.distributed.DistBackendError: NCCL error", Cause.INFRASTRUCTURE),
        ("RuntimeError: [gloo] Connection closed by peer [1.2.3.4]", Cause.INFRASTRUCTURE),
        ("KeyError: 'loss'", None),
        ("", None),
    ],
)
def test_a_cause_is_found_in_a_traceback(text: str, cause: Cause | None) -> None:
    found = find_cause(f"Traceback (most recent call last):\n{text}")
    assert (found.rule.cause if found else None) is cause
    assert found is None or found.quote in text


CHAINED = """Traceback (most recent call last):
  File "t.py", line 3, in save
    raise OSError(28, "No space left on device")
OSError: [Errno 28] No space left on device

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "t.py", line 9, in <module>
    except ConnectionResetError:  # Connection reset by peer
ValueError: the run is over
"""


def test_the_first_exception_of_a_chain_decides_and_source_lines_do_not() -> None:
    assert messages(CHAINED)[1] == "ValueError: the run is over"
    found = find_cause(CHAINED)
    assert found is not None
    assert found.quote == "OSError: [Errno 28] No space left on device"
    assert find_cause(CHAINED[CHAINED.rindex("Traceback") :]) is None
    assert last_message(CHAINED) == "ValueError: the run is over"


LOST_WORKER = """Traceback (most recent call last):
  File "connection.py", line 395, in _recv
    chunk = read(handle, remaining)
ConnectionResetError: [Errno 104] Connection reset by peer

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "signal_handling.py", line 73, in handler
    _error_if_any_worker_fails()
RuntimeError: DataLoader worker (pid 31) is killed by signal: Segmentation fault.
"""


def test_a_secondary_error_followed_by_its_explanation_is_not_the_cause() -> None:
    found = find_cause(LOST_WORKER)
    assert found is not None
    assert (found.rule.cause, found.rule.secondary_error) == (Cause.UNKNOWN, False)
    assert "killed by signal: Segmentation fault" in found.quote
    alone = find_cause(LOST_WORKER.partition("\n\nDuring")[0])
    assert alone is not None
    assert alone.rule.secondary_error


@pytest.mark.parametrize(("oom_kills", "cause"), [(0, Cause.UNKNOWN), (1, Cause.HOST_OOM)])
def test_a_rank_that_lost_its_own_worker_precedes_the_peers_that_lost_the_rank(
    oom_kills: int, cause: Cause
) -> None:
    """A data loader's worker died before the rank had taken a sample from it."""
    peer = f"{TRACEBACK}:\nRuntimeError: [gloo/pair.cc:553] Connection closed by peer [::1]:1"
    own = (
        f'{TRACEBACK}:\n  File "/lib/multiprocessing/resource_sharer.py", line 86, in get\n'
        "    c = Client(address)\nConnectionResetError: [Errno 104] Connection reset by peer"
    )
    failures = [
        RankFailure(rank=rank, exit_code=1, traceback=text) for rank, text in enumerate((peer, own))
    ]
    ending, first = classify_crash(failures, oom_kills=oom_kills)
    assert ending.cause is cause
    assert first is not None
    assert first.rank == 1
    assert "a process that this one had started has ended" in ending.evidence[0]


def test_the_last_traceback_includes_its_chain_but_no_earlier_one() -> None:
    earlier = "Traceback (most recent call last):\n  File x\nKeyError: 1\nretrying\n"
    assert last_traceback(earlier + CHAINED) == CHAINED
    prefixed = "".join(f"[rank1]: {line}\n" for line in CHAINED.splitlines())
    assert messages(last_traceback(prefixed)) == messages(CHAINED)
    assert last_traceback("no words") == ""


IN_GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "t.py", line 9, in <module>
  |     raise ExceptionGroup("writers failed", errors)
  | ExceptionGroup: writers failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: no samples
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "t.py", line 7, in <module>
    |     write(a + b)
    | OSError: [Errno 28] No space left on device
    +------------------------------------
"""


def test_exceptions_in_a_group_are_read_like_other_exceptions() -> None:
    earlier = "Traceback (most recent call last):\n  File x\nKeyError: 1\nretrying\n"
    prefixed = "".join(f"[rank1]: {line}\n" for line in IN_GROUP.splitlines())
    for text in (IN_GROUP, earlier + IN_GROUP, prefixed):
        whole = last_traceback(text)
        assert [said.split("\n")[0] for said in messages(whole)] == [
            "ExceptionGroup: writers failed (2 sub-exceptions)",
            "OSError: [Errno 28] No space left on device",
        ]
        found = find_cause(whole)
        assert found is not None
        assert found.quote == "OSError: [Errno 28] No space left on device"
    chained = CHAINED.removesuffix("\n") + "\n\nDuring handling of the above exception, \n\n"
    assert last_traceback(chained + IN_GROUP) == chained + IN_GROUP


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("psycopg.errors.DiskFull: could not extend file", Cause.STORAGE_FULL),
        ("OSError: the scratch volume is full", Cause.STORAGE_FULL),
        ("ValueError: the queue is full", None),
        ("aiohttp.client_exceptions.ServerDisconnectedError", Cause.INFRASTRUCTURE),
        ("urllib3.exceptions.ProtocolError: ('aborted',)", Cause.INFRASTRUCTURE),
        ("app.NoConnectionBetweenLayers: 3", None),
        ("joblib.externals.loky.process_executor.TerminatedWorkerError: A", Cause.UNKNOWN),
        ("RuntimeError: worker process 7 died unexpectedly", Cause.UNKNOWN),
        ("httpx.ReadTimeout", Cause.INFRASTRUCTURE),
        ("subprocess.TimeoutExpired: Command 'x' timed out after 3 seconds", None),
        ("h5py.Error: short write of chunk 7", Cause.STORAGE_FULL),
    ],
)
def test_causes_of_exceptions_from_many_libraries(words: str, cause: Cause | None) -> None:
    found = find_cause(f"{TRACEBACK}:\n  File x\n{words}\n")
    assert (found.rule.cause if found else None) is cause


FAILED_COMMAND = f"{TRACEBACK}:\n  File x\nsubprocess.CalledProcessError: Command 'x' returned 1\n"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("cp: error writing 'y': No space left on device\n", Cause.STORAGE_FULL),
        ("rsync: connection reset\nrsync: Connection refused\n", Cause.INFRASTRUCTURE),
        ("usage: x [-h]\n", Cause.UNKNOWN),
        ("", Cause.UNKNOWN),
    ],
)
def test_the_output_of_a_failed_command_decides(said: str, cause: Cause) -> None:
    failure = RankFailure(
        rank=0, exit_code=1, traceback=FAILED_COMMAND, stderr_tail=said + FAILED_COMMAND
    )
    ending, _ = classify_crash([failure])
    assert ending.cause is cause
    assert "CalledProcessError" in ending.evidence[0]


NO_RESULT = (
    'Traceback (most recent call last):\n  File "t.py", line 9, in <module>\nRuntimeError: no\n'
)
HELPER = "Process {}:\n" + NO_RESULT.replace("RuntimeError: no", "{}")


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        (HELPER.format("ForkProcess-1", "MemoryError"), Cause.HOST_OOM),
        (HELPER.format("cache", "OSError: [Errno 28] No space left on device"), Cause.STORAGE_FULL),
        (HELPER.format("cache", "MemoryError") + "the cache has 0 shards\n", Cause.HOST_OOM),
        (HELPER.format("cache", "ValueError: 7"), Cause.USER_ERROR),
        # The end of the parent can be the reason.
        (HELPER.format("cache", "ConnectionResetError: reset by peer"), Cause.USER_ERROR),
        # The program has caught this error itself, or has caught another one after the helper's.
        (NO_RESULT.replace("RuntimeError: no", "MemoryError"), Cause.USER_ERROR),
        (HELPER.format("cache", "MemoryError") + NO_RESULT, Cause.USER_ERROR),
        ("Process cache:\n", Cause.USER_ERROR),
        ("", Cause.USER_ERROR),
    ],
)
def test_the_error_of_a_helper_decides_if_the_parents_own_has_no_cause(
    before: str, cause: Cause
) -> None:
    failure = RankFailure(rank=0, exit_code=1, traceback=NO_RESULT, stderr_tail=before + NO_RESULT)
    ending, _ = classify_crash([failure])
    assert ending.cause is cause
    assert ending.evidence[0].endswith("RuntimeError: no")
    unfit = replace(failure, traceback=NO_RESULT.replace("RuntimeError: no", "MemoryError"))
    assert classify_crash([unfit])[0].cause is Cause.HOST_OOM


ENDED = JobStatus(state=AttemptState.FAILED, raw="FAILED", evidence=("Slurm: job 7 is FAILED",))
TASK_ENDED = "srun: error: n1: task 0: Exited with exit code 1"
SRUN_HELP = '\nTry "srun --help" for more information'


# Most of these are srun's own words, version 22.05.
@pytest.mark.parametrize(
    ("log", "quote"),
    [
        ("srun: unrecognized option '--frobnicate=3'" + SRUN_HELP, "'--frobnicate=3'"),
        ("srun: invalid option -- '9'" + SRUN_HELP, "invalid option -- '9'"),
        ("srun: option '--no' is ambiguous; possibilities: '--nodes'" + SRUN_HELP, "ambiguous"),
        ("srun: error: Invalid --mem specification", "Invalid --mem"),
        ('srun: error: Invalid numeric value "abc" for --cpus-per-task.', "for --cpus-per-task"),
        ("srun: fatal: Failed to parse --cpu-bind= values.", "--cpu-bind="),
        ("srun: error: MPI: Unable to load any plugin", "MPI: Unable"),
        ('srun: error: "a" is not a valid node count', "not a valid node count"),
        ("srun: error: Unable to create step for job 7: Invalid generic resource", "create step"),
        ("/usr/bin/python3: No module named holdfast\n" + TASK_ENDED, "No module named holdfast"),
        ("slurmstepd-n2: error: execve(): /opt/python: No such file or directory", "/opt/python"),
        ("slurmstepd: error: pyxis: child 9 failed with error code: 1", "pyxis"),
    ],
)
def test_what_srun_refuses_is_a_user_error_in_its_own_words(log: str, quote: str) -> None:
    ending = classify(outcome=None, status=ENDED, job_log=log)
    assert (ending.state, ending.cause) == (AttemptState.FAILED, Cause.USER_ERROR)
    assert quote in ending.evidence[0]


@pytest.mark.parametrize(
    "log",
    [
        "",
        "srun: error: n1: task 0: Killed",
        TASK_ENDED,
        "srun: error: Node failure on n2",
        "srun: error: Task launch for StepId=7.0 failed on node n2: Communication shutdown failure",
        "srun: error: Unable to create step for job 7: Job/step already completing or completed",
        "srun: error: Unable to confirm allocation for job 7: Unable to contact slurm controller",
        "srun: fatal: Could not establish a configuration source",
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***",
    ],
)
def test_other_errors_of_srun_do_not_blame_the_spec(log: str) -> None:
    ending = classify(outcome=None, status=ENDED, job_log=log)
    assert ending.cause is Cause.INFRASTRUCTURE


def test_log_warnings_before_a_failure_are_not_evidence() -> None:
    said = "[W1121 socket.cpp:7] connect failed: Connection refused\nusage: t.py [-h]\n"
    assert find_cause(said) is None
    assert find_cause("[rank0]:" + said) is None
    assert last_message(said + "t.py: error: no data\n") == "t.py: error: no data"


@pytest.mark.parametrize(
    ("failures", "fields", "cause", "rank"),
    [
        ([RankFailure(rank=3, exit_code=-9)], {}, Cause.INFRASTRUCTURE, 3),
        ([RankFailure(rank=3, exit_code=-11)], {}, Cause.UNKNOWN, 3),
        ([RankFailure(rank=3, exit_code=-9)], {"oom_kills": 2}, Cause.HOST_OOM, 3),
        ([RankFailure(rank=3, exit_code=1)], {"lost_nodes": ["n2"]}, Cause.NODE_FAILURE, None),
        ([RankFailure(rank=0, exit_code=3)], {}, Cause.USER_ERROR, 0),
        ([], {}, Cause.INFRASTRUCTURE, None),
        (
            [
                RankFailure(rank=0, exit_code=1, traceback="Connection reset by peer", timestamp=1),
                RankFailure(rank=1, exit_code=1, traceback="ValueError: x", timestamp=2),
            ],
            {},
            Cause.USER_ERROR,
            1,
        ),
    ],
)
def test_the_cause_and_first_rank_of_a_crash(
    failures: list[RankFailure], fields: dict[str, Any], cause: Cause, rank: int | None
) -> None:
    ending, first = classify_crash(failures, **fields)
    assert ending.cause is cause
    assert ending.evidence
    assert (first.rank if first else None) == rank


def at(unix_s: float) -> str:
    return format_time(unix_s)


NOW = 1_700_000_000.0


def job(state: str = "RUNNING", end_s: float = 3600, preempted: bool = False) -> dict[str, str]:
    preempt = at(NOW) if preempted else "None"
    return {"JobState": state, "EndTime": at(NOW + end_s), "PreemptTime": preempt}


@pytest.mark.parametrize(
    ("name", "fields", "end_in_s", "cause", "deadline_in_s"),
    [
        ("SIGTERM", job(preempted=True, end_s=15), None, Cause.PREEMPTION, 15),
        ("SIGUSR2", job(preempted=True, end_s=15), None, Cause.PREEMPTION, 15),
        ("SIGTERM", job("CANCELLED"), None, Cause.OPERATOR, 20),
        ("SIGTERM", job("COMPLETING", end_s=0), None, Cause.OPERATOR, 20),
        ("SIGTERM", {**job("COMPLETING"), "Reason": "TimeLimit"}, None, Cause.TIME_LIMIT, 20),
        ("SIGTERM", job("TIMEOUT"), None, Cause.TIME_LIMIT, 20),
        ("SIGTERM", job("PREEMPTED"), None, Cause.PREEMPTION, 20),
        ("SIGTERM", job(), None, Cause.PREEMPTION, 20),
        ("SIGTERM", job(end_s=1), None, Cause.TIME_LIMIT, 30),
        ("SIGUSR2", job(end_s=60), None, None, 60),
        ("SIGUSR2", job(end_s=3600), None, Cause.PREEMPTION, 20),
        ("SIGINT", job(), None, Cause.OPERATOR, 20),
        ("SIGTERM", None, None, Cause.PREEMPTION, 20),
        ("SIGTERM", None, 2, Cause.TIME_LIMIT, 20),
        ("SIGTERM", None, 500, Cause.PREEMPTION, 20),
        ("SIGINT", None, None, Cause.OPERATOR, 20),
        ("SIGHUP", None, None, Cause.PREEMPTION, 20),
        ("SIGUSR2", None, 60, None, 60),
        ("SIGUSR2", None, 3600, Cause.PREEMPTION, 20),
        ("SIGUSR2", None, None, Cause.PREEMPTION, 20),
    ],
)
def test_the_cause_and_deadline_of_a_signal(
    name: str,
    fields: dict[str, str] | None,
    end_in_s: float | None,
    cause: Cause | None,
    deadline_in_s: float,
) -> None:
    judgement = judge(
        name,
        job=fields,
        on_slurm=True,
        now=NOW,
        grace_s=20,
        end_at=None if end_in_s is None else NOW + end_in_s,
        warning_s=50,
    )
    assert judgement.cause is cause
    assert judgement.deadline == pytest.approx(NOW + deadline_in_s, abs=1)


def test_a_hang_or_crash_after_a_stop_for_a_bad_loss_has_cause_numerics() -> None:
    reason = "the loss of step 9 is nan; the policy is to stop"
    events = [
        Event(
            writer="rank0",
            opening=number,
            sequence=0,
            time=0.0,
            kind=EventKind.NUMERICS,
            data={"attempt": 1, "launch": number, "action": action, "reason": reason},
        )
        for number, action in ((1, "rollback"), (2, "warn"), (2, "stop"))
    ]
    assert [stopped_for_numerics(events, 1, number) for number in (1, 2, 3)] == ["", reason, ""]
    hung = hung_ending(["every rank silent"])
    killed, _ = classify_crash([RankFailure(rank=1, exit_code=-9)])
    assert (hung.cause, killed.cause) == (Cause.HANG, Cause.INFRASTRUCTURE)
    for ending in (hung, killed):
        stopped = with_numerics_stop(ending, reason)
        assert (stopped.state, stopped.cause) == (AttemptState.FAILED, Cause.NUMERICS)
        assert stopped.evidence == (reason, *ending.evidence)
        assert with_numerics_stop(ending, "") == ending
    lost, _ = classify_crash([], lost_nodes=["n1"])
    assert with_numerics_stop(lost, reason) == lost


FULL = "the save of step 60 failed: [Errno 28] No space left on device: step 60"
STALE = "the save of step 60 failed: [Errno 116] Stale file handle"
OWN = f'{TRACEBACK}:\n  File "t.py", line 1, in <module>\nValueError: bad'


@pytest.mark.parametrize(
    ("failures", "unsaved", "oom_kills", "cause"),
    [
        ([], FULL, 0, Cause.STORAGE_FULL),
        ([], STALE, 0, Cause.INFRASTRUCTURE),
        ([], "", 0, Cause.INFRASTRUCTURE),
        ([], FULL, 1, Cause.HOST_OOM),
        ([RankFailure(rank=0, exit_code=1)], FULL, 0, Cause.STORAGE_FULL),
        ([RankFailure(rank=0, exit_code=1)], "", 0, Cause.USER_ERROR),
        ([RankFailure(rank=0, exit_code=1, traceback=OWN)], FULL, 0, Cause.STORAGE_FULL),
        ([RankFailure(rank=0, exit_code=-9)], FULL, 0, Cause.INFRASTRUCTURE),
        ([RankFailure(rank=0, exit_code=-9)], FULL, 1, Cause.HOST_OOM),
    ],
)
def test_a_recorded_failed_save_decides_before_any_text(
    failures: list[RankFailure], unsaved: str, oom_kills: int, cause: Cause
) -> None:
    log = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    ending, _ = classify_crash(failures, oom_kills=oom_kills, launch_log=log, unsaved=unsaved)
    assert ending.cause is cause
    assert (ending.evidence[0] == unsaved) is (cause is Cause.STORAGE_FULL or unsaved == STALE)


@pytest.mark.parametrize(
    ("phase", "completed", "failures", "unsaved"),
    [
        ("SAVE", 60, [], "step 60"),
        ("SAVE", 60, [RankFailure(rank=0, exit_code=1, traceback=OWN)], "step 60"),
        ("DONE", 60, [RankFailure(rank=0, exit_code=1, traceback=OWN)], "step 60"),
        # The program's own error while it trained the next step.
        ("TRAIN", 60, [RankFailure(rank=0, exit_code=1, traceback=OWN)], ""),
        ("TRAIN", 60, [RankFailure(rank=0, exit_code=1)], "step 60"),
        # Training continued after that save.
        ("TRAIN", 61, [], ""),
        ("SAVE", 61, [], ""),
    ],
)
def test_a_failed_save_explains_a_crash_only_if_nothing_was_trained_after_it(
    phase: str, completed: int, failures: list[RankFailure], unsaved: str
) -> None:
    report = NodeReport(
        exit_code=1, phases=(phase,), registered=1, alive=0, completed=completed, resumed=0
    )
    crash = CrashReport(failures=failures, failed_saves=[SaveFailure(step=60, error="[Errno 28]")])
    crash = CrashReport.of_all([CrashReport(), CrashReport.from_json(crash.to_json())])
    ended = Ended(ending="crashed", exit_code=1, reports=(report,), crash_report=crash)
    assert (unsaved in ended.unsaved) if unsaved else ended.unsaved == ""


def test_an_error_that_found_no_room_is_named() -> None:
    crash = CrashReport(unwritten="No space left on device: local rank 0 could not write its error")
    ended = Ended(ending="crashed", exit_code=1, reports=(), crash_report=crash)
    ending, _ = crash.classify(unsaved=ended.unsaved)
    assert ending.cause is Cause.STORAGE_FULL


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        ("ValueError: storage is full of surprises", None),
        ("AssertionError: the device is full of samples", None),
        ("KeyError: 'weights: nan'", None),
        ("KeyError: 'loss is inf'", None),
        ("IndexError: Connection refused", None),
        ("AttributeError: 'Cache' object has no attribute 'No space left on device'", None),
        ("TypeError: NCCL error() takes no arguments", None),
        # The same words where a system, a library or a program reports its state by them.
        ("RuntimeError: storage is full", Cause.STORAGE_FULL),
        ("OSError: disk is full", Cause.STORAGE_FULL),
        ("ValueError: [Errno 28] No space left on device: '/x'", Cause.STORAGE_FULL),
        ("ValueError: loss is nan", Cause.NUMERICS),
        ("AssertionError: gradients are not finite", Cause.NUMERICS),
        ("ConnectionRefusedError: [Errno 111] Connection refused", Cause.INFRASTRUCTURE),
        ("RuntimeError: NCCL error in: ProcessGroupNCCL.cpp", Cause.INFRASTRUCTURE),
    ],
)
def test_words_decide_only_in_exceptions_that_report_a_state(
    raised: str, cause: Cause | None
) -> None:
    found = find_cause(f'{TRACEBACK}:\n  File "t.py", line 1, in <module>\n{raised}')
    assert (found.rule.cause if found else None) is cause
    failure = RankFailure(rank=0, exit_code=1, traceback=f'{TRACEBACK}:\n  File "t.py"\n{raised}')
    ending, _ = classify_crash([failure])
    assert ending.cause is (cause or Cause.USER_ERROR)


@pytest.mark.parametrize("level", ["INFO", "DEBUG", "WARNING"])
def test_lines_of_a_log_that_report_no_error_decide_nothing(level: str) -> None:
    log = f"2026-11-26 10:00:00 {level} cache: the volume is full\n{level}:root:loss is nan\n"
    assert find_cause(log) is None
    assert find_cause(f"{log}t.py: write error: No space left on device") is not None
