"""The order of a run's errors: causes first, equal errors as one, clocks only where they may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from holdfast.api.errors.models import ErrorSource
from holdfast.api.errors.records import ErrorRecord, LaunchEnd, launch_ends, of_journal
from holdfast.api.errors.timeline import EqualErrors, failure_text, merge_errors, order_note
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.workers.decisions.causes import RankFailure

HOSTS: Final = {0: "node-a", 1: "node-b"}
LOST_PEER: Final = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 9, in main\n'
    "    dist.all_reduce(loss)\n"
    "ConnectionError: Connection closed by peer [10.0.0.7]:{port}\n"
)
MISTAKE: Final = (
    "Traceback (most recent call last):\n"
    '  File "train.py", line 4, in main\n'
    "    loss = criterion(batch)\n"
    "ValueError: batch {port} has no labels\n"
)


def raised(rank: int, at: float, text: str = LOST_PEER, launch: int = 1) -> ErrorRecord:
    """A rank's error file. Each rank has other numbers in its error."""
    traceback, host = text.format(port=4000 + rank), HOSTS[rank // 4]
    failure = RankFailure(rank=rank, exit_code=1, timestamp=at, traceback=traceback, host=host)
    return of_rank(failure, at, launch)


def killed(rank: int, launch: int = 1, signal: int = 9) -> ErrorRecord:
    """A rank of torchrun's report that left no error, so nobody knows when it died."""
    failure = RankFailure(rank=rank, exit_code=-signal, host=HOSTS[rank // 4])
    return of_rank(failure, 0.0, launch)


def of_rank(failure: RankFailure, at: float, launch: int) -> ErrorRecord:
    kind, text = failure_text(failure.exit_code, failure.traceback, "")
    return ErrorRecord(
        attempt=1,
        launch=launch,
        source=ErrorSource.RANK,
        kind=kind,
        text=text,
        at=at,
        clock=failure.host if at else "",
        host=failure.host,
        failure=failure,
        traceback=failure.traceback,
    )


class Journal:
    """One writer's lines, in order."""

    def __init__(self, writer: str = "node-0000") -> None:
        self.writer, self.lines = writer, list[Event]()

    def tell(self, kind: EventKind, at: float, **data: Any) -> None:
        number = len(self.lines)
        line = Event(writer=self.writer, opening=1, sequence=number, time=at, kind=kind, data=data)
        self.lines.append(line)


def crashed_launch(journal: Journal, number: int, at: float, **facts: Any) -> None:
    journal.tell(EventKind.LAUNCH_STARTED, at, attempt=1, launch=number)
    ended = {"attempt": 1, "launch": number, "ending": "crashed", "exit_code": 1, **facts}
    journal.tell(EventKind.LAUNCH_ENDED, at + 60, **ended)


def merged(records: Sequence[ErrorRecord], *journals: Journal) -> list[EqualErrors]:
    lines = [line for journal in journals for line in journal.lines]
    return merge_errors([*records, *of_journal(1, lines, HOSTS)], launch_ends(lines))


def test_a_killed_rank_comes_before_the_equal_errors_of_its_peers() -> None:
    journal = Journal()
    crashed_launch(journal, 1, 100.0, rank=7, rank_exit_code=-9, host="node-b", last_step=30)
    # The clock of node-b is an hour behind, so its ranks seem to have failed long before.
    peers = [raised(rank, 159.0) for rank in range(4)] + [raised(rank, -3441.0) for rank in (4, 5)]
    first, others, end = merged([*peers, raised(6, -3440.0), killed(7)], journal)
    assert (first.is_first, first.is_secondary) == (True, False)
    assert first.text == "rank 7 on node-b: killed by signal 9 (SIGKILL)"
    assert others.ranks == [0, 1, 2, 3, 4, 5, 6]
    assert others.is_secondary
    assert others.text.startswith("ranks 0-6 on 2 hosts: ConnectionError: Connection closed by")
    assert others.text.endswith(", after rank 7 was killed")
    assert end.text == "launch 1 crashed after step 30; torchrun ended with exit status 1"


def test_equal_errors_of_all_ranks_name_the_rank_that_was_first() -> None:
    journal = Journal()
    crashed_launch(journal, 1, 100.0, rank=2, rank_exit_code=1, host="node-a", cause="user_error")
    records = [raised(rank, 150.0 + rank, MISTAKE) for rank in range(8)]
    first, end = merged(records, journal)
    assert first.text == "ranks 0-7 on 2 hosts: ValueError: batch 4002 has no labels; rank 2 first"
    assert not first.is_secondary
    assert end.leader.is_end


def test_without_a_named_rank_the_records_of_the_ranks_decide() -> None:
    journal = Journal()
    crashed_launch(journal, 1, 100.0)
    # A lost connection is the failure of another rank, even if its time is earlier.
    first, second, _ = merged([raised(0, 150.0), raised(5, 151.0, MISTAKE)], journal)
    assert first.ranks == [5]
    assert second.text.endswith(", after rank 5 failed")


@pytest.mark.parametrize(
    ("kind", "facts", "cause", "after"),
    [
        (EventKind.NODE_LOST, {"host": "node-b", "detail": "no answer"}, "node_failure", "node-b"),
        (EventKind.NUMERICS, {"action": "stop", "reason": "loss is nan"}, "numerics", "bad loss"),
        (EventKind.HANG_CONFIRMED, {"finding": "missing: rank 3"}, "hang", "the hang"),
    ],
)
def test_what_the_agents_saw_comes_before_the_ranks_errors(
    kind: EventKind, facts: dict[str, Any], cause: str, after: str
) -> None:
    journal = Journal()
    journal.tell(EventKind.LAUNCH_STARTED, 100.0, attempt=1, launch=1)
    journal.tell(kind, 170.0, attempt=1, **facts)
    ended = {"ending": "hung" if cause == "hang" else "crashed", "cause": cause}
    journal.tell(EventKind.LAUNCH_ENDED, 171.0, attempt=1, launch=1, **ended)
    first, peers, _ = merged([raised(0, 160.0), raised(1, 160.5)], journal)
    assert (first.leader.kind, first.is_first, first.leader.launch) == (kind, True, 1)
    assert after in peers.text


def test_lines_of_one_journal_keep_their_order_when_the_clock_is_set_back() -> None:
    journal = Journal()
    journal.tell(EventKind.LAUNCH_STARTED, 500.0, attempt=1, launch=1)
    for at, host in ((510.0, "node-a"), (20.0, "node-b"), (25.0, "node-c")):
        journal.tell(EventKind.NODE_UNHEALTHY, at, attempt=1, host=host, check="gpu", detail="Xid")
    other = Journal("node-0001")
    other.tell(EventKind.NODE_UNHEALTHY, 505.0, attempt=1, launch=1, host="node-d", check="gpu")
    found = merged([], journal, other)
    assert [one.leader.host for one in found] == ["node-d", "node-a", "node-b", "node-c"]
    assert {one.leader.launch for one in found} == {1}


def test_launches_follow_each_other_and_the_attempts_end_is_last() -> None:
    journal, flow = Journal(), Journal("flow")
    crashed_launch(journal, 1, 100.0, rank=0, rank_exit_code=1)
    crashed_launch(journal, 2, 200.0, rank=1, rank_exit_code=1)
    # The supervisor's clock is behind.
    ended = {"state": "failed", "cause": "user_error", "evidence": ["rank 1 ended", "no restart"]}
    flow.tell(EventKind.ATTEMPT_ENDED, 5.0, attempt=1, **ended)
    records = [raised(1, 250.0, MISTAKE, launch=2), raised(0, 150.0, MISTAKE)]
    found = merged(records, flow, journal)
    assert [one.leader.launch for one in found] == [1, 1, 2, 2, 0]
    assert [one.is_first for one in found] == [True, False, True, False, False]
    assert found[-1].text == (
        "the attempt ended as failed, cause user error: rank 1 ended; no restart"
    )


def test_repeated_lines_are_one_entry_and_the_first_cause_of_an_attempt_without_launch() -> None:
    flow = Journal("flow")
    ended = {"state": "lost", "cause": "infrastructure", "evidence": ["the job is gone"]}
    flow.tell(EventKind.ATTEMPT_ENDED, 5.0, attempt=1, **ended)
    (only,) = merged([], flow)
    assert only.is_first
    assert only.leader.clock == "the supervisor"
    journal = Journal()
    journal.tell(EventKind.LAUNCH_STARTED, 100.0, attempt=1, launch=1)
    for step in (10, 20, 30):
        facts = {"checkpoint": f"step-{step:08d}.a0001.l01", "step": step, "error": "disk full"}
        journal.tell(EventKind.SAVE_FAILED, 100.0 + step, attempt=1, launch=1, **facts)
    (saves,) = merged([], journal)
    assert saves.text == "step-00000010.a0001.l01 was not saved: disk full (3 times)"
    assert saves.until == 130.0


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        (EventKind.LAUNCH_ENDED, {"launch": 1, "ending": "stopped"}),
        (EventKind.ATTEMPT_ENDED, {"state": "preempted"}),
        (EventKind.ATTEMPT_ENDED, {"state": "completed"}),
        (EventKind.ROLLED_BACK, {"to": "step-00000010.a0001.l01"}),
        (EventKind.NODE_SILENT, {"silent": [], "nodes": ["node-a"]}),
        (EventKind.HANG_CLEARED, {"dumps": ["x"]}),
    ],
)
def test_what_is_no_error_is_left_out(kind: EventKind, facts: dict[str, Any]) -> None:
    journal = Journal()
    journal.tell(kind, 1.0, attempt=1, **facts)
    assert of_journal(1, journal.lines, HOSTS) == []


def test_a_suspicion_counts_only_while_nothing_answers_it() -> None:
    journal, facts = Journal(), {"finding": "rank 1 waits", "dumps": ["attempts/0001/dumps/x"]}
    journal.tell(EventKind.HANG_SUSPECTED, 1.0, attempt=1, launch=1, **facts)
    assert [one.kind for one in of_journal(1, journal.lines, HOSTS)] == ["hang_suspected"]
    journal.tell(EventKind.HANG_CONFIRMED, 9.0, attempt=1, launch=1, **facts)
    assert [one.kind for one in of_journal(1, journal.lines, HOSTS)] == ["hang_confirmed"]


def test_a_hang_names_the_ranks_that_the_flight_records_blame() -> None:
    journal, facts = Journal(), {"finding": "missing: rank 3", "blamed": [3, True, -1, "x"]}
    journal.tell(EventKind.HANG_CONFIRMED, 9.0, attempt=1, launch=1, **facts)
    (hang,) = merged([], journal)
    assert (hang.ranks, hang.text) == ([3], "hung and ended: missing: rank 3")


def test_the_note_about_the_order_names_the_clocks_and_their_problems() -> None:
    one = EqualErrors(records=(raised(0, 5.0),))
    assert order_note([one], []) == "All times are by the clock of node-a."
    two = EqualErrors(records=(raised(5, 5.0),))
    note = order_note([one, two], ["the clock of node-b is wrong"])
    assert note.startswith("Times are by the clocks of node-a, node-b, which may differ.")
    assert note.endswith("the clock of node-b is wrong")
    assert order_note([EqualErrors(records=(killed(1),))], []) == ""


def test_errors_of_thousands_of_ranks_are_merged_quickly() -> None:
    journal = Journal()
    crashed_launch(journal, 1, 100.0, rank=7, rank_exit_code=-9)
    failures = [
        RankFailure(rank=rank, exit_code=1, traceback=LOST_PEER.format(port=rank), host="n")
        for rank in range(4096)
        if rank != 7
    ]
    found = merged([killed(7), *(of_rank(one, 150.0, 1) for one in failures)], journal)
    assert [len(one.ranks) for one in found] == [1, 4095, 0]
    assert "ranks 0-6,8-4095 on n:" in found[1].text


def test_a_launch_that_still_runs_has_no_first_cause() -> None:
    ends: dict[int, LaunchEnd] = {}
    assert merge_errors([], ends) == []
    journal = Journal()
    journal.tell(EventKind.LAUNCH_STARTED, 1.0, attempt=1, launch=1)
    assert launch_ends(journal.lines)[1].ending == ""
