"""Faults at every system call of a save: committed steps stay, and failed ones are not used.

The calls of a first save are recorded. Each of them is a point where a later save fails or the
flusher is killed.
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
    has_committed,
    has_manifest,
    name_of,
    nodes_of,
    resume_step,
    save,
    wait_until_written,
)
from tests.faults.shim import Action, Point, points_of, unknown_calls
from tests.support.flusher_supervisor import wait_until

from holdfast.contracts.disk.paths import RunPaths
from holdfast.trainer.flusher.files import WRITE_BYTES_MAX
from holdfast.trainer.slots.slots import Slot, SlotState

RUN = "run"
DONE = SlotState.DONE
LOOK_AT_MANIFEST = Point("open", f"{RUN}/checkpoints/STEP/manifest.json", 1)
FILES = {
    *(".metadata", "__0_0.distcp", "train_state.json", "pp1", "__1_0.distcp", "manifest.json"),
}


@dataclass(frozen=True)
class FaultPoint:
    """A system call, and whether only the first save of a run makes it, to create folders."""

    point: Point
    is_first_only: bool

    def __str__(self) -> str:
        return f"{self.point}{' of the first save' if self.is_first_only else ''}"


def is_harmless(point: Point, action: Action) -> bool:
    """True when the save is committed although this call fails, because it is not essential."""
    if os.path.basename(point.pattern) in {"latest", ".latest.tmp"}:
        return True
    return point.op == "unlink" and action is Action.FAIL_ONCE


def record(node: Node) -> list[FaultPoint]:
    """All fault points, recorded from a run's first and second save."""
    found = []
    for step in (1, 2):
        node.shim.forget()
        slots = save([node], step)
        assert has_committed(slots)
        calls = node.shim.calls()
        assert list(unknown_calls(calls)) == []
        found.append(points_of(calls, RUN))
    first, second = found
    common = {point for point in first if point in second}
    assert {"open", "write", "fsync", "rename", "link", "symlink", "mkdir"} <= {
        point.op for point in common
    }
    # At a run's first save no folder exists that could hold a manifest.
    assert set(second) - common == {LOOK_AT_MANIFEST}
    return [FaultPoint(point, point not in common) for point in first] + [
        FaultPoint(LOOK_AT_MANIFEST, is_first_only=False)
    ]


@pytest.fixture
def node(shim_library: Path, tmp_path: Path) -> Iterator[Node]:
    with nodes_of(shim_library, tmp_path) as (made,):
        yield made


class FaultInjector:
    """Injects faults into a node's saves, one point after the other, at increasing steps."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.root = node.run.parent
        self.points = record(node)
        self.steps = count(3)
        self.folders = count(1)
        self.believed: int | None = 2

    def inject(self, fault: FaultPoint, action: Action, error: int = 0) -> tuple[int, list[Slot]]:
        """Start to save a step with `action` at the point; returns the step and its slots."""
        if fault.is_first_only:
            folder = self.root / f"run{next(self.folders)}"
            folder.mkdir()
            self.node.move_to(folder)
            self.believed = None
        step = next(self.steps)
        self.node.shim.forget()
        pattern = fault.point.pattern
        moved = Point(fault.point.op, self._here(pattern), fault.point.nth)
        self.node.shim.arm(moved, name_of(step), action, error)
        return step, self.node.stage(step)

    def expect(self, step: int, committed: bool) -> None:
        """A resume uses `step` if it was committed, else the same step as before."""
        if committed:
            self.believed = step
        assert resume_step(self.node.run) == self.believed

    def expect_next_save(self) -> None:
        """Without the fault the next save is committed, and a resume uses it."""
        self.node.shim.disarm()
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
    injector = FaultInjector(node)
    wrong = []
    for fault in injector.points:
        step, slots = injector.inject(fault, action, error)
        wait_until_written(slots)
        assert node.shim.has_fired, fault
        committed = has_committed(slots)
        if committed != is_harmless(fault.point, action):
            wrong.append(f"{fault}: {'committed' if committed else slots[0].error}")
        if not committed:
            assert all(os.strerror(error) in slot.error for slot in slots), fault
            wait_for_failure_report(node, step)
            assert not has_manifest(node.run, step), fault
        injector.expect(step, committed)
        injector.expect_next_save()
    assert wrong == []
    assert len(injector.points) > 35


def wait_for_failure_report(node: Node, step: int) -> None:
    wait_until(
        lambda: any(m["step"] == step for m in node.flusher_supervisor.of_kind("failed")),
        f"the flusher supervisor's report that step {step} failed",
    )


@pytest.mark.more
def test_flusher_killed_after_any_system_call_finishes_the_save_on_restart(node: Node) -> None:
    """The disk is left as the death of the whole node would; a new flusher finishes the save."""
    injector = FaultInjector(node)
    for fault in injector.points:
        step, slots = injector.inject(fault, Action.KILL_AFTER)
        node.flusher_supervisor.process.wait(WRITTEN_S_MAX)
        assert node.shim.has_fired, fault
        injector.expect(step, committed=has_manifest(node.run, step))
        node.shim.disarm()
        node.flusher_supervisor.kill()
        node.flusher_supervisor.start()
        wait_until_written(slots)
        assert has_committed(slots), (fault, slots[0].error)
        injector.expect(step, committed=True)
        left = {path.name for path in RunPaths(node.run).checkpoint(name_of(step)).rglob("*")}
        assert left == FILES, fault
        injector.expect_next_save()


def test_short_writes_are_continued(node: Node) -> None:
    injector = FaultInjector(node)
    writes = [fault for fault in injector.points if fault.point.op == "write"]
    assert len(writes) == len(FILES) - 1
    for fault in writes:
        step, slots = injector.inject(fault, Action.SHORT_WRITE)
        wait_until_written(slots)
        assert node.shim.has_fired, fault
        assert has_committed(slots), (fault, slots[0].error)
        injector.expect(step, committed=True)


def test_any_failing_write_of_a_large_file_fails_the_save(
    shim_library: Path, tmp_path: Path
) -> None:
    with nodes_of(shim_library, tmp_path, local_ranks=1, tensor_bytes=WRITE_BYTES_MAX + 5000) as (
        node,
    ):
        injector = FaultInjector(node)
        writes = [s for s in injector.points if s.point.pattern.endswith("__0_0.distcp.tmp")]
        # Direct I/O writes the part beyond the last whole page separately.
        assert [s.point.nth for s in writes if s.point.op == "write"] in ([1, 2], [1, 2, 3])
        for fault in writes:
            step, slots = injector.inject(fault, Action.FAIL_ONCE, errno.EIO)
            wait_until_written(slots)
            assert node.shim.has_fired, fault
            assert not has_committed(slots), fault
            injector.expect(step, committed=False)
        injector.expect_next_save()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("faulty_node", [0, 1])
def test_two_node_save_with_any_one_failing_system_call_is_consistent(
    shim_library: Path, tmp_path: Path, faulty_node: int
) -> None:
    """Node 0's result decides: a resume uses the step exactly if node 0 reports it committed."""
    with nodes_of(shim_library, tmp_path, nodes=2) as nodes:
        believed, steps = 1, count(2)
        nodes[faulty_node].shim.forget()
        assert has_committed(save(nodes, believed))
        points = points_of(nodes[faulty_node].shim.calls(), RUN)
        assert len(points) > 25
        for point in points:
            step = next(steps)
            # The number of polls varies, so an armed call may not occur; then nothing fails.
            nodes[faulty_node].shim.arm(point, name_of(step), Action.FAIL_ONCE, errno.EIO)
            slots = [node.stage(step) for node in nodes]
            wait_until_written(slots[0] + slots[1])
            if has_committed(slots[0]):
                believed = step
            elif nodes[faulty_node].shim.has_fired:
                assert os.strerror(errno.EIO) in slots[0][0].error, point
            assert resume_step(nodes[0].run) == believed, point
            nodes[faulty_node].shim.disarm()
            believed = next(steps)
            assert has_committed(save(nodes, believed)), point
            assert resume_step(nodes[0].run) == believed, point


def wait_for_fault_or_commit(node: Node, slots: list[Slot]) -> None:
    wait_until(
        lambda: node.shim.has_fired or all(slot.state is DONE for slot in slots),
        "the fault or the commit",
        WRITTEN_S_MAX,
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("faulty_node", [0, 1])
def test_two_node_save_survives_a_flusher_killed_after_any_system_call(
    shim_library: Path, tmp_path: Path, faulty_node: int
) -> None:
    """The restarted flusher finishes its part, and both nodes report the same commit."""
    with nodes_of(shim_library, tmp_path, nodes=2) as nodes:
        faulty = nodes[faulty_node]
        faulty.shim.forget()
        assert has_committed(save(nodes, 1))
        for step, point in enumerate(points_of(faulty.shim.calls(), RUN), 2):
            faulty.shim.arm(point, name_of(step), Action.KILL_AFTER)
            slots = [slot for node in nodes for slot in node.stage(step)]
            wait_for_fault_or_commit(faulty, slots)
            if faulty.shim.has_fired:
                faulty.flusher_supervisor.process.wait(WRITTEN_S_MAX)
                assert resume_step(faulty.run) in {step - 1, step}, point
                faulty.shim.disarm()
                faulty.flusher_supervisor.kill()
                faulty.flusher_supervisor.start()
            wait_until_written(slots)
            assert has_committed(slots), (point, [slot.error for slot in slots])
            assert resume_step(faulty.run) == step, point
