"""What `show`, `runs` and `doctor` print for runs that failed or have no supervisor."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.support.cli_calls import Call
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.flows.supervisor.flow_lock import FlowLock


@pytest.mark.parametrize("is_decided", [True, False])
def test_show_prints_the_reason_of_a_failure_once(call: Call, root: Path, is_decided: bool) -> None:
    folder = RunFolder(root, "alga", "u" * 32)
    folder.submit(1, 2, time.time())
    who, error = "rank 1 ended with exit code 1", "RuntimeError: a bad batch at step 7"
    frames = 'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    go()'
    facts = {"evidence": [f"{who}: {error}", "kernel: all quiet"], "ended_at": time.time()}
    folder.tell(
        "flow",
        EventKind.ATTEMPT_ENDED,
        **{"attempt": 1, "state": "failed", "cause": "user_error", **facts},
        traceback=f"{frames}\n{error}\n",
    )
    if is_decided:
        reason = f"user_error twice: {who}: {error}"
        data = {"after_attempt": 1, "action": "stop", "reason": reason}
        folder.tell("flow", EventKind.DECISION, **data)
    shown = call("show", "alga")
    assert shown.out.count(error) == 1, shown.out
    assert shown.out.count(who) == 1
    assert shown.out.count("kernel: all quiet") == 1
    assert frames in shown.out
    assert error in call("show", "alga", "--json").json["attempts"][0]["traceback"]


def test_a_live_run_without_a_supervisor_is_reported_by_every_command(
    call: Call, root: Path, tmp_path: Path
) -> None:
    """The locks are real: a supervisor holds one; the holders of the others are gone."""
    for name in ("kept", "lost", "new"):
        folder = RunFolder(root, name, name[0] * 32)
        folder.submit(1, 2, time.time())
    ended = RunFolder(root, "ended", "e" * 32)
    ended.submit(1, 2, time.time())
    facts = {"attempt": 1, "state": "completed", "cause": None, "evidence": []}
    ended.tell("flow", EventKind.ATTEMPT_ENDED, **facts, ended_at=time.time())
    # A paused run needs none: the order that continues it starts one.
    held = RunFolder(root, "held", "h" * 32)
    held.submit(1, 2, time.time())
    held.tell("cli", EventKind.OPERATOR_REQUEST, action="pause", by="ann", after_attempt=1)
    facts = {**facts, "state": "cancelled", "cause": "operator"}
    held.tell("flow", EventKind.ATTEMPT_ENDED, **facts, ended_at=time.time())
    (root / "broken").mkdir()
    (root / "broken" / "spec.json").write_text("{")
    (root / "broken" / "flow.lock").touch()
    for name in ("kept", "lost", "ended", "held"):
        with FlowLock(RunPaths(root / name).flow_lock):
            pass
    with FlowLock(RunPaths(root / "kept").flow_lock) as lock:
        assert lock.try_take()
        rows = {row["run"]: row for row in call("runs", "--json").json}
        words = "this host sees no supervisor of lost; `holdfast supervise lost` starts one"
        reported = {name: row["warnings"] for name, row in rows.items()}
        assert reported.pop("lost") == [words]
        assert set(reported) == {"kept", "new", "ended", "held", "broken"}
        assert not any(reported.values())
        assert rows["held"]["state"] == "paused"
        assert call("show", "held", "--json").json["warnings"] == []
        assert f"warning: {words}" in call("runs").out
        assert words in call("show", "lost", "--json").json["warnings"]
        checks = {one["name"]: one for one in call("doctor", "--json").json["checks"]}
    assert checks["supervisors"]["level"] == "warn"
    assert checks["supervisors"]["detail"].endswith("1 live run: lost")
    assert checks["supervisors"]["next_step"] == "holdfast supervise lost"
    moved = tmp_path / "other place"
    root.rename(moved)
    checks = {one["name"]: one for one in call("doctor", "--root", moved, "--json").json["checks"]}
    assert checks["supervisors"]["detail"].endswith("2 live runs: kept, lost")
    assert checks["supervisors"]["next_step"] == f"holdfast supervise --all --root '{moved}'"


def test_show_reports_an_unhealthy_node_and_its_host(call: Call, root: Path) -> None:
    folder = RunFolder(root, "alga", "u" * 32)
    folder.submit(1, 2, time.time())
    detail = "the all-reduce with n3 failed: the check took longer than 60 s: rank 8: timed out"
    facts = {"attempt": 1, "host": "n7", "check": "allreduce", "detail": detail}
    folder.tell("node-0000", EventKind.NODE_UNHEALTHY, **facts)
    evidence = [f"n7 is unhealthy: allreduce: {detail}"]
    ending = {"state": "node_failed", "cause": "node_failure", "evidence": evidence}
    folder.tell(
        "flow",
        EventKind.ATTEMPT_ENDED,
        **{"attempt": 1, **ending, "unhealthy_hosts": ["n7"], "ended_at": time.time()},
    )
    told = call("show", "alga", "--json").json
    (alert,) = told["noticed"]
    assert (alert["kind"], alert["attempt"], alert["text"]) == ("node_unhealthy", 1, evidence[0])
    assert told["attempts"][0]["cause"] == "node_failure"
    shown = " ".join(call("show", "alga").out.split())
    assert evidence[0] in shown
