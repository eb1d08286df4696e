"""Checkpoints that are blamed for the crashes of the launches that resumed from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.support.histories import NOW, attempt_of, history_of, spec_of

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.records.alerts import noticed
from holdfast.contracts.records.history import blamed_checkpoints, excluded_checkpoints
from holdfast.contracts.states import AttemptState, Cause
from holdfast.workers.decisions.blame import (
    HUNG_IN_LOAD,
    crash_facts,
    find_blame,
    forgiven_until,
)
from holdfast.workers.decisions.causes import RankFailure, classify_crash
from holdfast.workers.decisions.policy import decide, decide_in_place

NEW, OLD = CheckpointName(200, 1, 1), CheckpointName(100, 1, 1)
BRANCH = (NEW, OLD)
WAY = "ValueError: bad state at train.py:#:step"


def line(kind: EventKind, attempt: int, launch: int, **facts: Any) -> Event:
    return Event(
        writer="w",
        opening=1,
        sequence=0,
        time=NOW,
        kind=kind,
        data={"attempt": attempt, "launch": launch, **facts},
    )


def crash(
    attempt: int, launch: int, way: str = WAY, of: CheckpointName = NEW, **resumed: Any
) -> list[Event]:
    """A launch that resumed from a checkpoint and crashed. An empty `way` is unknown."""
    facts = {"crash": way} if way else {}
    return [
        line(EventKind.LAUNCH_STARTED, attempt, launch),
        line(EventKind.RESUMED, attempt, launch, checkpoint=f"kelp:{of}", **resumed),
        line(EventKind.LAUNCH_ENDED, attempt, launch, ending="crashed", **facts),
    ]


def rolled_back(name: CheckpointName, attempt: int, launch: int, **facts: Any) -> Event:
    return line(EventKind.ROLLED_BACK, attempt, launch, to=str(OLD), excluded=[str(name)], **facts)


def blamed(name: CheckpointName, attempt: int, launch: int) -> Event:
    return rolled_back(name, attempt, launch, crash=WAY, reason=f"{name} is blamed")


THREE = [*crash(2, 1), *crash(2, 2), *crash(3, 1)]
TWO_CRASHES = [*crash(2, 1), *crash(3, 1)]
OTHER_WAY = [*crash(2, 1), *crash(2, 2, "KeyError: 'a' at train.py:#:step"), *crash(3, 1)]
UNKNOWN_WAYS = [*crash(2, 1, ""), *crash(2, 2, ""), *crash(3, 1, "")]
BY_DCP = [event for n in (1, 2, 3) for event in crash(3, n, counts_steps=False)]
ELSEWHERE = [*crash(2, 1), *crash(2, 2, of=OLD), *crash(3, 1)]
NOT_RESUMED = [event for event in THREE if event.kind is not EventKind.RESUMED]
BETWEEN = [*crash(2, 1), *crash(2, 2), *crash(2, 3, ""), *crash(3, 1)]


def failed_load(
    attempt: int, launch: int, way: str = WAY, of: CheckpointName = NEW, kind: str = "crashed"
) -> list[Event]:
    """A launch that ended while it loaded a checkpoint."""
    facts = {"crash": way} if way else {}
    return [
        line(EventKind.LAUNCH_STARTED, attempt, launch),
        line(EventKind.LOADING, attempt, launch, checkpoint=f"kelp:{of}", step=of.step),
        line(EventKind.LAUNCH_ENDED, attempt, launch, ending=kind, **facts),
    ]


LOADS = [*failed_load(2, 1), *failed_load(2, 2), *failed_load(3, 1)]
HUNG_LOADS = [e for n in (1, 2) for e in failed_load(2, n, HUNG_IN_LOAD, kind="hung")]
HUNG_LOADS += failed_load(3, 1, HUNG_IN_LOAD, kind="hung")
EARLIER_BLAME, LATER_STEP = blamed(CheckpointName(200, 0, 9), 1, 1), blamed(OLD, 1, 1)


@pytest.mark.parametrize(
    ("events", "branch", "is_blamed"),
    [
        (THREE, BRANCH, True),
        ([*crash(1, 1), *crash(2, 1), *crash(3, 1)], BRANCH, True),
        (BETWEEN, BRANCH, True),
        (TWO_CRASHES, BRANCH, False),
        (OTHER_WAY, BRANCH, False),
        (UNKNOWN_WAYS, BRANCH, False),
        (ELSEWHERE, BRANCH, False),
        (NOT_RESUMED, BRANCH, False),
        (BY_DCP, BRANCH, False),
        # The only checkpoint, or a fork's origin, has none before it.
        (THREE, (NEW,), False),
        (THREE, (), False),
        # A commit since: another checkpoint is the newest.
        (THREE, (CheckpointName(300, 3, 1), *BRANCH), False),
        # After a blame, the same step or an earlier one is not blamed too.
        ([EARLIER_BLAME, *THREE], BRANCH, False),
        ([LATER_STEP, *THREE], BRANCH, True),
        # Launches that ended while they loaded the checkpoint.
        (LOADS, BRANCH, True),
        (HUNG_LOADS, BRANCH, True),
        ([*failed_load(2, 1), *failed_load(3, 1)], BRANCH, False),
        # Some had resumed, so these ended in another way.
        ([*crash(2, 1), *crash(2, 2), *failed_load(3, 1)], BRANCH, False),
        ([*failed_load(2, 1), *failed_load(2, 2), *crash(3, 1)], BRANCH, False),
        # Another checkpoint failed alike: the storage does.
        ([*failed_load(1, 1, of=OLD), *LOADS], BRANCH, False),
        ([*failed_load(1, 1, "KeyError: 'a'", of=OLD), *LOADS], BRANCH, True),
        ([*failed_load(2, 1), *failed_load(2, 2, of=OLD), *failed_load(3, 1)], BRANCH, False),
        ([event for event in LOADS if event.kind is not EventKind.LOADING], BRANCH, False),
        # A rollback after a bad loss is no blame.
        ([rolled_back(CheckpointName(250, 1, 1), 1, 1), *THREE], BRANCH, True),
    ],
)
def test_which_checkpoint_is_blamed(
    events: list[Event], branch: tuple[CheckpointName, ...], is_blamed: bool
) -> None:
    found = find_blame(events, "kelp", branch, attempt=3, launch=1)
    assert (found is not None) == is_blamed
    if found is not None:
        way = HUNG_IN_LOAD if events is HUNG_LOADS else WAY
        assert (found.checkpoint, found.to, found.crash) == (NEW, OLD, way)
        assert len(found.launches) == 3
        assert ("while they loaded it" in found.reason) is found.in_load
        assert "is blamed" in found.reason


PROGRAM = 'Traceback (most recent call last):\n  File "/home/a/train.py", line 9, in step\n'


def failure(text: str = "", code: int = 1) -> RankFailure:
    return RankFailure(rank=0, exit_code=code, traceback=text)


@pytest.mark.parametrize(
    ("failures", "given", "cause", "way"),
    [
        ([failure(f"{PROGRAM}ValueError: 17 is bad")], {}, "user_error", "ValueError: # is bad"),
        ([failure(code=-11)], {}, "unknown", "SIGSEGV after step 7"),
        # A library may abort because of another rank, but then its text says so.
        ([failure("Connection reset by peer", -6)], {}, "infrastructure", ""),
        # Causes of the machine: killed, out of memory, out of disk, a lost node, faulty hardware.
        ([failure(code=-9)], {}, "infrastructure", ""),
        ([failure(code=-9)], {"oom_kills": 1}, "host_oom", ""),
        ([failure(code=-7)], {}, "unknown", ""),
        (
            [failure(f"{PROGRAM}OSError: No space left on device")],
            {},
            "storage_full",
            "",
        ),
        ([failure(f"{PROGRAM}ValueError: bad")], {"lost_nodes": ("n2",)}, "node_failure", ""),
        ([failure(f"{PROGRAM}RuntimeError: uncorrectable ECC error")], {}, "infrastructure", ""),
        ([failure(f"{PROGRAM}torch.OutOfMemoryError: CUDA out of memory")], {}, "gpu_oom", ""),
        # A bad loss has its own policy, and an exit without a word has no way.
        ([failure(f"{PROGRAM}NumericsError: the loss is nan")], {}, "numerics", ""),
        ([failure()], {}, "user_error", ""),
        ([], {}, "infrastructure", ""),
        # Files that are missing, and a helper that was killed, say nothing about the state.
        ([failure(f"{PROGRAM}FileNotFoundError: 'shard-7.bin'")], {}, "user_error", ""),
        ([failure(f"{PROGRAM}BrokenProcessPool: terminated abruptly")], {}, "unknown", ""),
    ],
)
def test_in_which_way_a_launch_crashed(
    failures: list[RankFailure], given: dict[str, Any], cause: str, way: str
) -> None:
    facts = crash_facts(*classify_crash(failures, **given), 7)
    assert facts["cause"] == cause
    assert facts.get("crash", "").startswith(way)
    assert bool(facts.get("crash")) == bool(way)


@pytest.mark.parametrize(
    ("given", "way"),
    [
        (failure(f"{PROGRAM}ValueError: 17 is bad"), "ValueError: # is bad"),
        (failure(code=-11), "SIGSEGV while it loaded"),
        # The storage, and a program that no checkpoint fits.
        (failure(f"{PROGRAM}RuntimeError: read of the mount timed out"), ""),
        (failure(f"{PROGRAM}RuntimeError: Input/output error"), ""),
        (failure(f"{PROGRAM}RuntimeError: Error(s) in loading state_dict for Net"), ""),
        (failure(f"{PROGRAM}holdfast.contracts.errors.CheckpointError: it does not fit"), ""),
    ],
)
def test_in_which_way_a_load_failed(given: RankFailure, way: str) -> None:
    facts = crash_facts(*classify_crash([given]), None)
    assert facts.get("crash", "").startswith(way)
    assert bool(facts.get("crash")) == bool(way)


def test_the_attempts_before_a_blame_count_neither_for_the_budget_nor_for_the_breaker() -> None:
    spec = spec_of(supervision={"budgets": {"user_error": 2}})
    failed = AttemptState.FAILED
    began = attempt_of(spec, 1, Cause.USER_ERROR, state=failed, committed=200)
    stuck = [attempt_of(spec, n, Cause.USER_ERROR, state=failed) for n in (2, 3, 4)]
    history = history_of(spec, began, *stuck)
    assert decide(history, None, now=NOW).action == "stop"
    events = tuple(event for n in (2, 3, 4) for event in crash(n, 1))
    with_blame = dataclasses.replace(history, events=(*events, blamed(NEW, 4, 1)))
    decision = decide(with_blame, None, now=NOW)
    assert decision.action == "relaunch"
    assert str(NEW) in decision.reason, "the decision must name the blamed checkpoint"
    # The next attempts count again, and another crash of the same attempt counts too.
    more = [attempt_of(spec, n, Cause.USER_ERROR, state=failed) for n in (5, 6, 7)]
    again = dataclasses.replace(
        history_of(spec, began, *stuck, *more), events=(*events, blamed(NEW, 4, 1))
    )
    assert decide(again, None, now=NOW).action == "stop"
    assert forgiven_until((*events, blamed(NEW, 4, 1))) == 4
    assert forgiven_until((*events, blamed(NEW, 4, 1), *crash(4, 2, of=OLD))) == 3


def test_a_limit_or_an_operator_precedes_a_blame() -> None:
    spec = spec_of(supervision={"attempts_max": 3})
    attempts = [attempt_of(spec, n, Cause.USER_ERROR, state=AttemptState.FAILED) for n in (1, 2, 3)]
    history = dataclasses.replace(history_of(spec, *attempts), events=(blamed(NEW, 3, 1),))
    decision = decide(history, None, now=NOW)
    assert (decision.action, "attempts_max" in decision.reason) == ("stop", True)
    paused = history_of(spec_of(), *attempts, asked={"action": "pause", "after_attempt": 3})
    held = dataclasses.replace(paused, events=(*paused.events, blamed(NEW, 3, 1)))
    assert decide(held, None, now=NOW).action == "wait"


@pytest.mark.parametrize(
    ("given", "action"),
    [
        ({}, "restart"),
        ({"restarts": 1, "gained_steps": False}, "restart"),
        ({"restarts": 3}, "stop"),
        ({"lost_nodes": ("n1",)}, "stop"),
    ],
)
def test_a_blame_allows_a_restart_in_place(given: dict[str, Any], action: str) -> None:
    ending, _ = classify_crash([failure(f"{PROGRAM}ValueError: bad")])
    limits: dict[str, Any] = {"restarts": 0, "restarts_max": 3, **given}
    assert decide_in_place(ending, **limits).action == "stop"
    assert decide_in_place(ending, blamed="step 200 is blamed", **limits).action == action


def test_a_blamed_checkpoint_is_excluded_and_shown_and_one_of_a_bad_loss_is_not_blamed() -> None:
    events = [blamed(NEW, 3, 1), rolled_back(CheckpointName(300, 4, 1), 4, 1, reason="nan")]
    assert blamed_checkpoints(events) == {str(NEW)}
    assert excluded_checkpoints(events) == {str(NEW), str(CheckpointName(300, 4, 1))}
    assert [one["text"] for one in noticed(events)] == [f"{NEW} is blamed"]
