"""A node that slows the others down is named within two minutes, and noise names none: plays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import cast

import pytest

from holdfast.workers.agent.watch.hangs import STRAGGLER_WINDOW_S
from holdfast.workers.agent.watch.silence import RankStatus
from holdfast.workers.agent.watch.slowdowns import Slowdowns, SlowNode

NODES = 64
# The share of a step that a rank computes, and the noise of what ten seconds show of it: a hundred
# samples of a thread that waits or not.
SHARE, SAMPLES = 0.7, 100
DAY = int(24 * 3600 / STRAGGLER_WINDOW_S)

Work = Callable[[int, int], float]


class Played:
    """The part of a rank's status that counts. A day has half a million of them."""

    __slots__ = ("own_s", "phase", "rank", "step_s")

    def __init__(self, rank: int, own_s: float, step_s: float) -> None:
        self.rank, self.phase, self.step_s = rank, "train", step_s
        self.own_s = max(0.0, min(step_s, own_s))


def play(
    windows: int,
    work: Work,
    *,
    nodes: int = NODES,
    seed: int = 1,
    watch: Slowdowns | None = None,
) -> list[tuple[float, SlowNode]]:
    """Return what is named and when, in seconds. `work` is by (window, rank), usually 1.0.

    A step lasts until the slowest rank has computed. The others wait for it.
    """
    dice = random.Random(seed)
    watch, found = watch or Slowdowns(), []
    for window in range(windows):
        own = [SHARE * work(window, rank) for rank in range(nodes)]
        step_s = max(own) + 1.0 - SHARE
        sigma = math.sqrt(SHARE * (1 - SHARE) / SAMPLES)
        statuses = [
            cast(RankStatus, Played(rank, one + dice.gauss(0.0, sigma) * step_s, step_s))
            for rank, one in enumerate(own)
        ]
        at_s = (window + 1) * STRAGGLER_WINDOW_S
        found += [(at_s, slow) for slow in watch.look(statuses, 1)]
    return found


def steady(window: int, rank: int) -> float:
    return 1.0


@pytest.mark.parametrize("seed", range(5))
def test_a_slowdown_of_a_fifth_is_named_within_two_minutes(seed: int) -> None:
    """One node of 64 becomes slow after an hour, and recovers half an hour later."""
    begins, ends = 360, 540

    def work(window: int, rank: int) -> float:
        return 1.2 if rank == 41 and begins <= window < ends else 1.0

    (slow_at, slow), (usual_at, usual) = play(700, work, seed=seed)
    assert (slow.node, slow.ranks, slow.is_slow) == (41, (41,), True)
    assert 0 < slow_at - begins * STRAGGLER_WINDOW_S <= 120
    assert 0.10 < slow.excess < 0.30
    assert 0.05 < slow.cost < 0.20
    assert (usual.node, usual.is_slow) == (41, False)
    assert 0 < usual_at - ends * STRAGGLER_WINDOW_S <= 120


def test_a_node_that_is_slow_from_the_start_is_named() -> None:
    ((at_s, slow),) = play(60, lambda window, rank: 1.25 if rank == 3 else 1.0)
    assert slow.node == 3
    assert at_s <= 120


def test_a_slow_node_of_two_is_named() -> None:
    def work(window: int, rank: int) -> float:
        return 1.3 if rank == 1 and window >= 60 else 1.0

    watch = Slowdowns()
    found = play(120, work, nodes=2, watch=watch)
    assert [slow.node for _, slow in found] == [1]
    (now,) = watch.named()
    assert (now.node, now.ranks, now.is_slow) == (1, (1,), True)
    # It is judged by the newest windows, and not by those in which it was named.
    assert now.cost != found[0][1].cost
    assert 0.05 < now.cost < 0.30


def bursts(window: int, rank: int) -> float:
    """Saves, collections and daily changes: none of them is a slow node."""
    drift = 1.0 + 0.03 * math.sin(window / DAY * 2 * math.pi + rank)
    everybody = 1.0 + 0.3 * math.sin(window / 700)
    # A rank in turn is half as fast for 40 s, every ten minutes.
    hiccup = 2.0 if window % 60 < 4 and rank == window // 60 % NODES else 1.0
    return drift * everybody * hiccup


@pytest.mark.more
@pytest.mark.parametrize("work", [steady, bursts])
def test_a_day_of_noise_names_nobody(work: Work) -> None:
    assert play(DAY, work) == []


def test_stages_with_other_work_are_not_slow() -> None:
    # A quarter of the nodes have the last stage of a pipeline.
    def work(window: int, rank: int) -> float:
        return 1.3 if rank % 4 == 3 else 1.0

    assert play(DAY // 8, work) == []


def test_windows_with_an_evaluation_or_a_start_do_not_count() -> None:
    watch = Slowdowns()
    status = RankStatus(rank=0, pid=1, step=1, phase="eval", silent_s=0.0, step_s=1.0, own_s=1.0)
    assert watch.look([status], 1) == []
    assert watch.look([], 1) == []
