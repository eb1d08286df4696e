"""The watch over silent ranks in simulated time: slow ranks continue, hanging ranks are ended.

Nodes and clock are simulated; watch, judgement and journal are real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.records.alerts import noticed
from holdfast.contracts.records.documents import Request, read_document
from holdfast.contracts.spec.sections import Health, Slowdown
from holdfast.flows.supervisor.deliveries import topic_of
from holdfast.workers.agent.watch import hangs
from holdfast.workers.agent.watch.collectives import CollectiveBlame
from holdfast.workers.agent.watch.hangs import HangWatch
from holdfast.workers.agent.watch.silence import RankStatus
from holdfast.workers.agent.watch.slowdowns import SlowNode
from holdfast.workers.agent.watch.stack_text import RankStack
from holdfast.workers.agent.watch.stacks import StackSample
from holdfast.workers.nodes.calibration import PhaseTimes

STEP = PhaseTimes(count=500, p50_s=0.8, p99_s=1.0)
LOOK_S = 0.25
SAMPLE_S = 0.5
START_S = 1000.0


@dataclass
class Rank:
    """The status and stack of a rank, by seconds since it became silent."""

    phase: str = "train"
    times: PhaseTimes | None = STEP
    digest: Callable[[float], str] = lambda silent_s: "stuck"
    facts: Callable[[float], dict[str, Any]] = lambda silent_s: {}
    stack: Callable[[float], dict[str, Any]] = lambda silent_s: {}


@dataclass
class FakeNode:
    """One node whose ranks are silent from the start."""

    ranks: list[Rank]
    name: str = "n0"
    silent_s: float = 0.0
    sample: StackSample | None = None
    asked: list[tuple[float, int, int]] = field(default_factory=list)

    def take_stacks(self, dump: int, number: int) -> None:
        self.asked.append((self.silent_s, dump, number))

    @property
    def statuses(self) -> tuple[RankStatus, ...]:
        return tuple(
            RankStatus(
                rank=i,
                phase=rank.phase,
                silent_s=self.silent_s,
                times=rank.times,
                **{"pid": 100 + i, "step": 7, **rank.facts(self.silent_s)},
            )
            for i, rank in enumerate(self.ranks)
        )

    def report(self) -> Any:
        for at_s, dump, number in self.asked[-1:]:
            if self.silent_s >= at_s + SAMPLE_S:
                stacks = tuple(
                    replace(
                        RankStack(rank=i, digest=rank.digest(at_s), top=("f",)), **rank.stack(at_s)
                    )
                    for i, rank in enumerate(self.ranks)
                )
                self.sample = StackSample(dump=dump, number=number, stacks=stacks)
        return SimpleNamespace(ranks=self.statuses, sample=self.sample)


class Simulation:
    """A simulated silence, until the ranks are ended or `until_s`."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = START_S
        self.asked: list[tuple[float, int, int]] = []
        monkeypatch.setattr(hangs, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.attempt = RunFolder(root, "tried", "u" * 32).submit(1, 2, 0.0)
        request = read_document(Request, self.attempt.request)
        assert request is not None
        journal = JournalWriter(self.attempt.node_journal(0))
        self.request, self.journal = request, journal
        self.watch = HangWatch(request, self.attempt, journal)
        self.watch.begin(1)

    def run(
        self, ranks: list[Rank], until_s: float, pause: tuple[float, float] | None = None
    ) -> float | None:
        """Seconds of silence after which the ranks were ended, or None when they were not.

        `pause`: (at, for) seconds in which this agent did not run.
        """
        node = FakeNode(ranks)
        self.asked = node.asked
        while node.silent_s < until_s:
            self.now += LOOK_S
            node.silent_s += LOOK_S
            if pause and node.silent_s == pause[0]:
                self.now += pause[1]
                node.silent_s += pause[1]
            if self.watch.look([node], {node.name: node.report()}):
                return node.silent_s
        return None

    def events(self, kind: EventKind) -> list[Event]:
        return [e for e in read_journal(self.attempt.node_journal(0))[0] if e.kind is kind]


@pytest.fixture
def simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulation:
    return Simulation(tmp_path, monkeypatch)


WAITING = Rank()
QUICK = PhaseTimes(count=500, p50_s=0.05, p99_s=0.1)


def changing_every(seconds: float) -> Callable[[float], str]:
    return lambda silent_s: f"part {silent_s // seconds}"


def in_one_function(cpu_share: float = 0.0) -> Callable[[float], dict[str, Any]]:
    """The main thread stays in its functions, whatever its variables do."""
    return lambda silent_s: {"functions": "same", "computed_s": cpu_share * silent_s}


def unregistered(silent_s: float) -> dict[str, Any]:
    return {"pid": 0, "step": -1}


@pytest.mark.more
@pytest.mark.parametrize(
    ("ranks", "first_s", "last_s"),
    [
        ([WAITING, Rank()], 30.0, 40.0),
        ([Rank(times=QUICK), Rank(times=QUICK)], 30.0, 40.0),
        # An endless loop: CPU use is no sign of life where ranks train together.
        ([WAITING, Rank(facts=lambda s: {"cpu_s": s})], 30.0, 40.0),
        ([Rank("eval"), Rank("eval")], 120.0, 150.0),
        ([Rank("eval"), Rank("eval", facts=lambda s: {"cpu_s": s})], 360.0, 420.0),
        ([WAITING, Rank("compile", times=None)], 1800.0, 1900.0),
        # A wait with a deadline, as for a data loader: only variables change.
        ([WAITING, Rank(digest=changing_every(5.0), stack=in_one_function())], 30.0, 40.0),
        ([Rank(digest=changing_every(0.1), stack=in_one_function(0.01))] * 2, 30.0, 40.0),
        # In a phase in which a rank works alone, variables count for half an hour.
        (
            [WAITING, Rank("eval", digest=changing_every(5.0), stack=in_one_function())],
            1800.0,
            1900.0,
        ),
        # Storage that never answers is finally given up.
        ([WAITING, Rank(stack=lambda s: {"on_storage": True})], 1800.0, 1900.0),
        ([WAITING, Rank(digest=lambda s: "")], 1800.0, 1900.0),
        ([WAITING, Rank(facts=lambda s: {"is_alive": False, "is_unreaped": True})], 10.0, 25.0),
        ([WAITING, Rank(facts=lambda s: {"is_alive": False}, digest=lambda s: "")], 30.0, 40.0),
    ],
)
def test_a_hang_is_suspected_soon_and_ended_in_bounded_time(
    simulation: Simulation, ranks: list[Rank], first_s: float, last_s: float
) -> None:
    ended_s = simulation.run(ranks, 3000.0)
    assert ended_s is not None
    assert first_s <= ended_s <= last_s
    (suspected,) = simulation.events(EventKind.HANG_SUSPECTED)
    if ranks[0].phase == "train":
        # With stacks: within twice the step time plus five seconds.
        assert suspected.data["silent"][0]["silent_s"] <= 7.0
    assert len(simulation.events(EventKind.HANG_CONFIRMED)) == 1
    assert simulation.watch.evidence


@pytest.mark.more
@pytest.mark.parametrize(
    ("ranks", "silent_s"),
    [
        # Ten times slower, in one call with an unchanged stack.
        ([Rank(times=PhaseTimes(count=50, p50_s=9.0, p99_s=10.0))] * 2, 100.0),
        ([Rank("eval", times=PhaseTimes(count=1, p50_s=60.0, p99_s=60.0))] * 2, 600.0),
        ([WAITING, Rank("eval", times=None)], 1700.0),
        ([Rank("load", times=None)] * 2, 1700.0),
        # Slow work in parts, each almost as long as the limit of a hang.
        ([WAITING, Rank(digest=changing_every(13.0))], 3000.0),
        ([WAITING, Rank("eval", digest=changing_every(50.0))], 3000.0),
        # A shuffle of an epoch in pure Python, which stays in one function.
        ([WAITING, Rank(digest=changing_every(0.1), stack=in_one_function(0.9))], 3000.0),
        # A load that reads 100 kB per second, and a save that writes as much.
        ([WAITING, Rank("load", facts=lambda s: {"io_bytes": int(s * 1e5)})], 3000.0),
        ([Rank("save", facts=lambda s: {"io_bytes": int(s * 1e5)})] * 2, 3000.0),
        # Storage that stalls for one rank while all others wait for it.
        ([WAITING, Rank(stack=lambda s: {"on_storage": True})], 1700.0),
        ([WAITING, Rank(stack=lambda s: {"on_storage": s % 20 < 8})], 1700.0),
        # A compiler works in a child process of a rank during training.
        ([WAITING, Rank(stack=lambda s: {"helpers_cpu_s": 0.9 * s})], 1700.0),
        # The stacks of a rank cannot be read.
        ([WAITING, Rank(digest=lambda s: "")], 1700.0),
        # A rank has exited without an error, and its peer exits slowly.
        ([Rank("done", times=None), Rank(facts=lambda s: {"is_alive": False})], 3500.0),
    ],
)
def test_slow_ranks_are_never_ended(
    simulation: Simulation, ranks: list[Rank], silent_s: float
) -> None:
    assert simulation.run(list(ranks), silent_s) is None
    assert simulation.events(EventKind.HANG_CONFIRMED) == []


def test_a_suspicion_is_cleared_when_the_ranks_report_again(simulation: Simulation) -> None:
    assert simulation.run([WAITING, WAITING], 20.0) is None
    (suspected,) = simulation.events(EventKind.HANG_SUSPECTED)
    assert 2.0 <= suspected.data["all_silent_s"] <= 7.0
    assert simulation.events(EventKind.HANG_CLEARED) == []
    # The same ranks, which have just done a step.
    assert simulation.run([WAITING, WAITING], 1.0) is None
    (cleared,) = simulation.events(EventKind.HANG_CLEARED)
    assert cleared.data["dumps"] == suspected.data["dumps"]


def test_ranks_of_a_node_that_has_not_reported_yet_count_as_started(
    simulation: Simulation,
) -> None:
    # A node is lost right after the launch began, before the others have reported.
    nodes: list[Any] = [SimpleNamespace(name="n0"), SimpleNamespace(name="n3")]
    assert simulation.watch.silent_s(nodes, {}) == 0.0


def test_ranks_that_exit_slowly_are_not_suspected(simulation: Simulation) -> None:
    gone = {"top": (), "problem": "no such process"}
    leaving = Rank("done", times=None, stack=lambda s: gone)
    assert simulation.run([leaving, leaving], 60.0) is None
    assert simulation.events(EventKind.HANG_SUSPECTED) == []


@pytest.mark.more
@pytest.mark.parametrize(
    ("rank", "suspected_s"),
    [
        # After half of the limit of the phase `start`.
        (Rank("start", times=None, facts=unregistered), 900.0),
        (Rank("start", None, changing_every(1.0), unregistered, in_one_function()), 900.0),
        # The program has no session and works.
        (Rank("start", None, changing_every(1.0), unregistered, in_one_function(0.5)), None),
        # A slow compiler of an extension is given up after half an hour.
        (Rank("start", None, facts=unregistered, stack=lambda s: {"helpers_cpu_s": s}), 1800.0),
        # Nobody can read the stacks, for example because torchrun has not started the ranks.
        (Rank("start", None, facts=unregistered, stack=lambda s: {"top": ()}), None),
    ],
)
def test_ranks_that_never_register_are_suspected_once_and_never_ended(
    simulation: Simulation, rank: Rank, suspected_s: float | None
) -> None:
    assert simulation.run([rank, rank], 3000.0) is None
    suspected = simulation.events(EventKind.HANG_SUSPECTED)
    assert len(suspected) == (suspected_s is not None)
    for event in suspected:
        assert suspected_s is not None
        assert suspected_s <= event.data["silent"][0]["silent_s"] <= suspected_s + 60.0
        assert event.data["finding"].startswith("no rank has made a Session for ")
    # Each look at a program that works comes after twice the time.
    assert len({dump for _, dump, _ in simulation.asked}) <= 3


def test_time_in_which_the_agent_did_not_run_does_not_count(simulation: Simulation) -> None:
    ended_s = simulation.run([WAITING, Rank()], 3700.0, pause=(10.0, 3600.0))
    assert ended_s is not None
    assert ended_s >= 3610.0 + 15.0


def test_ranks_are_not_suspected_after_a_pause_of_all(simulation: Simulation) -> None:
    """The machine slept for an hour. The ranks give signs of life a moment after the agent."""
    node = FakeNode([WAITING, WAITING])
    for silent_s in (0.2, 0.4, 3600.4, 3600.9, 0.1, 0.6):
        simulation.now += max(LOOK_S, silent_s - node.silent_s)
        node.silent_s = silent_s
        assert not simulation.watch.look([node], {node.name: node.report()})
    assert node.asked == []


def test_flight_records_name_the_rank_that_the_others_wait_for(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[str]] = []

    def merged(folders: Sequence[Path], world_size: int) -> Any:
        read.append([folder.name for folder in folders])
        blame = CollectiveBlame(ranks=(1,), finding="rank 1 is missing", is_missing=True)
        return SimpleNamespace(blame=blame if world_size == 2 else None)

    monkeypatch.setattr(hangs, "MergedRecords", merged)
    recorded = Rank(stack=lambda s: {"has_record": True})
    assert simulation.run([recorded, recorded], 3000.0) is not None
    (confirmed,) = simulation.events(EventKind.HANG_CONFIRMED)
    assert confirmed.data["blamed"] == [1]
    assert confirmed.data["finding"].endswith("; by the flight records, rank 1 is missing")
    assert confirmed.data["finding"] in simulation.watch.evidence
    assert simulation.watch.missing == (1,)
    assert read == [["node-0000-01"]]


@pytest.mark.parametrize("slowdown", ["report", "ask", "act", "off"])
def test_a_slow_node_is_reported_as_the_spec_says(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, slowdown: Slowdown
) -> None:
    slow = SlowNode(node=0, ranks=(1,), excess=0.21, cost=0.14)
    played = SimpleNamespace(look=lambda *_: [slow], named=lambda: [slow])
    monkeypatch.setattr(hangs, "Slowdowns", lambda: played)
    request = simulation.request.model_copy(update={"health": Health(slowdown=slowdown)})
    simulation.watch = HangWatch(request, simulation.attempt, simulation.journal)
    simulation.run([WAITING, WAITING], 8.0)
    found = simulation.events(EventKind.NODE_SLOW)
    assert len(found) == (0 if slowdown == "off" else 1)
    assert [one for one, _ in simulation.watch.slow.values()] == [slow] * len(found)
    texts = [one["text"] for one in noticed(found)]
    assert [topic_of(one) for one in found] == ["node" if slowdown == "ask" else None] * len(found)
    for text in texts:
        assert "rank 1 works 21% longer per step than usual, and the others wait 14%" in text
        assert ("scontrol update nodename=" in text) is (slowdown == "ask")
