"""Saves through real flushers with the fault shim: staging steps, and the step a resume uses."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.faults.shim import Shim
from tests.support.flusher_supervisor import FakeRank, SlotHolder, wait_until

from holdfast.contracts.disk.damage import find_damage
from holdfast.contracts.disk.manifest import read_manifest
from holdfast.contracts.disk.paths import CheckpointName, RunPaths
from holdfast.trainer.loading.resume import choose
from holdfast.trainer.slots.slots import Slot, SlotState

# The files are small, so a save that takes longer hangs, even on a busy machine.
WRITTEN_S_MAX: Final = 60.0
FILE_BYTES: Final = 3000
_ENDINGS: Final = frozenset({SlotState.DONE, SlotState.FAILED})


_BUSY: Final = frozenset({SlotState.COPYING, SlotState.SEALED, SlotState.FLUSHING})


class ManyFiles(FakeRank):
    """A rank whose step has several files, one of them in a subfolder."""

    tensor_bytes = FILE_BYTES

    @property
    def files(self) -> dict[str, int]:
        """Sizes of this rank's files by path; the first rank has the session's files too."""
        if self.rank > 0:
            return {f"pp1/__{self.rank}_0.distcp": self.tensor_bytes}
        return {
            ".metadata": FILE_BYTES,
            "__0_0.distcp": self.tensor_bytes,
            "train_state.json": FILE_BYTES,
        }

    def stage_step(self, step: int) -> Slot:
        """Write the step's files into a free slot and seal it."""
        content = b"".join(content_of(step, path, size) for path, size in self.files.items())
        number = next(i for i, s in enumerate(self.slots) if s.state not in _BUSY)
        return self.stage(step, content, slot=number)

    def table(self, step: int, size: int) -> dict[str, Any]:
        """The table of these files."""
        sizes = list(self.files.values())
        return {
            **super().table(step, size),
            "files": [
                {"path": path, "offset": sum(sizes[:i]), "bytes": sizes[i]}
                for i, path in enumerate(self.files)
            ],
        }


def content_of(step: int, path: str, size: int = FILE_BYTES) -> bytes:
    """The expected contents of a file of a step; all files differ."""
    stem = f"{path} of step {step}; ".encode()
    return (stem * (size // len(stem) + 1))[:size]


class Node:
    """One node of a run: a flusher supervisor, its flusher with the shim, and the node's ranks."""

    def __init__(
        self,
        shim: Shim,
        run: Path,
        *,
        node: int,
        nodes: int,
        local_ranks: int,
        tensor_bytes: int = FILE_BYTES,
    ) -> None:
        self.shim, self.run = shim, run
        name = f"holdfast-fault-{os.getpid()}-{time.monotonic_ns()}-{node}"
        self.flusher_supervisor = SlotHolder(
            name, node=node, nodes=nodes, environment=shim.environment
        )
        self.ranks = [
            ManyFiles(
                self.flusher_supervisor,
                run,
                rank=node * local_ranks + local,
                world_size=nodes * local_ranks,
                node=node,
                nodes=nodes,
                data_bytes=2 * FILE_BYTES + tensor_bytes,
            )
            for local in range(local_ranks)
        ]
        for rank in self.ranks:
            rank.tensor_bytes = tensor_bytes
        shim.trace()

    def move_to(self, run: Path) -> None:
        """Save into another run's folder from now on."""
        self.run = run
        for rank in self.ranks:
            rank.run = run

    def stage(self, step: int) -> list[Slot]:
        """Every rank seals the step."""
        return [rank.stage_step(step) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.flusher_supervisor.close()
        self.shim.close()


@contextmanager
def nodes_of(
    library: Path,
    folder: Path,
    *,
    nodes: int = 1,
    local_ranks: int = 2,
    tensor_bytes: int = FILE_BYTES,
) -> Iterator[list[Node]]:
    """`nodes` nodes that save into `folder`/root/run."""
    root = folder / "root"
    (root / "run").mkdir(parents=True)
    made: list[Node] = []
    try:
        for node in range(nodes):
            shim = Shim(library, root, folder / f"shim-{node}")
            made.append(
                Node(
                    shim,
                    root / "run",
                    node=node,
                    nodes=nodes,
                    local_ranks=local_ranks,
                    tensor_bytes=tensor_bytes,
                )
            )
        yield made
    finally:
        for each in made:
            each.close()


def save(nodes: Sequence[Node], step: int) -> list[Slot]:
    """Stage a step on all nodes and wait until it is committed or failed on all of them."""
    slots = [slot for node in nodes for slot in node.stage(step)]
    wait_until_written(slots)
    return slots


def wait_until_written(slots: Sequence[Slot]) -> None:
    """Wait until the flushers have decided on every slot."""
    wait_until(
        lambda: all(slot.state in _ENDINGS for slot in slots),
        "a decision on every slot",
        WRITTEN_S_MAX,
    )


def has_committed(slots: Sequence[Slot]) -> bool:
    """True if the step was committed, False if it failed; all ranks must agree."""
    states = {slot.state for slot in slots}
    assert states in ({SlotState.DONE}, {SlotState.FAILED}), states
    return states == {SlotState.DONE}


def name_of(step: int) -> str:
    return str(CheckpointName(step, 1, 1))


def resume_step(run: Path) -> int | None:
    """The step that a resume would use; checks that its files equal the staged ones."""
    choice = choose(RunPaths(run), verify=True)
    if choice.directory is None or choice.manifest is None:
        return None
    step = choice.manifest.step
    assert find_damage(choice.directory, choice.manifest) == []
    for entry in choice.manifest.files:
        content = (choice.directory / entry.path).read_bytes()
        assert content == content_of(step, entry.path, entry.bytes), entry.path
    assert {entry.path for entry in choice.manifest.files} >= {".metadata", "__0_0.distcp"}
    return step


def has_manifest(run: Path, step: int) -> bool:
    return read_manifest(RunPaths(run).checkpoint(name_of(step))) is not None
