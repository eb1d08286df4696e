"""Every system call of a save fails, or is the last one: what is committed stays, nothing else is.

A first save is recorded, and each of its calls is a point at which later saves are struck.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from tests.faults.saves import (
    WRITTEN_S_MAX,
    Node,
    believed_step,
    has_committed,
    has_manifest,
    name_of,
    nodes_of,
    save,
    wait_until_written,
)
from tests.faults.shim import Action, Point, points_of, strangers
from tests.flusher_supervisor import wait_until

from holdfast.contracts.paths import RunPaths
from holdfast.contracts.slots import Slot, SlotState
from holdfast.trainer.flusher.files import WRITE_BYTES_MAX

RUN = "run"
DONE = SlotState.DONE
LOOK_AT_MANIFEST = Point("open", f"{RUN}/checkpoints/STEP/manifest.json", 1)
FILES = {
    *(".metadata", "__0_0.distcp", "train_state.json", "pp1", "__1_0.distcp", "manifest.json"),
}


@dataclass(frozen=True)
class Struck:
    """A point, and whether only the first save of a run has it: that makes the folders."""

    point: Point
    is_first_only: bool

    def __str__(self) -> str:
        return f"{self.point}{' of the first save' if self.is_first_only else ''}"


def is_harmless(point: Point, action: Action) -> bool:
    """True when the save is committed although this call fails: nothing of it is needed."""
    if os.path.basename(point.pattern) in {"latest", ".latest.tmp"}:
        return True
    return point.op == "unlink" and action is Action.FAIL_ONCE


def record(node: Node) -> list[Struck]:
    """The points of a save, from a run's first save and its second."""
    found = []
    for step in (1, 2):
        node.shim.forget()
        slots = save([node], step)
        assert has_committed(slots)
        calls = node.shim.calls()
        assert list(strangers(calls)) == []
        found.append(points_of(calls, RUN))
    first, second = found
    common = {point for point in first if point in second}
    assert {"open", "write", "fsync", "rename", "link", "symlink", "mkdir"} <= {
        point.op for point in common
    }
    # A run's first save finds no folder in which a manifest could be.
    assert set(second) - common == {LOOK_AT_MANIFEST}
    return [Struck(point, point not in common) for point in first] + [
        Struck(LOOK_AT_MANIFEST, is_first_only=False)
    ]


@pytest.fixture
def node(shim_library: Path, tmp_path: Path) -> Iterator[Node]:
    with nodes_of(shim_library, tmp_path) as (made,):
        yield made


class Strikes:
    """Takes a node's saves through a list of points, with the steps counted up."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.root = node.run.parent
        self.points = record(node)
        self.steps = count(3)
        self.folders = count(1)
        self.believed: int | None = 2

    def strike(self, struck: Struck, action: Action, error: int = 0) -> tuple[int, list[Slot]]:
        """Save a step with `action` at the point; returns the step and its slots, undecided."""
        if struck.is_first_only:
            folder = self.root / f"run{next(self.folders)}"
            folder.mkdir()
            self.node.move_to(folder)
            self.believed = None
        step = next(self.steps)
        self.node.shim.forget()
        pattern = struck.point.pattern
        moved = Point(struck.point.op, self._here(pattern), struck.point.nth)
        self.node.shim.arm(moved, name_of(step), action, error)
        return step, self.node.stage(step)

    def expect(self, step: int, committed: bool) -> None:
        """What a resume believes is the step, when it was committed, else what it was before."""
        if committed:
            self.believed = step
        assert believed_step(self.node.run) == self.believed

    def expect_next_save(self) -> None:
        """The fault is over: the next save succeeds and is believed."""
        self.node.shim.let_pass()
        step = next(self.steps)
        assert has_committed(save([self.node], step))
        self.expect(step, committed=True)

    def _here(self, pattern: str) -> str:
        return self.node.run.name + pattern[len(RUN) :]


@pytest.mark.parametrize(
    ("action", "error"),
    [(Action.FAIL_ONCE, errno.EIO), (Action.FAIL_FROM_HERE, errno.ENOSPC)],
    ids=["EIO-once", "ENOSPC-from-there-on"],
)
def test_save_with_any_one_failing_system_call_leaves_a_valid_state(
    node: Node, action: Action, error: int
) -> None:
    strikes = Strikes(node)
    wrong = []
    for struck in strikes.points:
        step, slots = strikes.strike(struck, action, error)
        wait_until_written(slots)
        assert node.shim.has_fired, struck
        committed = has_committed(slots)
        if committed != is_harmless(struck.point, action):
            wrong.append(f"{struck}: {'committed' if committed else slots[0].error}")
        if not committed:
            assert all(os.strerror(error) in slot.error for slot in slots), struck
            expect_word_of_failure(node, step)
            assert not has_manifest(node.run, step), struck
        strikes.expect(step, committed)
        strikes.expect_next_save()
    assert wrong == []
    assert len(strikes.points) > 35


def expect_word_of_failure(node: Node, step: int) -> None:
    wait_until(
        lambda: any(m["step"] == step for m in node.flusher_supervisor.of_kind("failed")),
        f"the flusher supervisor to hear of the failure of step {step}",
    )


def test_flusher_killed_after_any_system_call_finishes_the_save_on_restart(node: Node) -> None:
    """All at once the disk is as the whole node's death would leave it; then it is finished."""
    strikes = Strikes(node)
    for struck in strikes.points:
        step, slots = strikes.strike(struck, Action.KILL_AFTER)
        node.flusher_supervisor.process.wait(WRITTEN_S_MAX)
        assert node.shim.has_fired, struck
        strikes.expect(step, committed=has_manifest(node.run, step))
        node.shim.let_pass()
        node.flusher_supervisor.kill()
        node.flusher_supervisor.start()
        wait_until_written(slots)
        assert has_committed(slots), (struck, slots[0].error)
        strikes.expect(step, committed=True)
        left = {path.name for path in RunPaths(node.run).checkpoint(name_of(step)).rglob("*")}
        assert left == FILES, struck
        strikes.expect_next_save()


def test_short_writes_are_continued(node: Node) -> None:
    strikes = Strikes(node)
    writes = [struck for struck in strikes.points if struck.point.op == "write"]
    assert len(writes) == len(FILES) - 1
    for struck in writes:
        step, slots = strikes.strike(struck, Action.SHORT_WRITE)
        wait_until_written(slots)
        assert node.shim.has_fired, struck
        assert has_committed(slots), (struck, slots[0].error)
        strikes.expect(step, committed=True)


def test_any_failing_write_of_a_large_file_fails_the_save(
    shim_library: Path, tmp_path: Path
) -> None:
    with nodes_of(shim_library, tmp_path, local_ranks=1, tensor_bytes=WRITE_BYTES_MAX + 5000) as (
        node,
    ):
        strikes = Strikes(node)
        writes = [s for s in strikes.points if s.point.pattern.endswith("__0_0.distcp.tmp")]
        # Past the page cache, what ends within a page is a write of its own.
        assert [s.point.nth for s in writes if s.point.op == "write"] in ([1, 2], [1, 2, 3])
        for struck in writes:
            step, slots = strikes.strike(struck, Action.FAIL_ONCE, errno.EIO)
            wait_until_written(slots)
            assert node.shim.has_fired, struck
            assert not has_committed(slots), struck
            strikes.expect(step, committed=False)
        strikes.expect_next_save()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("struck_node", [0, 1])
def test_two_node_save_with_any_one_failing_system_call_is_consistent(
    shim_library: Path, tmp_path: Path, struck_node: int
) -> None:
    """Node 0's word decides: what it calls committed is believed, what it gives up is not."""
    with nodes_of(shim_library, tmp_path, nodes=2) as nodes:
        believed, steps = 1, count(2)
        nodes[struck_node].shim.forget()
        assert has_committed(save(nodes, believed))
        points = points_of(nodes[struck_node].shim.calls(), RUN)
        assert len(points) > 25
        for point in points:
            step = next(steps)
            # A poll may come less often than it did: a point that is not met fails nothing.
            nodes[struck_node].shim.arm(point, name_of(step), Action.FAIL_ONCE, errno.EIO)
            slots = [node.stage(step) for node in nodes]
            wait_until_written(slots[0] + slots[1])
            if has_committed(slots[0]):
                believed = step
            elif nodes[struck_node].shim.has_fired:
                assert os.strerror(errno.EIO) in slots[0][0].error, point
            assert believed_step(nodes[0].run) == believed, point
            nodes[struck_node].shim.let_pass()
            believed = next(steps)
            assert has_committed(save(nodes, believed)), point
            assert believed_step(nodes[0].run) == believed, point


def wait_for_fault_or_commit(struck: Node, slots: list[Slot]) -> None:
    wait_until(
        lambda: struck.shim.has_fired or all(slot.state is DONE for slot in slots),
        "the fault or the commit",
        WRITTEN_S_MAX,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("struck_node", [0, 1])
def test_two_node_save_survives_a_flusher_killed_after_any_system_call(
    shim_library: Path, tmp_path: Path, struck_node: int
) -> None:
    """Started again by its flusher supervisor, it finishes its part, and both nodes report one
    commit."""
    with nodes_of(shim_library, tmp_path, nodes=2) as nodes:
        struck = nodes[struck_node]
        struck.shim.forget()
        assert has_committed(save(nodes, 1))
        for step, point in enumerate(points_of(struck.shim.calls(), RUN), 2):
            struck.shim.arm(point, name_of(step), Action.KILL_AFTER)
            slots = [slot for node in nodes for slot in node.stage(step)]
            wait_for_fault_or_commit(struck, slots)
            if struck.shim.has_fired:
                struck.flusher_supervisor.process.wait(WRITTEN_S_MAX)
                assert believed_step(struck.run) in {step - 1, step}, point
                struck.shim.let_pass()
                struck.flusher_supervisor.kill()
                struck.flusher_supervisor.start()
            wait_until_written(slots)
            assert has_committed(slots), (point, [slot.error for slot in slots])
            assert believed_step(struck.run) == step, point
