"""When it pays to leave a slow node, and which slow nodes an attempt leaves."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.histories import NOW
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.records.alerts import noticed
from holdfast.contracts.spec.sections import Slowdown
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.stops import departure
from holdfast.workers.agent.stops.departure import LEFT_MAX, LOOK_EVERY_S, SlowNodes
from holdfast.workers.agent.watch.slowdowns import SlowNode
from holdfast.workers.decisions.drained_nodes import LeavePrice, gain_of, restart_price_s


@pytest.mark.parametrize(
    ("cost", "nodes", "left", "gain"),
    [
        # A spare node takes the place.
        (0.2, 64, 64, 0.2),
        # One of many nodes less: each of the others has a little more work.
        (0.2, 64, 63, 0.187),
        # Of two nodes, one is slower than both as they are.
        (0.2, 2, 1, -0.6),
        (0.6, 2, 1, 0.2),
        (0.25, 4, 3, 0.0),
    ],
)
def test_the_gain_is_what_the_others_no_longer_wait(
    cost: float, nodes: int, left: int, gain: float
) -> None:
    assert gain_of(cost, nodes, left) == pytest.approx(gain, abs=1e-3)


@pytest.mark.parametrize(
    ("restart_s", "gain", "lasted_s", "remaining_s", "pays"),
    [
        # The slowdown has cost as much as leaving costs.
        (60, 0.2, 300, None, True),
        (60, 0.2, 299, None, False),
        (60, 0.2, 300, 301, True),
        # The run ends soon.
        (60, 0.2, 300, 299, False),
        # Fewer nodes would be slower.
        (60, 0.0, 1e9, None, False),
        (60, -0.6, 1e9, None, False),
        (0, 0.05, 1, None, True),
    ],
)
def test_when_leaving_pays(
    restart_s: float, gain: float, lasted_s: float, remaining_s: float | None, pays: bool
) -> None:
    assert LeavePrice(restart_s=restart_s, gain=gain).pays(lasted_s, remaining_s) is pays


def line(kind: EventKind, at: float, attempt: int, launch: int, **facts: Any) -> Event:
    data = {"attempt": attempt, "launch": launch, **facts}
    return Event(writer="w", opening=1, sequence=0, time=at, kind=kind, data=data)


def launch(attempt: int, number: int, start_s: float, end_s: float | None = None) -> list[Event]:
    """A launch that resumed after `start_s`, and took `end_s` to end after its last step."""
    at = NOW + attempt * 10_000 + number * 1000
    found = [
        line(EventKind.LAUNCH_STARTED, at, attempt, number),
        line(EventKind.RESUMED, at + start_s, attempt, number, checkpoint="r:x"),
    ]
    if end_s is not None:
        until = at + 500
        ended = {"trained_until": until, "ending": "crashed"}
        found.append(line(EventKind.LAUNCH_ENDED, until + end_s, attempt, number, **ended))
    return found


@pytest.mark.parametrize(
    ("events", "price_s"),
    [
        ([], None),
        # Only first launches are known.
        (launch(1, 1, 90), 90),
        ([*launch(1, 1, 90, 5), *launch(2, 1, 100)], 100),
        # Restarts in place count, and the median of them.
        ([*launch(1, 1, 90, 5), *launch(1, 2, 12, 5), *launch(1, 3, 10, 9)], 16),
        ([line(EventKind.LAUNCH_STARTED, NOW, 1, 1)], None),
        # A clock that was set back makes nothing cheaper than free.
        (launch(1, 1, -50), 0),
    ],
)
def test_the_price_of_leaving_is_that_of_earlier_launches(
    events: list[Event], price_s: float | None
) -> None:
    assert restart_price_s(events) == price_s


HOSTS = ("n0", "n1", "n2", "n3")
COST = 0.2


class Played:
    """The slow nodes of an attempt on four nodes, at a time that a test sets."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
        settings: dict[str, Any] = {
            "resources": {"executor": "slurm", "nodes": 4, "gpus_per_node": 1, "spare_nodes": 1},
            "health": {"slowdown": "act"},
            **more,
        }
        run = RunFolder(tmp_path, "quick", "1" * 32, settings)
        context = load_context(run.submit(1, 4, 0.0).request)
        changed = {
            "executor": "slurm",
            "nodes": 4,
            "gpus_per_node": 1,
            "spare_nodes": run.spec.resources.spare_nodes,
            "health": run.spec.health,
        }
        context = replace(context, request=context.request.model_copy(update=changed))
        self.now, self.notes = 1000.0, list[str]()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = SimpleNamespace(slow={})
        self.nodes = SlowNodes(context, self.watch, self.notes.append)

    def slow(self, host: str, cost: float = COST) -> None:
        node = HOSTS.index(host)
        found = SlowNode(node=node, ranks=(node,), excess=0.3, cost=cost)
        self.watch.slow[host] = found, self.now

    def after(self, seconds: float, *, hosts: tuple[str, ...] = HOSTS) -> dict[str, str]:
        self.now += seconds
        return dict(self.nodes.to_leave(hosts, ("n4",), None))


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setattr(departure, "restart_price_s", lambda _: 60.0)
    return Played(tmp_path, monkeypatch)


def test_a_slow_node_is_left_once_it_has_cost_as_much_as_a_restart(played: Played) -> None:
    assert played.after(0) == {}
    played.slow("n2")
    assert [played.after(LOOK_EVERY_S) for _ in range(60)] == [{}] * 60
    assert played.after(LOOK_EVERY_S) == {"n2": "slow: the others wait 20% of each step"}
    assert len(played.notes) == 1
    assert "leaves n2: a step is 20% shorter on 4 nodes without it" in played.notes[0]
    del played.watch.slow["n2"]
    assert played.after(LOOK_EVERY_S) != {}, "the ranks have been asked to stop for it"
    assert played.nodes.have_left(["n2"], HOSTS, are_replaced=True) == ["n2"]
    assert played.nodes.hosts == ("n2",)
    played.nodes.begin()
    assert played.after(LOOK_EVERY_S) == {}


def test_a_place_that_stays_slow_on_another_node_is_its_work(played: Played) -> None:
    played.slow("n2")
    played.after(400)
    played.nodes.have_left(["n2"], HOSTS, are_replaced=True)
    played.nodes.begin()
    played.watch.slow = {"n4": (played.watch.slow["n2"][0], played.now)}
    others = ("n0", "n1", "n4", "n3")
    assert played.after(1e6, hosts=others) == {}
    assert "so the work there is heavier" in played.notes[-1]
    assert played.nodes.hosts == (), "the node that was left is not at fault"


def test_on_fewer_nodes_the_places_are_others(played: Played) -> None:
    played.slow("n2", 0.6)
    played.after(400)
    played.nodes.have_left(["n2"], HOSTS, are_replaced=False)
    played.nodes.begin()
    played.watch.slow = {"n3": (played.watch.slow["n2"][0], played.now)}
    assert played.after(1e6, hosts=("n0", "n1", "n3")) != {}
    assert played.nodes.hosts == ("n2",)


def test_the_node_that_leads_and_many_nodes_are_not_left(played: Played) -> None:
    played.slow("n0")
    assert played.after(1e6) == {}
    assert "it leads the attempt" in played.notes[-1]
    played.nodes.hosts = ("a", "b", "c")
    assert len(played.nodes.hosts) == LEFT_MAX
    played.slow("n1")
    assert played.after(1e6) == {}
    assert "3 slow nodes were left already" in played.notes[-1]


@pytest.mark.parametrize("slowdown", ["report", "ask", "off"])
def test_only_act_leaves_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slowdown: Slowdown
) -> None:
    played = Played(tmp_path, monkeypatch, health={"slowdown": slowdown})
    played.slow("n2")
    assert played.after(1e6) == {}
    assert played.notes == []


def test_without_other_nodes_the_reason_is_noted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = {"executor": "slurm", "nodes": 4, "gpus_per_node": 1}
    played = Played(tmp_path, monkeypatch, resources=only)
    played.slow("n2")
    assert [played.after(1e6) for _ in range(2)] == [{}, {}]
    assert played.notes == ["stays with the run needs its nodes: n2"]


def test_the_page_says_that_a_slow_node_was_left() -> None:
    why = "n1 (slow: the others wait 20% of each step)"
    change = {"way": "spare", "nodes": 2, "lost": [], "joined": ["n2"], "drained": ["n1"]}
    begun = [
        line(EventKind.LAUNCH_ENDED, NOW, 1, 1, ending="drained", last_step=7),
        line(EventKind.LAUNCH_STARTED, NOW, 1, 2, **change, slow=["n1"], reason=why),
    ]
    assert [one["text"] for one in noticed(begun)] == [
        f"launch 1 left slow nodes at step 7: {why}; it continued with n2"
    ]
