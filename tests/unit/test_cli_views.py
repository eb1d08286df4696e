"""What `show`, `runs` and `doctor` print of runs that failed or that nobody supervises."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.cli_calls import Call
from tests.runs import RunFolder

from holdfast.contracts.journal import EventKind


@pytest.mark.parametrize("is_decided", [True, False])
def test_show_gives_the_reason_of_a_failure_once(call: Call, root: Path, is_decided: bool) -> None:
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
