"""What the journal of a live run says that needs a person; who failed first in a launch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pytest

from holdfast.api.attention import FILE, RootAcknowledgements, acknowledged_in
from holdfast.api.capacity import find_full_roots
from holdfast.api.findings import PROTECTION, QUEUE, SAVES, RunFacts, advice, find
from holdfast.api.schemas import Acknowledged
from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records import alerts
from holdfast.contracts.records.alerts import crashes, noticed

KINDS_OF: Final = {
    "alerts": alerts.KINDS,
    "saves": SAVES,
    "queue": QUEUE,
    "protection": PROTECTION,
}


def event(at: float, kind: EventKind, **data: Any) -> Event:
    facts = {"attempt": 1, **data}
    return Event(writer="a", opening=1, sequence=int(at), time=at, kind=kind, data=facts)


def facts(*events: Event, **given: Any) -> RunFacts:
    """The facts of a running run with these events, a minute after the last one."""
    now = events[-1].time + 60 if events else 0.0
    of = {kind: [one for one in events if one.kind in kinds] for kind, kinds in KINDS_OF.items()}
    return RunFacts(**{"state": "running", "now": now, **of, **given})


def kinds(*events: Event, **given: Any) -> list[str]:
    return [one["kind"] for one in find(facts(*events, **given))]


def crash(at: float, step: int | None, ending: str = "crashed") -> Event:
    return event(at, EventKind.LAUNCH_ENDED, launch=int(at), ending=ending, last_step=step)


def test_a_hang_is_reported_until_it_clears_or_the_next_launch() -> None:
    hang = event(1, EventKind.HANG_SUSPECTED, finding="rank 1 waits")
    assert kinds(hang) == ["hung"]
    assert kinds(hang, event(2, EventKind.HANG_CONFIRMED, finding="rank 1")) == ["hung"]
    assert kinds(hang, event(2, EventKind.HANG_CLEARED)) == []
    assert kinds(hang, event(2, EventKind.LAUNCH_STARTED, launch=2)) == []


def test_launches_that_fail_at_the_same_step_are_a_loop_until_a_step_follows() -> None:
    same = [crash(1, 40, "hung"), crash(2, 40, "hung")]
    (found,) = find(facts(*same, step=40))
    assert found["text"] == "2 launches in a row failed, and none got past step 40"
    assert kinds(*same, step=41) == []
    assert kinds(crash(1, 40), crash(2, 60)) == []
    assert kinds(crash(1, None), crash(2, None)) == ["restart_loop"]
    assert kinds(*same, crash(3, 50, "completed")) == []


def test_failed_saves_count_since_the_newest_checkpoint() -> None:
    failed = event(5, EventKind.SAVE_FAILED, checkpoint="c", step=5, error="disk full")
    (found,) = find(facts(failed, committed_at=4))
    assert found["text"] == "1 save failed since the newest checkpoint: disk full"
    assert kinds(failed, committed_at=6) == []


def test_a_limit_is_reported_while_it_is_passed() -> None:
    def passed(at: float, is_passed: bool) -> Event:
        facts = {"limit": "checkpoint_age_max_min", "passed": is_passed, "text": "too old"}
        return event(at, EventKind.LIMIT_PASSED, **facts)

    assert kinds(passed(1, True)) == ["checkpoint_old"]
    assert kinds(passed(1, True), passed(2, False)) == []


def test_a_crash_names_the_rank_its_host_and_its_signal_or_exit_status() -> None:
    killed = event(
        1, EventKind.LAUNCH_ENDED, launch=1, ending="crashed", last_step=9, rank=1, host="gpu-3",
        rank_exit_code=-9,
    )  # fmt: skip
    again = event(2, EventKind.LAUNCH_STARTED, launch=2)
    (found,) = crashes([killed, again, crash(3, 12)])
    assert (found["rank"], found["host"], found["signal"], found["exit_code"]) == (
        *(1, "gpu-3", "signal 9 (SIGKILL)", None),
    )
    (notice,) = noticed([killed, again])
    assert notice["text"] == (
        "launch 1 crashed at step 9 (rank 1 on gpu-3: killed by signal 9 (SIGKILL)) "
        "and was restarted in place"
    )


def test_a_silent_node_is_reported_until_it_answers_or_the_next_launch() -> None:
    silent = event(1, EventKind.NODE_SILENT, nodes=["gpu-3", "gpu-4"], count=2, silent=True)
    one, other = find(facts(silent))
    assert (one["text"], other["since"]) == (
        "gpu-3 sends no heartbeats; its agent or the node may be gone",
        1,
    )
    assert one["mark"] != other["mark"]
    back = event(2, EventKind.NODE_SILENT, nodes=["gpu-3"], count=1, silent=False)
    assert kinds(silent, back) == ["node_silent"]
    assert kinds(silent, event(2, EventKind.LAUNCH_STARTED, launch=2)) == []
    assert kinds(silent, state="waiting") == []


def test_a_slow_node_and_a_missing_metric_are_reported_until_they_end() -> None:
    slow = event(1, EventKind.NODE_SLOW, host="gpu-3", slow=True, text="gpu-3 is slow")
    assert kinds(slow) == ["node_slow"]
    assert kinds(slow, event(2, EventKind.NODE_SLOW, host="gpu-3", slow=False)) == []
    missing = {"key": "checkpoint.keep.best", "metric": "loss", "text": "no loss"}
    lacks = event(1, EventKind.METRIC_MISSING, **missing, missing=True)
    assert kinds(lacks) == ["metric_missing"]
    assert kinds(lacks, event(2, EventKind.METRIC_MISSING, **missing, missing=False)) == []


def test_an_unprotected_launch_is_reported_until_it_is_protected_or_ends() -> None:
    began = event(1, EventKind.LAUNCH_STARTED, launch=1)
    facts_of = {"launch": 1, "lacks": "copies", "host": "n1"}
    lacks = event(2, EventKind.PROTECTION, **facts_of, unprotected="1 MiB of memory are free")
    used = event(3, EventKind.PROTECTION, launch=1, lacks="spares", unprotected="no spare is left")
    one, other = find(facts(began, lacks, used))
    assert (one["kind"], one["level"], one["since"]) == ("unprotected", "warn", 2)
    assert one["text"] == "n1: 1 MiB of memory are free"
    assert one["action"].startswith("give the job more memory per node")
    assert (other["kind"], other["text"]) == ("spares_used", "no spare is left")
    assert other["action"].startswith("Relaunch the run at a convenient time to get spare nodes")
    again = event(4, EventKind.PROTECTION, **facts_of, unprotected="")
    assert kinds(began, lacks, used, again) == ["spares_used"]
    assert kinds(began, lacks, used, crash(1, 9)) == []
    assert kinds(began, lacks, used, state="waiting") == []


def saves(*steps: int, every: float = 60.0) -> list[Event]:
    """A resume at second 0 and a checkpoint every `every` seconds."""
    commits = [
        event(every * n, EventKind.COMMITTED, step=step) for n, step in enumerate(steps, start=1)
    ]
    return [event(0, EventKind.RESUMED), *commits]


def test_a_checkpoint_is_too_old_after_several_usual_intervals() -> None:
    usual = saves(10, 20, 30)
    assert kinds(*usual, now=180 + 600) == []
    (found,) = find(facts(*usual, now=180 + 601))
    assert found["kind"] == "checkpoint_old"
    assert found["text"] == "no checkpoint for 10 min, where one usually comes every 1 min"
    assert found["since"] == 180
    (fast,) = find(facts(*saves(10, 20, 30, every=10), now=30 + 601))
    assert fast["text"] == "no checkpoint for 10 min, where one usually comes every 10 s"
    slow = saves(10, 20, 30, every=1000)
    assert kinds(*slow, now=3000 + 3000) == []
    assert kinds(*slow, now=3000 + 3001) == ["checkpoint_old"]
    assert kinds(*usual, now=9999, state="waiting") == []
    hang = event(181, EventKind.HANG_SUSPECTED, finding="rank 1 waits")
    assert kinds(*usual, hang, now=9999) == ["hung"]
    limit = {"limit": "checkpoint_age_max_min", "passed": True, "text": "too old"}
    limited = event(181, EventKind.LIMIT_PASSED, **limit)
    assert [one["text"] for one in find(facts(*usual, limited, now=9999))] == ["too old"]


def test_without_two_checkpoints_the_interval_of_the_spec_counts() -> None:
    assert kinds(*saves(), now=9999) == []
    assert kinds(*saves(), now=901, interval_s=300) == ["checkpoint_old"]
    assert kinds(*saves(), now=899, interval_s=300) == []
    # Before the program trains, nothing is known.
    assert kinds(event(1, EventKind.COMMITTED, step=1), now=9999, interval_s=300) == []


def test_a_mirror_is_behind_if_copies_fail_or_do_not_come() -> None:
    copied = event(130, EventKind.MIRRORED, step=20, seconds=9.0)
    run = [*saves(10, 20), copied]
    assert kinds(*run, now=140, has_mirror=True) == []
    late = [*run, event(180, EventKind.COMMITTED, step=30)]
    assert kinds(*late, now=180 + 599, has_mirror=True) == []
    (found,) = [
        one
        for one in find(facts(*late, now=180 + 601, has_mirror=True))
        if one["kind"] == "mirror_behind"
    ]
    assert found["text"] == "the mirror lacks 1 checkpoint; newest copy: step 20"
    assert "mirror_behind" not in kinds(*late, now=999, has_mirror=False)
    failed = event(190, EventKind.MIRROR_FAILED, step=30, error="403 Forbidden")
    (found,) = find(facts(*late, failed, now=200, has_mirror=True))
    assert (found["level"], found["text"]) == (
        "bad",
        "1 copy to the mirror failed; newest copy: step 20; 403 Forbidden",
    )
    again = event(220, EventKind.MIRRORED, step=30, seconds=9.0)
    assert kinds(*late, failed, again, now=230, has_mirror=True) == []


def test_a_job_is_pending_for_too_long_with_the_reason_of_slurm() -> None:
    asked = event(0, EventKind.ATTEMPT_SUBMITTED, job_id="7")

    def pending(detail: str) -> list[Event]:
        return [asked, event(5, EventKind.ATTEMPT_STATE, state="pending", detail=detail)]

    queued: dict[str, Any] = {"state": "queued", "job_id": "7"}
    assert kinds(*pending("Priority"), now=1800, **queued) == []
    (found,) = find(facts(*pending("Priority"), now=1801, **queued))
    assert (found["level"], found["text"]) == ("warn", "the job 7 is pending: Priority")
    assert "fewer GPUs" in found["action"]
    (held,) = find(facts(*pending("JobHeldAdmin"), now=121, **queued))
    assert (held["level"], held["action"]) == ("bad", "release the job with `scontrol release 7`")
    assert kinds(asked, now=1801, **queued) == ["pending_long"]


@pytest.mark.parametrize(
    ("reason", "is_stuck", "words"),
    [
        ("BadConstraints", True, "correct `resources`"),
        ("PartitionTimeLimit", True, "correct `resources`"),
        ("PartitionDown", True, "administrators"),
        ("ReqNodeNotAvail, UnavailableNodes:gpu-3", False, "sinfo -R"),
        ("AssocGrpGRES", False, "account or QOS"),
        ("QOSMaxJobsPerUserLimit", False, "account or QOS"),
        ("Resources", False, "fewer GPUs"),
        ("", False, "fewer GPUs"),
    ],
)
def test_advice_follows_the_reason_of_slurm(reason: str, is_stuck: bool, words: str) -> None:
    assert advice(reason)[0] is is_stuck
    assert words in advice(reason)[1]


def test_a_run_that_waits_between_attempts_for_too_long_is_reported() -> None:
    ended = event(0, EventKind.ATTEMPT_ENDED, state="node_failed")
    waiting: dict[str, Any] = {"state": "waiting", "reason": "no node is free"}
    assert kinds(ended, now=1800, **waiting) == []
    (found,) = find(facts(ended, now=1801, **waiting))
    assert found["text"] == "no attempt has followed: no node is free"


def test_odd_journal_lines_break_nothing() -> None:
    """Another user may write anything into a journal."""
    names = (
        *("nodes", "silent", "slow", "host", "key", "metric", "limit", "passed", "missing"),
        *("step", "seconds", "error", "finding", "last_step", "ending", "state", "detail"),
    )
    values: tuple[Any, ...] = (None, [], {}, -1, 1e300, True, "x" * 9)
    for value in values:
        odd = dict.fromkeys(names, value)
        events = [event(1, kind, **odd) for kinds in KINDS_OF.values() for kind in kinds]
        for state in ("running", "queued", "waiting"):
            find(facts(*events, state=state, now=99_999, has_mirror=True))
    assert acknowledged_in([event(1, EventKind.ALERT_ACKNOWLEDGED)])


def full(monkeypatch: pytest.MonkeyPatch, free: int, inodes: int = 900) -> None:
    values = (4096, 4096, 1000, free, free, 1000, inodes, inodes, 0, 255)
    monkeypatch.setattr("os.statvfs", lambda _: os.statvfs_result(values))


def test_a_root_is_full_by_its_share_its_next_checkpoints_or_its_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def level(sizes: dict[Path, int]) -> list[str]:
        return [one["level"] for _, one in find_full_roots(sizes)]

    full(monkeypatch, free=50)
    assert level({tmp_path: 0}) == []
    assert level({tmp_path: 50 * 4096}) == ["warn"]
    assert level({tmp_path: 51 * 4096}) == ["bad"]
    # Both roots are on one file system.
    (other := tmp_path / "other").mkdir()
    assert level({tmp_path: 30 * 4096, other: 30 * 4096}) == ["bad"]
    full(monkeypatch, free=49)
    assert level({tmp_path: 0}) == ["warn"]
    full(monkeypatch, free=500, inodes=49)
    assert [one["text"] for _, one in find_full_roots({tmp_path: 0})] == [
        f"{tmp_path} has 49 of 1000 inodes left"
    ]
    assert level({tmp_path / "gone": 0}) == []


def test_the_first_acknowledgement_counts_and_a_solved_problem_is_forgotten(
    tmp_path: Path,
) -> None:
    lines = [
        event(at, EventKind.ALERT_ACKNOWLEDGED, alert="a:hung:5", by=by, note=by)
        for at, by in ((1, "ann"), (2, "bob"))
    ]
    assert acknowledged_in(lines)["a:hung:5"].by == "ann"
    roots = RootAcknowledgements(tmp_path)
    done = [Acknowledged(by=by, at="2026-01-01T00:00:00Z") for by in ("ann", "bob")]
    assert [roots.add("/runs:storage_full", one).by for one in done] == ["ann", "ann"]
    again = RootAcknowledgements(tmp_path)
    assert again.get("/runs:storage_full") == done[0]
    again.keep([])
    assert RootAcknowledgements(tmp_path).get("/runs:storage_full") is None
    (tmp_path / FILE).write_text("not JSON")
    assert RootAcknowledgements(tmp_path).get("/runs:storage_full") is None


def ended(**data: Any) -> Event:
    facts = {"state": "lost", "started_at": 1.0, "ended_at": 40.0, "hosts": ["gpu-1", "gpu-2"]}
    return event(50, EventKind.ATTEMPT_ENDED, **{**facts, **data})


def test_a_dead_agent_is_named_until_the_next_attempt_is_submitted() -> None:
    (found,) = find(facts(ended(), state="waiting", is_supervised=False))
    assert found["text"] == (
        "the agent on gpu-1 of attempt 1 (2 nodes) is dead: no heartbeats since 00:00:40 UTC, "
        "and no recorded outcome"
    )
    assert (found["kind"], found["level"], found["since"]) == ("silent", "bad", 40.0)
    assert "Relaunch" in found["action"]
    # A supervisor continues the run without a person.
    (found,) = find(facts(ended(), state="waiting"))
    assert (found["level"], "supervisor starts the next" in found["action"]) == ("warn", True)
    assert kinds(ended(), state="queued") == kinds(ended(), state="running") == []


def test_an_attempt_that_ended_otherwise_has_no_dead_agent() -> None:
    for state in ("completed", "preempted", "node_failed", "cancelled", "failed"):
        assert kinds(ended(state=state), state="waiting") == []
    assert kinds(ended(started_at=None), state="waiting") == []
    assert kinds(ended(), ended(state="preempted", attempt=2), state="waiting") == []


@pytest.mark.parametrize("at", [None, -1, 1e300, float("nan"), 10**400, "x"])
def test_the_end_of_an_attempt_may_be_any_value(at: object) -> None:
    (found,) = find(facts(ended(ended_at=at, hosts={"a": 1}), state="waiting"))
    assert "no heartbeats since 00:00:50 UTC" in found["text"]
