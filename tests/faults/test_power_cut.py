"""Power cuts: whichever unsynced bytes and names are lost, a resume finds a complete step."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.power import Disk, Inode, Loss, State
from tests.faults.saves import has_committed, nodes_of, resume_step, save
from tests.faults.shim import Call

RUN = "run"
SEED = 7


def call(op: str, path: str, other: str = "", data: bytes = b"", offset: int = 0) -> Call:
    return Call(op, path, other, 0, 0, offset, False, data)


def test_disk_model_keeps_only_what_fsync_guarantees() -> None:
    disk = Disk([RUN])
    disk.play(call("open", "run/a.tmp"))
    disk.play(call("write", "run/a.tmp", data=b"four"))
    disk.play(call("fsync", "run/a.tmp"))
    disk.play(call("rename", "run/a", other="run/a.tmp"))
    assert not disk.worst().has("run/a")
    states = list(disk.states(random.Random(SEED)))
    assert {state.has("run/a") for state in states} == {True, False}
    assert len({state.fingerprint() for state in states}) == 3
    disk.play(call("write", "run/a", data=b"more", offset=4))
    disk.play(call("fsync", "run"))
    assert [state.content(found(disk, "run/a")) for state in disk.states(random.Random())] == [
        b"fourmore",
        b"four",
        b"four",
    ]
    assert [state.loss for state in disk.states(random.Random())] == list(Loss)
    assert disk.worst().has("run/a")


def found(disk: Disk, path: str) -> Inode:
    inode = disk.find(path)
    assert inode is not None
    return inode


class StateChecker:
    """Writes disk states to a folder and finds the step that a resume uses; caches equal states."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[object, ...], int | None] = {}

    def believed(self, state: State) -> int | None:
        fingerprint = state.fingerprint()
        if fingerprint not in self._known:
            state.write_files(state.root, self._folder)
            self._known[fingerprint] = resume_step(self._folder / RUN)
            shutil.rmtree(self._folder)
        return self._known[fingerprint]

    def __len__(self) -> int:
        return len(self._known)


def test_resume_after_a_power_cut_at_any_call_finds_a_complete_step(
    shim_library: Path, tmp_path: Path
) -> None:
    with nodes_of(shim_library, tmp_path) as (node,):
        traces = []
        for step in (1, 2):
            node.shim.forget()
            assert has_committed(save([node], step))
            traces.append(node.shim.calls())
    disk, cuts, chance = Disk([RUN]), StateChecker(tmp_path / "cut"), random.Random(SEED)
    committed: int | None = None
    for step, trace in enumerate(traces, 1):
        seen = set()
        for each in trace:
            disk.play(each)
            for state in disk.states(chance):
                believed = cuts.believed(state)
                assert believed in {committed, step}, (step, each, state.loss)
                seen.add(believed)
        assert seen == {committed, step}
        # The step was reported as committed here, so it must never disappear again.
        assert {cuts.believed(state) for state in disk.states(chance)} == {step}
        committed = step
    assert len(cuts) > 100


@pytest.mark.parametrize("without", ["run/checkpoints", "STEP", "data", "manifest"])
def test_omitting_any_fsync_of_a_save_is_detected(
    shim_library: Path, tmp_path: Path, without: str
) -> None:
    """Without one of the kinds of fsync, some state after a power cut loses the step."""
    with nodes_of(shim_library, tmp_path) as (node,):
        assert has_committed(save([node], 1))
        trace = node.shim.calls()
    kinds: dict[str, Callable[[str], bool]] = {
        "run/checkpoints": lambda path: path == "run/checkpoints",
        "STEP": lambda path: path.endswith(".l01"),
        "data": lambda path: path.endswith("distcp.tmp"),
        "manifest": lambda path: "/.manifest.json" in path,
    }
    disk, cuts, chance = Disk([RUN]), StateChecker(tmp_path / "cut"), random.Random(SEED)
    for each in trace:
        if each.op != "fsync" or not kinds[without](each.path):
            disk.play(each)
    assert {cuts.believed(state) for state in disk.states(chance)} == {1, None}
