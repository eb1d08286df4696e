"""The difference between a launch that failed and the last one before it that worked."""

from __future__ import annotations

from typing import Any, Final

from holdfast.api.errors.show import (
    FACTS_MAX,
    LaunchFacts,
    compare_launches,
    last_that_worked,
)

REQUEST: Final[dict[str, Any]] = {
    "attempt": 1,
    "created_at": 5.0,
    "nodes": 1,
    "environment": {"LR": "0.1", "TOKEN": "•••"},
    "config": {"data": {"path": "/a"}},
    "provenance": {"code_commit": "aaa"},
}


def launch(attempt: int, number: int | None, *steps: int | None, **more: Any) -> LaunchFacts:
    first, last = steps or (None, None)
    return LaunchFacts(attempt=attempt, number=number, reached=(first, last), **more)


def test_the_last_launch_that_gained_a_step_or_saved_one_worked() -> None:
    launches = [launch(1, 1, 1, 50), launch(1, 2, 41, 60), launch(1, 3, 41, 55), launch(2, 1)]
    assert last_that_worked(launches, launches[3], []) == launches[1]
    # It redid steps, but it saved one of them.
    assert last_that_worked(launches, launches[3], ["step-00000055.a0001.l03"]) == launches[2]
    assert last_that_worked(launches, launches[1], []) == launches[0]
    assert last_that_worked(launches, launches[0], ["no checkpoint"]) is None


def test_only_what_differs_is_listed_and_what_people_look_for_comes_first() -> None:
    worked = launch(
        1,
        1,
        1,
        50,
        hosts=("node-a",),
        world_size=8,
        has_loaded=True,
        resumed_from="gpt:step-00000010.a0001.l01",
        argv=("train.py", "--lr", "0.1"),
        versions={"torch": "2.9.0"},
        gpus={"node-a": "GPU-1"},
    )
    failed = launch(
        2,
        1,
        hosts=("node-b",),
        world_size=8,
        has_loaded=True,
        argv=("train.py", "--lr", "0.2"),
        versions={},
        gpus={"node-b": "GPU-2"},
    )
    other = {
        **REQUEST,
        "attempt": 2,
        "created_at": 9.0,
        "environment": {"TOKEN": "•••", "DEBUG": "1"},
        "provenance": {"code_commit": "bbb"},
    }
    found = compare_launches(failed, worked, {1: REQUEST, 2: other})
    assert [(one.name, one.before, one.now) for one in found.facts] == [
        ("hosts", "node-a", "node-b"),
        ("loaded checkpoint", "gpt:step-00000010.a0001.l01", "none: it began at step 0"),
        ("program and arguments", '["train.py", "--lr", "0.1"]', '["train.py", "--lr", "0.2"]'),
        ("environment.LR", "0.1", None),
        ("commit of the code", "aaa", "bbb"),
        ("environment.DEBUG", None, "1"),
    ]
    assert (found.reached, found.left_out) == ("it finished no step", 0)
    assert found.worked is not None
    assert (found.worked.attempt, found.worked.number) == (1, 1)


def test_launches_of_one_attempt_have_the_same_request() -> None:
    worked, failed = launch(1, 1, 1, 50), launch(1, 2, 51, 60)
    found = compare_launches(failed, worked, {1: REQUEST})
    assert found.facts == []
    assert found.reached == "it finished steps 51 – 60"


def test_without_a_launch_that_worked_nothing_is_compared() -> None:
    found = compare_launches(launch(1, None), None, {1: REQUEST})
    assert (found.worked, found.facts) == (None, [])
    assert (found.failed.attempt, found.failed.number) == (1, None)


def test_the_number_of_facts_and_their_depth_are_bounded() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"a": deep}
    many = {"config": {f"key{number}": number for number in range(500)}, "environment": deep}
    found = compare_launches(launch(2, 1), launch(1, 1, 1, 2), {1: {"nodes": 1}, 2: many})
    assert len(found.facts) == FACTS_MAX
    assert found.left_out == 500 + 2 - FACTS_MAX
    unread = compare_launches(launch(2, 1), launch(1, 1, 1, 2), {1: {}, 2: many})
    assert unread.facts == []
