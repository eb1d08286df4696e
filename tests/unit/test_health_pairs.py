"""Pairs of nodes that test each other: every bad node is found, and no good one is blamed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.workers.agent.health.watch import ROUNDS_MAX, PairPlan


def names_of(count: int) -> list[str]:
    return [f"n{number}" for number in range(count)]


def play(names: list[str], bad: set[str]) -> PairPlan:
    """Test pairs, of which each fails that has a bad node, until the plan has no more."""
    plan = PairPlan(names)
    while pairs := plan.next_pairs():
        tested = [name for pair in pairs for name in pair]
        assert len(tested) == len(set(tested)), "a node is in two pairs at once"
        failed = [pair for pair in pairs if bad & set(pair)]
        plan.take([pair for pair in pairs if pair not in failed], failed, [])
    return plan


@pytest.mark.more
@given(count=st.integers(3, 80), data=st.data())
@settings(max_examples=400, deadline=None)
def test_any_set_of_bad_nodes_below_half_is_found(count: int, data: st.DataObject) -> None:
    names = names_of(count)
    most = (count - 1) // 2
    bad = data.draw(st.sets(st.sampled_from(names), max_size=most))
    plan = play(names, bad)
    assert set(plan.bad) == bad
    assert plan.good == set(names) - bad
    assert plan.rounds <= ROUNDS_MAX
    if 4 * len(bad) <= count - 2:
        assert plan.rounds <= 2
    if 3 * len(bad) <= count - 2:
        assert plan.rounds <= 3


@pytest.mark.parametrize("count", [64, 1000])
def test_a_bad_node_of_every_pair_but_one_is_found(count: int) -> None:
    """The worst set of bad nodes: only one pair of the first round passes."""
    names = names_of(count)
    first = PairPlan(names).next_pairs()
    chance = random.Random(count)
    bad = {chance.choice(pair) for pair in first[1:]}
    plan = play(names, bad)
    assert set(plan.bad) == bad
    assert plan.rounds <= ROUNDS_MAX


@pytest.mark.parametrize(("count", "rounds"), [(2, 1), (4, 1), (100, 1), (3, 3), (101, 3)])
def test_a_check_that_fails_everywhere_is_not_tried_for_long(count: int, rounds: int) -> None:
    names = names_of(count)
    plan = play(names, set(names))
    assert (plan.rounds, plan.bad, plan.good) == (rounds, [], set())
    assert sorted(plan.undecided) == sorted(names)


def test_healthy_nodes_need_one_round_or_two() -> None:
    for count in (2, 8, 1000):
        assert play(names_of(count), set()).rounds == 1
    for count in (3, 9, 1001):
        assert play(names_of(count), set()).rounds == 2


def test_pairs_of_the_first_round_are_far_apart() -> None:
    assert PairPlan(names_of(6)).next_pairs() == [("n0", "n3"), ("n1", "n4"), ("n2", "n5")]
    assert PairPlan(names_of(5)).next_pairs() == [("n1", "n3"), ("n2", "n4")]


def test_a_pair_that_fails_once_blames_nobody() -> None:
    """Two nodes that failed together and then pass with others are both good."""
    plan = PairPlan(names_of(8))
    first = plan.next_pairs()
    plan.take(first[1:], first[:1], [])
    again = plan.next_pairs()
    assert {name for name, _ in again} == set(first[0])
    plan.take(again, [], [])
    assert (plan.bad, plan.undecided, plan.next_pairs()) == ([], [], [])


def test_a_node_without_a_result_is_bad_and_not_tested_again() -> None:
    plan = PairPlan(names_of(4))
    first = plan.next_pairs()
    silent, partner = first[0]
    plan.take(first[1:], first[:1], [silent])
    assert plan.bad == [silent]
    assert [pair[0] for pair in plan.next_pairs()] == [partner]
