"""What follows when attempts fail in the same way elsewhere, or differently in one place."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.histories import NOW, attempt_of, history_of, spec_of

from holdfast.contracts.records.history import AttemptView
from holdfast.contracts.states import Cause
from holdfast.workers.decisions.evidence import fingerprint
from holdfast.workers.decisions.exclusions import excluded_hosts
from holdfast.workers.decisions.policy import decide

TORCH = "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py"


def traceback_of(message: str = "out of 512 MiB at 0x7f01", line: int = 31, by: str = "") -> str:
    error = f"RuntimeError: {message}"
    root = (
        "Traceback (most recent call last):\n"
        '  File "/home/ann/train.py", line 80, in main\n    loss = step(batch)\n'
        f'  File "/home/ann/model.py", line {line}, in forward\n    return linear(x)\n'
        f'  File "{TORCH}", line 2290, in linear\n    return torch._C.linear(x)\n'
        f"{error}\n"
    )
    if not by:
        return root
    second = (
        'Traceback (most recent call last):\n  File "/home/ann/train.py", line 9, in <module>\n'
    )
    reason = "During handling of the above exception, another exception occurred:"
    return f"{root}\n{reason}\n\n{second}{by}\n"


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (traceback_of("out of 768 MiB at 0x99ff"), True),
        (traceback_of(by="ValueError: no batch"), True),
        (traceback_of("illegal memory access"), False),
        (traceback_of(line=32), False),
    ],
)
def test_a_failure_is_known_by_its_root_and_the_programs_line(other: str, is_same: bool) -> None:
    one = fingerprint(traceback_of())
    assert one == "RuntimeError: out of # MiB at # at /home/ann/model.py:31:forward"
    assert (fingerprint(other) == one) is is_same


@pytest.mark.parametrize("text", ["", "Segmentation fault", "Traceback (most recent call last):\n"])
def test_a_text_without_an_exception_has_no_fingerprint(text: str) -> None:
    assert fingerprint(text) == ""


def failures(cause: Cause, *given: dict[str, Any]) -> list[AttemptView]:
    default = {"failed_host": "n1", "steps": (1, 30), "traceback": traceback_of()}
    return [
        attempt_of(spec_of(), number, cause, committed=number, **{**default, **fields})
        for number, fields in enumerate(given, 1)
    ]


@pytest.mark.parametrize("cause", [Cause.UNKNOWN, Cause.INFRASTRUCTURE, Cause.HANG])
def test_the_same_failure_after_the_same_step_on_another_host_stops_the_run(cause: Cause) -> None:
    attempts = failures(cause, {}, {"failed_host": "n2", "steps": (21, 30)})
    decision = decide(history_of(spec_of(), *attempts), None, now=NOW)
    assert decision.action == "stop"
    assert (
        "attempts 1 and 2 failed by the same error after step 30, on n1 and n2" in decision.reason
    )
    asked = {"action": "relaunch", "after_attempt": 1}
    after = history_of(spec_of(), *attempts, asked=asked)
    assert decide(after, None, now=NOW).action == "relaunch", (
        "an operator's relaunch starts the count again"
    )


@pytest.mark.parametrize(
    "second",
    [
        {},
        {"failed_host": None},
        {"failed_host": "n2", "steps": (21, 31)},
        {"failed_host": "n2", "steps": (31, 30)},
        {"failed_host": "n2", "steps": None},
        {"failed_host": "n2", "traceback": traceback_of(line=32)},
        {"failed_host": "n2", "traceback": None},
    ],
)
def test_other_failures_are_tried_again(second: dict[str, Any]) -> None:
    attempts = failures(Cause.UNKNOWN, {}, second)
    assert decide(history_of(spec_of(), *attempts), None, now=NOW).action == "relaunch"


def test_a_host_with_two_different_failures_is_excluded() -> None:
    other = {"traceback": traceback_of("illegal memory access")}
    assert excluded_hosts(failures(Cause.GPU_OOM, {}, other), NOW) == ("n1",)
    assert excluded_hosts(failures(Cause.GPU_OOM, {}, {}), NOW) == ()
    assert excluded_hosts(failures(Cause.GPU_OOM, {}, {**other, "failed_host": "n2"}), NOW) == ()
    assert excluded_hosts(failures(Cause.PREEMPTION, {}, other), NOW) == ()
