"""Errors and stacks are read from the files of an attempt, within bounds and never outside it."""

from __future__ import annotations

import json
import math
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.api.errors.files import ERROR_FILE_BYTES_MAX, READ_S, ErrorFiles, ReadBudget
from holdfast.api.errors.models import ErrorSource
from holdfast.api.errors.records import LaunchEnd
from holdfast.api.errors.stacks import blame_text, group_flights, group_stacks, read_stacks
from holdfast.api.errors.timeline import EqualErrors, merge_errors
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import AttemptPaths, RunPaths
from holdfast.contracts.node.flight import CollectiveCall, GroupFlight, RankFlight
from holdfast.workers.agent.watch.stack_text import read_dump, read_py_spy

HOSTS: Final = {0: "node-a", 1: "node-b"}
MISTAKE: Final = 'Traceback (most recent call last):\n  File "t.py", line 4, in m\nValueError: no\n'
REPORT: Final = """\
W1128 torch/distributed/elastic/multiprocessing/api.py Sending process 71 closing signal SIGTERM
============================================================
[0]:
  time      : 2026-11-28_13:00:00
  host      : node-a
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 72)
  error_file: <N/A>
[1]:
  time      : 2026-11-28_13:00:02
  host      : node-a
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 71)
  error_file: <N/A>
"""
END: Final = LaunchEnd(
    number=1, ending="crashed", cause="", rank=1, code=-9, host="node-a", started_at=1.0
)


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    found = RunPaths(tmp_path / "gpt").attempt(1)
    found.directory.mkdir(parents=True)
    return found


def make_rank(attempt: AttemptPaths, rank: int, node: int = 0, local: int | None = None) -> Path:
    """torchrun's folder of a rank, with the links by which its logs are found."""
    link = attempt.rank_log(node, 1, rank, "stderr")
    folder = link.parent / "none_x7" / "attempt_0" / str(rank if local is None else local)
    folder.mkdir(parents=True)
    (folder / "stderr.log").touch()
    link.symlink_to(os.path.relpath(folder / "stderr.log", link.parent))
    return folder


def error_file(folder: Path, text: str = MISTAKE, at: object = 50) -> None:
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": at}}
    (folder / "error.json").write_text(json.dumps({"message": message}))


def read(attempt: AttemptPaths, end: LaunchEnd = END, **budget: Any) -> list[tuple[Any, ...]]:
    files = ErrorFiles(attempt, HOSTS, ReadBudget(**budget))
    return [
        (one.failure.rank, one.kind, one.at, one.clock)
        for one in files.of_ranks(end)
        if one.failure is not None
    ]


def test_error_files_and_torchruns_report_say_how_each_rank_failed(attempt: AttemptPaths) -> None:
    for rank in (0, 1):
        make_rank(attempt, rank)
    error_file(make_rank(attempt, 2, node=1, local=0))
    (attempt.node_logs(0) / "l01" / "torchrun.log").write_text(REPORT)
    # Rank 0 was ended only because rank 1 had been killed.
    assert read(attempt) == [(1, "killed", 0.0, ""), (2, "exception", 50.0, "node-b")]
    folder = attempt.node_logs(0) / "l01" / "none_x7" / "attempt_0" / "0"
    (folder / "stderr.log").write_text(f"a warning\n{MISTAKE}")
    assert (0, "exception", 0.0, "") in read(attempt)


def test_a_rank_that_the_journal_names_is_there_without_any_file(attempt: AttemptPaths) -> None:
    assert read(attempt) == [(1, "killed", 0.0, "")]


def test_logs_of_a_node_that_took_another_place_are_found(attempt: AttemptPaths) -> None:
    folder = make_rank(attempt, 5, node=1, local=1)
    error_file(folder)
    link = attempt.rank_log(0, 1, 3, "stderr")
    link.parent.mkdir(parents=True)
    link.symlink_to(os.path.relpath(folder / "stderr.log", link.parent))
    assert (3, "exception", 50.0, "node-a") in read(attempt)


@pytest.mark.more
def test_the_files_of_4096_ranks_are_read_and_merged_within_the_bound(
    attempt: AttemptPaths,
) -> None:
    frames = "".join(f'  File "m{n}.py", line {n}, in f\n    return f(x)\n' for n in range(25))
    for rank in range(4096):
        text = f"Traceback (most recent call last):\n{frames}OSError: rank {rank}: closed by peer\n"
        error_file(make_rank(attempt, rank, node=rank // 8, local=rank % 8), text, at=50 + rank % 9)

    def merged() -> list[EqualErrors]:
        # CPU time is compared instead, because a loaded machine needs longer.
        files = ErrorFiles(attempt, HOSTS, ReadBudget(ends_at=math.inf))
        return merge_errors(files.of_ranks(END), {1: END})

    began = time.process_time()
    first, peers = merged()
    assert time.process_time() - began < READ_S
    assert (first.ranks, len(peers.records)) == ([1], 4095)
    tracemalloc.start()
    try:
        merged()
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[1]",
        b'{"message": {"extraInfo": {"timestamp": "soon"}}}',
        b'{"message": {"message": "x", "extraInfo": 5}}',
        b'{"message": {"message": "x", "extraInfo": {"timestamp": 1e999}}}',
        b"[" * 100_000,
        b"{" + b" " * ERROR_FILE_BYTES_MAX + b"}",
    ],
)
def test_odd_error_files_are_no_errors(attempt: AttemptPaths, content: bytes) -> None:
    (make_rank(attempt, 0) / "error.json").write_bytes(content)
    found = read(attempt)
    assert {one[0] for one in found} <= {0, 1}
    assert all(one[2] == 0.0 for one in found)


def test_links_and_pipes_lead_nowhere(attempt: AttemptPaths, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    error_file(secret)
    (secret / "stderr.log").write_text(MISTAKE)
    link = attempt.rank_log(0, 1, 0, "stderr")
    link.parent.mkdir(parents=True)
    link.symlink_to(secret / "stderr.log")
    (make_rank(attempt, 2) / "error.json").symlink_to(secret / "error.json")
    os.mkfifo(make_rank(attempt, 3) / "error.json")
    (attempt.logs / "41_0_log.err").symlink_to(secret / "stderr.log")
    assert read(attempt) == [(1, "killed", 0.0, "")]
    assert ErrorFiles(attempt, HOSTS, ReadBudget()).of_others() == []


def test_what_bounds_leave_out_is_counted_and_the_first_rank_is_read_first(
    attempt: AttemptPaths,
) -> None:
    for rank in range(6):
        error_file(make_rank(attempt, rank))
    budget = ReadBudget(files=2)
    files = ErrorFiles(attempt, HOSTS, budget)
    found = [one.failure.rank for one in files.of_ranks(END) if one.failure]
    assert (found, budget.unread) == ([1, 0], 4)
    late = ReadBudget(ends_at=time.monotonic() - 1)
    ErrorFiles(attempt, HOSTS, late).of_ranks(END)
    assert late.unread == 6


def test_agents_and_flushers_report_their_tracebacks(attempt: AttemptPaths) -> None:
    attempt.node_logs(1).mkdir(parents=True)
    attempt.flusher_log(1).write_text(f"{'x' * 70_000} one long line\n{MISTAKE}")
    (attempt.logs / "41_0_log.err").write_text(MISTAKE)
    (attempt.logs / "41_0_log.out").write_text(MISTAKE)
    launch = attempt.node_logs(0) / "l01"
    launch.mkdir(parents=True)
    # This only says that ranks have failed, which their own records say, with one of them quoted.
    torchrun = MISTAKE.replace("ValueError: no", "torch.elastic.ChildFailedError: train.py")
    quoted = f"  traceback : {MISTAKE}{'-' * 60}\n{'=' * 60}\n"
    (launch / "torchrun.log").write_text(f"{torchrun}{'=' * 60}\n{quoted}")
    found = ErrorFiles(attempt, HOSTS, ReadBudget()).of_others()
    assert [(one.source, one.text) for one in found] == [
        (ErrorSource.AGENT, "the agent: ValueError: no"),
        (ErrorSource.FLUSHER, "the flusher of node 1: ValueError: no"),
    ]


def py_spy(pid: int, *places: tuple[str, str, int]) -> str:
    """The text of a dump by py-spy: the main thread's frames, and a helper thread."""
    frames = [{"name": n, "filename": f, "line": at, "locals": None} for n, f, at in places]
    main = {"os_thread_id": pid, "active": False, "frames": frames}
    helper = {"os_thread_id": pid + 1, "thread_name": "pin", "active": False, "frames": frames[:1]}
    return read_py_spy(0, pid, json.dumps([helper, main]).encode())[1]


REDUCE: Final = ("all_reduce", "/lib/torch/distributed/distributed_c10d.py", 2501)
AT_LOSS: Final = ("main", "/home/ann/train.py", 40)
FAULT: Final = (
    "Thread 0x00007f01 (most recent call first):\n"
    '  File "/lib/python3.11/threading.py", line 320 in wait\n\n'
    "Current thread 0x00007f02 (most recent call first):\n"
    '  File "/home/ann/data.py", line 7 in read\n'
    '  File "/home/ann/train.py", line 39 in main\n'
)


def test_ranks_with_equal_stacks_are_one_group_and_the_odd_one_is_named() -> None:
    waits = [read_dump(rank, py_spy(90 + rank, REDUCE, AT_LOSS)) for rank in (0, 1, 3)]
    # Elsewhere in the same function of a library, which says nothing.
    waits.append(read_dump(4, py_spy(99, (*REDUCE[:2], 2507), AT_LOSS)))
    reads, gone = read_dump(2, FAULT), read_dump(5, "no stacks: py-spy: no such process\n")
    most, reader, other = group_stacks([*waits, reads, gone])
    assert (most.ranks, most.waits, most.is_odd) == ("0,1,3,4", True, False)
    assert most.frames[1] == "main (/home/ann/train.py:40)"
    assert (reader.ranks, reader.waits, reader.is_odd) == ("2", False, True)
    assert reader.frames[0] == "read (/home/ann/data.py:7)"
    assert (other.ranks, other.problem) == ("5", "py-spy: no such process")
    assert group_stacks([]) == []


def test_the_dumps_of_all_nodes_are_one_and_say_what_the_journal_found(
    attempt: AttemptPaths,
) -> None:
    for node, rank in ((0, 0), (1, 1)):
        folder = attempt.dump(node, 2)
        folder.mkdir(parents=True)
        (folder / f"rank-{rank:05d}.1.txt").write_text(FAULT)
        (folder / f"rank-{rank:05d}.3.txt").write_text(py_spy(7, REDUCE, AT_LOSS))
    (attempt.dump(1, 2) / "rank-00007.1.txt").symlink_to("/etc/passwd")
    attempt.dump(0, 1).mkdir()
    data = {
        "attempt": 1,
        "launch": 1,
        "finding": "missing: rank 1",
        "dumps": [f"attempts/0001/dumps/node-{node:04d}-02" for node in (0, 1)],
    }
    confirmed = Event(
        writer="node-0000",
        opening=1,
        sequence=1,
        time=9.0,
        kind=EventKind.HANG_CONFIRMED,
        data=data,
    )
    first, second = read_stacks(attempt, [confirmed], (), ReadBudget())
    assert (first.number, first.state, first.finding) == (2, "confirmed", "missing: rank 1")
    (group,) = first.groups
    assert (group.ranks, group.ranks_count, first.unread) == ("0,1", 2, 1)
    assert first.files == ["attempts/0001/dumps/node-0000-02", "attempts/0001/dumps/node-0001-02"]
    assert (second.number, second.state, second.groups) == (1, "unreported", [])


def flight(rank: int, sequence: int, *, is_open: bool = True, members: str = "0-3") -> RankFlight:
    call = CollectiveCall(
        sequence=sequence, order=sequence, name="all_reduce", state="started", place="train.py:4"
    )
    group = GroupFlight(
        name="0", about="default_pg", members=members, newest=call, first=call if is_open else None
    )
    return RankFlight(rank=rank, groups=(group,), latest=call)


def test_flight_records_are_grouped_by_the_call_at_which_ranks_are() -> None:
    records = [*(flight(rank, 41) for rank in (0, 1, 3)), flight(2, 40, is_open=False)]
    most, odd = group_flights(records)
    assert (most.ranks, most.call, most.state) == ("0,1,3", "all_reduce 41", "started")
    assert (odd.ranks, odd.call, odd.state, odd.is_odd) == ("2", "all_reduce 40", "completed", True)
    assert blame_text(records).startswith("rank 2 is missing in all_reduce 41")
    assert group_flights([flight(0, 4, is_open=False)]) == []


def test_records_with_too_large_groups_are_not_merged() -> None:
    many = [flight(rank, 41, members=f"{rank}-131000") for rank in range(40)]
    assert blame_text(many) == (
        "the flight records have too many process groups to merge them here"
    )
    assert blame_text([flight(0, 41, members="all of them")]) == ""
