"""Copies of snapshots at a neighbour: who it is, what is sent, and what is believed."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.cli_calls import Call
from tests.support.flusher_supervisor import wait_until
from tests.support.runs import RunFolder
from tests.support.slot_tables import make_table

from holdfast.contracts.disk.journal import Event, EventKind, JournalWriter, read_journal
from holdfast.contracts.node.handshake import read_address
from holdfast.contracts.records.protection import (
    COPIES,
    NO_OTHER_NODE,
    SHORT_STEPS,
    SLOW_COPIES,
    SPARES,
    ProtectionNotes,
    summary_of,
    unprotected_in,
)
from holdfast.trainer.flusher.salvage import Agreed, newest_covered
from holdfast.trainer.neighbour import line as lines
from holdfast.trainer.neighbour import receiver as receiving
from holdfast.trainer.neighbour.exchange import Exchange, Protection
from holdfast.trainer.neighbour.node_copy import NodeCopy, copy_slots
from holdfast.trainer.slots.slot_table import FilePlace
from holdfast.trainer.slots.slots import Slot, SlotState
from holdfast.workers.agent import neighbours
from holdfast.workers.agent.context import switch_of
from holdfast.workers.agent.node import CopyRound
from holdfast.workers.agent.runtime import NodeRuntime
from holdfast.workers.decisions.neighbours import FACTOR_MAX, CopyState, RoundEnd, choose_neighbours

FILES = (FilePlace("__0_0.distcp", 0, 9 << 20), FilePlace("train_state.json", 9 << 20, 3000))
SIZE = FILES[1].offset + FILES[1].bytes


# --- who the neighbour is ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        (["", ""], [1, 0]),
        ([""] * 4, [1, 2, 3, 0]),
        (["s1", "s1", "s2", "s2"], [2, 3, 0, 1]),
        (["s1", "s2", "s1", "s2"], [1, 0, 3, 2]),
        (["s1", "s1", "s1", "s2"], [3, 0, 1, 2]),
    ],
)
def test_neighbour_is_below_another_switch_if_known(
    switches: list[str], expected: list[int]
) -> None:
    assert choose_neighbours(switches) == expected


@pytest.mark.parametrize(
    "sizes", [(1, 1), (5, 3, 2), (4, 4), (7, 1, 1), (1, 2, 3, 4, 5), (512, 512)]
)
def test_each_node_keeps_the_copies_of_one_other_node(sizes: tuple[int, ...]) -> None:
    switches = [f"s{number}" for number, size in enumerate(sizes) for _ in range(size)]
    switches = switches[1::2] + switches[::2]
    chosen = choose_neighbours(switches)
    assert sorted(chosen) == list(range(len(switches)))
    assert all(node != holder for node, holder in enumerate(chosen))
    same = sum(switches[node] == switches[holder] for node, holder in enumerate(chosen))
    largest = max(Counter(switches).values())
    assert same == max(0, 2 * largest - len(switches))


@pytest.mark.parametrize(
    ("pattern", "address", "expected"),
    [
        ("switch.switch.node", "s0.s3.n17", "s0.s3"),
        ("switch.node", "s3.n17.cluster.org", "s3"),
        ("block.node", "b2.n17", "b2"),
        ("node", "n17", ""),
        ("", "", ""),
        ("switch.node", "n17", ""),
    ],
)
def test_switch_is_read_from_the_variables_of_slurm(
    pattern: str, address: str, expected: str
) -> None:
    variables = {"SLURM_TOPOLOGY_ADDR_PATTERN": pattern, "SLURM_TOPOLOGY_ADDR": address}
    assert switch_of(variables) == expected


# --- which step is committed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lists", "gone", "copies", "expected"),
    [
        # The newest step that the others have and that a living node holds for the lost one.
        ({0: [7, 8], 1: [7, 8]}, [2], {0: {2: [7]}, 1: {2: []}}, Agreed(7, {2: 0})),
        ({0: [7, 8], 1: [7, 8]}, [2], {0: {2: [8]}, 1: {2: [8]}}, Agreed(8, {2: 0})),
        ({0: [7, 8], 1: [6, 7]}, [2], {0: {2: [8]}, 1: {2: []}}, Agreed(None)),
        ({0: [8]}, [1, 2], {0: {1: [8], 2: []}}, Agreed(None)),
        ({0: [8]}, [1, 2], {0: {1: [8], 2: [8]}}, Agreed(8, {1: 0, 2: 0})),
        # A lost node that had listed its snapshots may have written its files.
        ({0: [7, 8], 1: [8]}, [1], {0: {1: []}}, Agreed(8)),
        ({0: [7, 8], 1: [8]}, [1], {0: {1: [8]}}, Agreed(8, {1: 0})),
        ({}, [1], {}, Agreed(None)),
    ],
)
def test_newest_step_that_nodes_or_copies_have_is_chosen(
    lists: dict[int, list[int]],
    gone: list[int],
    copies: dict[int, dict[int, list[int]]],
    expected: Agreed,
) -> None:
    assert newest_covered(lists, gone, copies) == expected


# --- what is copied, sent and believed --------------------------------------------------------


def new_slot() -> Slot:
    return Slot(Slot.create(SIZE))


def fill(slot: Slot, step: int, value: int | None = None) -> None:
    """Keep a snapshot of `step` in a slot; its bytes show the step or `value`."""
    slot.begin(step)
    slot.data[:SIZE] = bytes([step if value is None else value]) * SIZE
    slot.data[:8] = step.to_bytes(8, "big")
    name = f"step-{step:08d}.a0001.l01"
    table = make_table(node=0, nodes=2, step=step, checkpoint=name, files=FILES, staged_at=step)
    slot.seal(table.to_document(), is_snapshot=True)


def test_copy_of_slots_has_the_checksums_of_its_bytes() -> None:
    slot = new_slot()
    fill(slot, 5)
    copied = copy_slots(1, [slot])
    assert copied is not None
    assert (copied.step, copied.node, copied.bytes) == (5, 0, SIZE)
    assert copied.damage() == []
    copied.data[0][6 << 20] ^= 1
    assert copied.damage() == ["__0_0.distcp"]
    copied.data[0][SIZE - 1] ^= 1
    assert copied.damage() == ["__0_0.distcp", "train_state.json"]


def test_snapshot_that_a_rank_overwrites_meanwhile_is_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slot = new_slot()
    fill(slot, 5)
    make = NodeCopy.__init__

    def overwritten(copied: NodeCopy, launch: int, tables: Sequence[object]) -> None:
        make(copied, launch, tables)  # type: ignore[arg-type]
        slot.begin(7)

    monkeypatch.setattr(NodeCopy, "__init__", overwritten)
    assert copy_slots(1, [slot]) is None
    # Overwritten as a whole before the second look.
    fill(slot, 5)

    def filled(copied: NodeCopy, launch: int, tables: Sequence[object]) -> None:
        make(copied, launch, tables)  # type: ignore[arg-type]
        fill(slot, 7)

    monkeypatch.setattr(NodeCopy, "__init__", filled)
    assert copy_slots(1, [slot]) is None


class Two:
    """Two nodes' exchanges: node 0 sends the snapshots in `slots`, node 1 keeps them."""

    def __init__(self, folder: Path) -> None:
        self.slots = [new_slot(), new_slot()]
        self.said: list[str] = []
        self.reports: list[Protection] = []
        self.owner = self._exchange(lambda launch: self.slots)
        self.holder = self._exchange(lambda launch: [])
        self.folder = folder
        self.holder.begin(self.message(1))
        self.owner.begin(self.message(0))

    def message(self, node: int) -> dict[str, object]:
        facts = {"launch": 1, "node": node, "holder": 1 - node}
        return {**facts, "folder": str(self.folder), "addresses": ["127.0.0.1"]}

    def _exchange(self, find: Callable[[int], Sequence[Slot]]) -> Exchange:
        return Exchange(find, report=self.reports.append, say=self.said.append)

    def round(self, number: int, keep: int) -> None:
        """Begin another round; `keep` is the step that node 1 holds."""
        self.owner.begin_round({"launch": 1, "round": number, "keep": keep})

    def wait_for(self, step: int) -> None:
        wait_until(lambda: any(r.step >= step for r in self.reports), f"a copy of step {step}")

    def close(self) -> None:
        self.owner.close()
        self.holder.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.close()


def test_newest_snapshot_is_held_with_all_its_bytes(two: Two) -> None:
    fill(two.slots[0], 5)
    two.wait_for(5)
    two.round(7, keep=5)
    fill(two.slots[1], 6)
    fill(two.slots[0], 7)
    two.wait_for(7)
    assert two.owner.hold(1) == [7, 5]
    two.holder.hold(1)
    assert two.holder.held_for(0, 1) == [7, 5]
    copied = two.holder.copy_of(0, 7)
    assert copied is not None
    assert copied.data[0][:SIZE] == two.slots[0].data[:SIZE]
    assert two.holder.held_for(1, 1) == []
    assert two.holder.held_for(0, 2) == []
    assert not [report for report in two.reports if report.problem]


def test_all_rounds_use_one_connection(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    answer = lines.answer

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return answer(*arguments)

    monkeypatch.setattr(receiving, "answer", counted)
    fill(two.slots[0], 5)
    two.wait_for(5)
    for step in (6, 7):
        two.round(step, keep=step - 1)
        fill(two.slots[(step - 5) % 2], step)
        two.wait_for(step)
    assert len(calls) == 1


def test_an_earlier_connection_of_a_node_frees_none_of_its_copies(two: Two) -> None:
    """A node that calls again may have left a message in its earlier connection."""
    place = two.folder / "neighbour-0001.json"
    earlier = lines.call(place, {"node": 0, "launch": 1}, lambda: False)
    fill(two.slots[0], 5)
    two.wait_for(5)
    held = two.holder.copy_of(0, 5)
    assert held is not None
    earlier.send("begin", record=held.record(), keep=4)
    with pytest.raises(OSError, match=r"closed|reset"):
        earlier.expect("ready")
    earlier.close()
    two.holder.hold(1)
    assert two.holder.held_for(0, 1) == [5]


def test_only_blocks_that_changed_are_sent_again(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(two.slots[0], 5, value=1)
    two.wait_for(5)
    sent: list[int] = []
    send = lines.Line.send

    def counted(
        self: lines.Line, kind: str, content: memoryview | None = None, /, **data: object
    ) -> None:
        if content is not None:
            sent.append(len(content))
        send(self, kind, content, **data)

    monkeypatch.setattr(lines.Line, "send", counted)
    two.round(6, keep=5)
    fill(two.slots[1], 6, value=1)
    two.wait_for(6)
    # The first block has the step in its bytes; the others are as before.
    assert sent == [4 << 20]
    two.holder.hold(1)
    copied = two.holder.copy_of(0, 6)
    assert copied is not None
    assert copied.data[0][:SIZE] == two.slots[1].data[:SIZE]


def test_copy_that_is_damaged_in_memory_is_reported_and_passed_over(two: Two) -> None:
    fill(two.slots[0], 5)
    two.wait_for(5)
    copied = two.holder.copy_of(0, 5)
    assert copied is not None
    copied.data[0][5 << 20] ^= 1
    two.holder.hold(1)
    assert two.holder.held_for(0, 1) == []
    (said,) = two.said
    assert said == (
        "the copy of node 0's snapshot of step 5 is damaged in memory and is not used: __0_0.distcp"
    )


def test_block_that_is_damaged_on_its_way_is_not_believed(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = lines.Line.take

    def damaged(self: lines.Line, target: memoryview) -> None:
        take(self, target)
        if len(target) > 1 << 20:
            target[1000] ^= 1

    monkeypatch.setattr(lines.Line, "take", damaged)
    fill(two.slots[0], 5)
    wait_until(lambda: two.reports, "a report")
    assert two.reports[0].step == -1
    assert two.reports[0].problem == "the copy of step 5 did not arrive intact: __0_0.distcp"
    assert two.holder.held_for(0, 1) == []
    monkeypatch.setattr(lines.Line, "take", take)
    two.round(6, keep=-1)
    fill(two.slots[1], 6)
    two.wait_for(6)


def test_neighbour_without_memory_is_reported(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the receiver has little memory.
    few = SimpleNamespace(free_memory=lambda: 1 << 20)
    monkeypatch.setattr(receiving, "limits", few)
    fill(two.slots[0], 5)
    wait_until(lambda: two.reports, "a report")
    problem = two.reports[0].problem
    assert problem.startswith("the neighbour keeps no copy: 1 MiB of memory are free, but a copy")
    monkeypatch.undo()
    two.round(6, keep=-1)
    fill(two.slots[1], 6)
    two.wait_for(6)


def test_slow_network_drops_snapshots_and_keeps_what_has_arrived(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(two.slots[0], 1)
    two.wait_for(1)
    gate = threading.Event()
    send = lines.Line.send

    def slow(
        self: lines.Line, kind: str, content: memoryview | None = None, /, **data: object
    ) -> None:
        if content is not None:
            gate.wait(20)
        send(self, kind, content, **data)

    monkeypatch.setattr(lines.Line, "send", slow)
    two.round(2, keep=1)
    fill(two.slots[1], 2)
    wait_until(lambda: two.owner._sender.copy_of(2), "the node's own copy")
    for step in range(3, 30):
        fill(two.slots[(step - 5) % 2], step)
    # The ranks overwrote step 2 long ago. Until it has arrived, step 1 stays at both nodes.
    assert two.owner._sender.copy_of(1) is not None
    assert two.holder.copy_of(0, 1) is not None
    gate.set()
    two.wait_for(2)
    assert [report.step for report in two.reports] == [1, 2]
    assert len(two.owner._sender._own) == 2
    # The round after it comes too late for its step.
    two.round(28, keep=2)
    wait_until(lambda: two.reports[-1].is_missed, "a missed round")
    two.round(31, keep=2)
    fill(two.slots[0], 30)
    fill(two.slots[1], 31)
    two.wait_for(31)
    assert two.owner.hold(1) == [31, 2]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(7, False), (7, False)], CopyState(number=7, keep=7)),
        # One node's neighbour has no memory: the others are protected.
        ([(7, False), (-1, False)], CopyState(number=7, keep=7)),
        ([(-1, False), (-1, False)], CopyState(number=7, keep=5)),
        ([(7, False), (-1, True)], CopyState(number=7, keep=5, factor=4)),
        ([(7, False), (8, False)], CopyState(number=7, keep=5, factor=4)),
    ],
)
def test_step_is_kept_once_all_nodes_copied_the_same_one(
    ends: list[tuple[int, bool]], expected: CopyState
) -> None:
    before = CopyState(number=7, keep=5, factor=2)
    assert before.after([RoundEnd(step=s, is_missed=m) for s, m in ends]) == expected


def test_next_round_begins_at_a_step_that_no_node_has_reached() -> None:
    state = CopyState(number=7, keep=7)
    assert state.next(10, step_s=60.0, poll_s=0.25).number == 11
    assert state.next(10, step_s=0.1, poll_s=0.25).number == 18
    assert state.next(10, step_s=0.0, poll_s=0.25).number == 11
    assert CopyState(number=40).next(10, step_s=60.0, poll_s=0.25).number == 41
    late = CopyState(factor=FACTOR_MAX).after([RoundEnd(step=-1, is_missed=True)])
    assert late.factor == FACTOR_MAX


def test_stranger_is_refused(two: Two, tmp_path: Path) -> None:
    place = tmp_path / "neighbour-0001.json"
    assert place.stat().st_mode & 0o077 == 0
    addresses, port, _ = read_address(place)
    with socket.create_connection((addresses[0], port), timeout=10) as stranger:
        line = lines.Line(stranger, lambda: False)
        line.send("nonce", nonce="00" * 32)
        line.expect("nonce")
        line.send("proof", proof="00" * 32)
        line.expect("proof")
        with pytest.raises(OSError, match=r"closed|reset"):
            line.expect("welcome")
    wait_until(lambda: two.said, "a line")
    assert "does not know the attempt's token" in two.said[0]


def test_mark_of_a_slot_changes_with_its_step() -> None:
    slot = new_slot()
    fill(slot, 5)
    before = slot.mark
    assert before[:2] == (SlotState.SNAPSHOT, 5)
    fill(slot, 5, value=9)
    assert slot.mark == before
    fill(slot, 6)
    assert slot.mark != before


# --- what is reported -------------------------------------------------------------------------


def line(kind: EventKind, launch: int, attempt: int, **facts: Any) -> Event:
    data = {"attempt": attempt, "launch": launch, **facts}
    return Event(writer="w", opening=1, sequence=0, time=launch, kind=kind, data=data)


def began(launch: int, attempt: int = 2) -> Event:
    return line(EventKind.LAUNCH_STARTED, launch, attempt)


def ended(launch: int, attempt: int = 2) -> Event:
    return line(EventKind.LAUNCH_ENDED, launch, attempt)


def lacks(launch: int, host: str, problem: str, attempt: int = 2, lacks: str = COPIES) -> Event:
    facts = {"host": host} if host else {}
    more = {**facts, "lacks": lacks, "unprotected": problem}
    return line(EventKind.PROTECTION, launch, attempt, **more)


def texts(*events: Event) -> list[str]:
    return [one["text"] for one in unprotected_in(events)]


def test_what_a_launch_lacks_is_named_until_it_is_there() -> None:
    events = [
        *(began(3, attempt=1), lacks(3, "n0", "no memory", attempt=1), ended(3, attempt=1)),
        *(began(1), lacks(1, "n1", "no memory"), lacks(1, "n2", "no memory")),
        lacks(1, "n2", ""),
    ]
    assert texts(*events) == ["n1: no memory"]
    # Each launch reports its own problems, also if the line of another clock comes first.
    assert texts(*events, ended(1)) == []
    assert texts(*events, ended(1), lacks(2, "n3", "no route"), began(2)) == ["n3: no route"]
    assert texts(*events, ended(1), began(2), ended(2)) == []
    assert texts(*events, began(1, attempt=3)) == []
    used = lacks(1, "", "no spare node is left", lacks=SPARES)
    assert texts(*events, used) == ["n1: no memory", "no spare node is left"]


@pytest.mark.parametrize(
    ("problem", "helps"),
    [
        ("no copy at node 2: the neighbour keeps no copy: 1 MiB of memory are free", "more memory"),
        (NO_OTHER_NODE, "two nodes or more"),
        (SHORT_STEPS, "checkpoint.snapshots"),
        (SLOW_COPIES, "faster network"),
        ("no copy at node 2: ConnectionRefusedError: refused", "check the network"),
    ],
)
def test_what_helps_depends_on_the_cause(problem: str, helps: str) -> None:
    (one,) = unprotected_in([began(1), lacks(1, "", problem)])
    assert helps in one["action"]


def test_many_nodes_are_summed_up() -> None:
    events = [began(1), *(lacks(1, f"n{n}", "no memory") for n in range(3))]
    one = summary_of(unprotected_in(events), COPIES)
    assert one is not None
    assert one["text"] == "n0: no memory; the same on 2 other nodes"
    assert summary_of(unprotected_in(events), SPARES) is None


def test_a_node_without_copies_is_noted_once_and_shown(root: Path, call: Call) -> None:
    run = RunFolder(root, "kelp", "1" * 32)
    attempt = run.submit(1, 2, time.time())
    run.claim(1, time.time())
    run.launch(1, 1, 0, None)
    context = SimpleNamespace(attempt=attempt, host="n1", node=1)
    notes = ProtectionNotes(COPIES, 1, "n1")
    told: Any = SimpleNamespace(context=context, _protection=notes, _copied=None)

    def tell(round_: int, problem: str = "", *, is_missed: bool = False) -> list[str]:
        facts = {"launch": 1, "holder": 2, "round": round_, "problem": problem}
        step = -1 if problem else round_
        NodeRuntime._note_protection(told, {**facts, "step": step, "is_missed": is_missed})
        return [str(e.data["unprotected"]) for e in read_journal(attempt.node_journal(1))[0]]

    assert tell(1) == []
    for number in (2, 3, 4):
        (said,) = tell(number, "the neighbour keeps no copy: 1 MiB of memory are free")
        # A round that came too late says nothing about the neighbour.
        assert tell(number, "the ranks were faster", is_missed=True) == [said]
    assert said == "no copy at node 2: the neighbour keeps no copy: 1 MiB of memory are free"
    shown = call("show", "kelp", "--json").json
    (lack,) = shown["unprotected"]
    assert (lack["lacks"], lack["host"], lack["text"]) == ("copies", "n1", f"n1: {said}")
    (warning,) = [one for one in shown["warnings"] if "n1" in one]
    assert warning == (
        f"unprotected against the loss of a node: {lack['text']}. What helps: {lack['action']}"
    )
    assert tell(5)[1:] == [""]
    shown = call("show", "kelp", "--json").json
    assert shown["unprotected"] == []
    assert not [one for one in shown["warnings"] if "n1" in one]


class Group:
    """What the lead's neighbours use of the nodes."""

    switches = ("", "")
    poll_s = 0.25

    def __init__(self) -> None:
        self.nodes: list[Any] = [SimpleNamespace(name=f"n{n}", copy=self._copy) for n in range(2)]
        self.spares, self.dropped, self.lost = ["n2"], list[str](), list[str]()
        self.ended = CopyRound(launch=1, number=0)

    @property
    def reports(self) -> dict[str, Any]:
        report = SimpleNamespace(copied=self.ended, completed=7)
        return {node.name: report for node in self.nodes}

    def ask_all(self, act: object) -> None:
        assert act

    def _copy(self, launch: int, number: int, keep: int) -> None:
        assert (launch, number > keep) == (1, True)
        self.began = number


@pytest.fixture
def led(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Node 0's neighbours, with what they use, and `told()`: what they have journaled."""
    monkeypatch.setattr(neighbours, "PAUSE_S", 0.0)
    group, path = Group(), tmp_path / "journal.jsonl"
    group.poll_s = 0.0
    here = SimpleNamespace(step_s=1.0, commits=0)
    request = SimpleNamespace(
        nodes=2,
        spare_nodes=1,
        checkpoint=SimpleNamespace(neighbour="auto"),
        program=SimpleNamespace(is_watched=False),
    )
    context: Any = SimpleNamespace(attempt=SimpleNamespace(number=1), request=request)
    journal = JournalWriter(path)
    made = neighbours.Neighbours(context, group, journal, here)  # type: ignore[arg-type]

    def told() -> list[tuple[str, str]]:
        data = [event.data for event in read_journal(path)[0]]
        return [(str(one["lacks"]), str(one["unprotected"])) for one in data]

    yield SimpleNamespace(
        made=made, group=group, here=here, told=told, request=request, launch=made.begin
    )
    journal.close()


def test_spare_nodes_that_are_used_up_are_reported_in_each_launch(led: Any) -> None:
    led.launch(1)
    led.made.look()
    assert led.told() == []
    led.group.spares, led.group.dropped = [], ["n1"]
    for _ in range(2):
        led.made.look()
        assert led.told() == [("spares", "no spare node is left; lost or left: n1")]
    led.launch(2)
    assert len(led.told()) == 2
    led.request.spare_nodes = 0
    led.launch(3)
    assert len(led.told()) == 2


def test_copies_that_come_later_than_checkpoints_are_reported(led: Any) -> None:
    led.launch(1)
    led.group.ended = CopyRound(launch=1, number=0, step=3)
    led.made.look()
    for commits in (1, 2, 3):
        led.here.commits = commits
        led.made.look()
        assert led.told() == ([("copies", SLOW_COPIES)] if commits > 1 else [])
    # The slow round ends, and the next one takes less time than a checkpoint.
    for _ in range(2):
        led.group.ended = CopyRound(launch=1, number=led.group.began, step=led.group.began)
        led.made.look()
    assert led.told() == [("copies", SLOW_COPIES), ("copies", "")]


@pytest.mark.parametrize(("nodes", "is_reported"), [(2, True), (1, False)])
def test_a_single_node_has_no_neighbour(led: Any, nodes: int, is_reported: bool) -> None:
    """With `auto`, a run of one node is as it was meant to be."""
    led.request.nodes = nodes
    del led.group.nodes[1:]
    led.launch(1)
    assert led.told() == ([("copies", NO_OTHER_NODE)] if is_reported else [])
