"""What a paired test proves, when one is due, and what an attempt makes of it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.runs import RunFolder

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.records.alerts import noticed
from holdfast.contracts.spec.sections import Slowdown
from holdfast.workers.agent.context import load_context
from holdfast.workers.agent.watch.paired_test import GAP_S, RESULT_S_MAX, PairedTests
from holdfast.workers.agent.watch.slowdowns import SlowNode
from holdfast.workers.agent.watch.step_times import LongSteps
from holdfast.workers.decisions.paired_test import PairedResults, judge

HOSTS = ("n0", "n1", "n2", "n3")
EVEN = [0.01] * 4
FAST = [1000.0] * 4


@pytest.mark.parametrize(
    ("host", "device", "rates", "nodes", "pairs"),
    [
        (EVEN, EVEN, FAST, {}, {}),
        # Every node: the processor, the device, both links.
        (
            [0.01, 0.01, 0.012, 0.01],
            EVEN,
            FAST,
            {2: "the same work takes 20% longer on Python than elsewhere"},
            {},
        ),
        (
            EVEN,
            [0.02, 0.01, 0.01, 0.01],
            FAST,
            {0: "the same work takes 100% longer on its device than elsewhere"},
            {},
        ),
        (
            EVEN,
            EVEN,
            [1000.0, 400.0, 500.0, 1000.0],
            {2: "both its links are slow, 400 and 500 MB/s, others 1000"},
            {},
        ),
        # The first node has the first pair and the last one.
        (
            EVEN,
            EVEN,
            [500.0, 1000.0, 1000.0, 500.0],
            {0: "both its links are slow, 500 and 500 MB/s, others 1000"},
            {},
        ),
        # A link that was not measured in time.
        (EVEN, EVEN, [1000.0, 3.0, 1000.0, 1000.0], {}, {(1, 2): "3 MB/s, other links 1000"}),
        # A node or a pair that did not connect in time, as after a pause.
        (EVEN, EVEN, [1000.0, 0.0, 1000.0, 1000.0], {}, {}),
        (EVEN, EVEN, [1000.0, 0.0, 0.0, 1000.0], {}, {}),
        (EVEN, EVEN, [0.0, 0.0, 1000.0, 400.0], {}, {(3, 0): "400 MB/s, other links 1000"}),
        (EVEN, EVEN, [1000.0, 1000.0, 1000.0, 600.0], {}, {(3, 0): "600 MB/s, other links 1000"}),
        # No rate at all: nothing can be compared.
        (EVEN, EVEN, [0.0] * 4, {}, {}),
        # Values that a node did not measure.
        ([0.01, 0.0, 0.01, 0.01], [0.0] * 4, FAST, {}, {}),
        # Two of four nodes differ: the work or the network does.
        ([0.02, 0.02, 0.01, 0.01], EVEN, FAST, {}, {}),
        # Two nodes: their processors are compared, their one link is not.
        (
            [0.01, 0.02],
            [0.01, 0.01],
            [1.0],
            {1: "the same work takes 100% longer on Python than elsewhere"},
            {},
        ),
        ([0.01] * 3, [0.01] * 3, [700.0, 700.0, 1000.0], {1: "both its links"}, {}),
    ],
)
def test_what_the_measurements_prove(
    host: list[float],
    device: list[float],
    rates: list[float],
    nodes: dict[int, str],
    pairs: dict[tuple[int, int], str],
) -> None:
    found = judge(PairedResults(step=7, host_times=host, device_times=device, pair_rates=rates))
    assert found.nodes.keys() == nodes.keys()
    assert all(found.nodes[node].startswith(proof) for node, proof in nodes.items())
    assert found.pairs == pairs


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"host_times": "many", "device_times": [], "pair_rates": []},
        {"host_times": [0.1], "device_times": [0.1], "pair_rates": []},
        {"host_times": [0.1, 0.1], "device_times": [0.1], "pair_rates": [1.0]},
        {"host_times": [0.1] * 3, "device_times": [0.1] * 3, "pair_rates": [1.0, 2.0]},
        {"host_times": [0.1, "x"], "device_times": [0.1, None], "pair_rates": [1e99]},
    ],
)
def test_lines_without_results_prove_nothing(facts: dict[str, Any]) -> None:
    assert PairedResults.from_facts(facts) is None


class PlayedTests:
    """The tests of an attempt of four nodes, at a time that a test sets."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, slowdown: Slowdown = "act"
    ) -> None:
        settings: dict[str, Any] = {
            "resources": {"executor": "slurm", "nodes": 4, "gpus_per_node": 1},
            "health": {"slowdown": slowdown},
        }
        run = RunFolder(folder, "quick", "1" * 32, settings)
        context = load_context(run.submit(1, 4, 0.0).request)
        changed = {"nodes": 4, "gpus_per_node": 1, "health": run.spec.health}
        self.context = replace(context, request=context.request.model_copy(update=changed))
        self.now, self.asked = 1000.0, 0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.watch = SimpleNamespace(slow={}, long_steps=None)
        self.path = folder / "lead.jsonl"
        self.tests = PairedTests(self.context, self.watch, self.ask, JournalWriter(self.path))
        self.tests.begin(1)
        self.ranks = JournalWriter(self.context.attempt.rank_journal)

    def ask(self) -> None:
        self.asked += 1

    def after(self, seconds: float) -> int:
        """Look after a time; return how many tests were requested until then."""
        self.now += seconds
        self.tests.look(HOSTS)
        return self.asked

    def suspect(self, host: str = "n2") -> None:
        node = HOSTS.index(host)
        self.watch.slow[host] = SlowNode(node=node, ranks=(node,), excess=0.3, cost=0.2), self.now

    def wait_longer(self, *, all_wait: bool = True) -> None:
        self.watch.long_steps = LongSteps(excess=0.25, all_wait=all_wait), self.now

    def measure(self, launch: int = 1, **changes: Any) -> None:
        facts = {"host_times": EVEN, "device_times": EVEN, "pair_rates": FAST, **changes}
        self.ranks.append(
            EventKind.SLOWDOWN_TESTED, attempt=1, launch=launch, step=7, took_s=1.0, **facts
        )

    def lines(self, kind: EventKind) -> list[Event]:
        return [event for event in read_journal(self.path)[0] if event.kind is kind]


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedTests:
    return PlayedTests(tmp_path, monkeypatch)


def test_a_suspected_node_is_left_only_once_it_is_proved_slow(played: PlayedTests) -> None:
    assert played.after(100) == 0
    played.suspect("n2")
    assert played.tests.slow == {}
    assert [played.after(1) for _ in range(3)] == [1, 1, 1]
    # Another launch's results are not those of this test.
    played.measure(launch=2)
    assert played.after(2) == 1
    assert played.tests.slow == {}
    played.measure(host_times=[0.01, 0.01, 0.02, 0.01])
    played.after(2)
    assert played.tests.slow == {"n2": played.watch.slow["n2"]}
    (line,) = played.lines(EventKind.NODE_SLOW)
    assert line.data["text"] == (
        "the test after step 7 confirms that n2 is slow: the same work takes 100% longer on "
        "Python than elsewhere"
    )
    assert played.after(10 * GAP_S) == 1, "it is explained"
    played.watch.slow = {}
    played.after(1)
    assert played.tests.slow == {}
    played.tests.begin(2)
    played.suspect("n2")
    assert played.after(1) == 2
    assert played.tests.slow == {}


def test_a_suspicion_that_is_not_confirmed_is_tested_less_and_less_often(
    played: PlayedTests,
) -> None:
    played.suspect("n2")
    for number, gap_s in enumerate((GAP_S, 2 * GAP_S, 4 * GAP_S), start=1):
        assert played.after(1) == number
        played.measure()
        played.after(2)
        played.after(gap_s - 10)
        assert played.asked == number
        played.now += 10
    said = (
        "the test after step 7 does not confirm that n2 is slow; the work, the data or the "
        "storage may be the reason"
    )
    assert [one.data["text"] for one in played.lines(EventKind.NOTE)] == [said] * 3
    assert played.tests.slow == {}


def test_the_node_of_a_slow_link_is_left_and_a_pair_is_only_named(played: PlayedTests) -> None:
    played.wait_longer()
    played.after(1)
    played.measure(pair_rates=[1000.0, 400.0, 400.0, 1000.0])
    played.after(2)
    ((host, (slow, since)),) = played.tests.slow.items()
    assert (host, slow.node, slow.ranks, since) == ("n2", 2, (2,), 1000.0)
    assert slow.cost == pytest.approx(0.2)
    played.tests.begin(2)
    played.after(1)
    played.measure(launch=2, pair_rates=[1000.0, 400.0, 1000.0, 1000.0])
    played.after(2)
    assert played.tests.slow == {}
    one, pair = (event.data for event in played.lines(EventKind.LINK_SLOW))
    assert (one["hosts"], pair["hosts"]) == (["n2"], ["n1", "n2"])
    assert pair["text"].endswith("it does not show which of them is the reason")
    assert len(noticed(played.lines(EventKind.LINK_SLOW))) == 2


def test_long_steps_lead_to_a_node_whose_work_is_slow(played: PlayedTests) -> None:
    """The watch did not suspect the node, so the test alone journals its beginning and its end."""
    played.wait_longer(all_wait=False)
    played.after(1)
    played.measure(host_times=[0.01, 0.01, 0.02, 0.01])
    played.after(2)
    assert list(played.tests.slow) == ["n2"]
    played.watch.long_steps = None
    played.after(1)
    begun, ended = (event.data for event in played.lines(EventKind.NODE_SLOW))
    assert begun["text"] == (
        "the test after step 7 finds that n2 is slow: the same work takes 100% longer on Python "
        "than elsewhere"
    )
    assert (begun["slow"], begun["ranks"], begun["cost_share"]) == (True, [2], 0.2)
    assert (ended["slow"], ended["text"]) == (False, "n2 is as fast as usual again")
    assert played.lines(EventKind.LINK_SLOW) == []


def test_ranks_that_spin_are_tested_and_the_end_is_journaled(played: PlayedTests) -> None:
    """Their waits do not show, so the watch itself names nothing."""
    played.wait_longer(all_wait=False)
    played.after(1)
    played.measure(pair_rates=[1000.0, 400.0, 400.0, 1000.0])
    played.after(2)
    assert list(played.tests.slow) == ["n2"]
    played.watch.long_steps = None
    played.after(1)
    assert [one.data["slow"] for one in played.lines(EventKind.LINK_SLOW)] == [True, False]
    assert played.tests.slow == {}


def test_with_ask_the_line_says_how_to_drain_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedTests(tmp_path, monkeypatch, "ask")
    played.wait_longer()
    played.after(1)
    played.measure(pair_rates=[1000.0, 400.0, 400.0, 1000.0])
    played.after(2)
    (line,) = played.lines(EventKind.LINK_SLOW)
    assert line.data["asks"]
    assert "scontrol update nodename=n2 state=drain" in line.data["text"]


@pytest.mark.parametrize("slowdown", ["report", "off"])
def test_other_policies_test_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slowdown: Slowdown
) -> None:
    played = PlayedTests(tmp_path, monkeypatch, slowdown)
    played.suspect()
    played.wait_longer()
    assert [played.after(GAP_S) for _ in range(3)] == [0, 0, 0]


def test_a_test_without_results_is_given_up(played: PlayedTests) -> None:
    played.suspect()
    played.after(1)
    # The ranks of fewer nodes than those that train.
    played.measure(host_times=EVEN[:2], device_times=EVEN[:2], pair_rates=[1.0])
    played.after(RESULT_S_MAX + 1)
    assert played.after(GAP_S) == 2
    assert played.tests.slow == {}
    assert played.lines(EventKind.NODE_SLOW) == []
