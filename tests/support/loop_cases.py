"""Interrupts the programs of `loop_shapes` at chosen points and compares them with full runs.

    python -m tests.support.loop_cases SHAPE RANKS INTERVAL SNAPSHOTS STRIDE FOLDER

An uninterrupted run first lists the points that it passes. Then, for every STRIDE-th of them and
for both signals, a run is interrupted there and restarted by the same command. The last notes of
both runs must be bit-identical. Ranks are forked, to save the start of Python.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from tests.support.forked_child import start_child
from tests.support.loop_shapes import SHAPES, Probe
from tests.support.stops import hold_until_agreed

from holdfast.contracts.environment import CHECKPOINT_INTERVAL, CHECKPOINT_SNAPSHOTS
from holdfast.trainer import Session

LAUNCH_S: Final = 60.0
KINDS: Final = {"kill": signal.SIGKILL, "term": signal.SIGTERM}

Place = tuple[str, int]


class Case:
    """One run: its folder, and where and how its first launch is interrupted."""

    def __init__(self, folder: Path, place: Place | None = None, kind: str = "kill") -> None:
        self.folder, self._place, self._kind = folder, place, kind

    def session(self, *parts: Any, **more: Any) -> Session:
        return Session(*parts, seed=3, directory=self.folder / "run", **more)

    def mark(self, place: str, at: int) -> None:
        self.write("places", [place, at])
        if (place, at) != self._place or self.was_interrupted:
            return
        # Wait for all ranks, so that the result does not depend on their speed.
        dist.barrier()
        if dist.get_rank() == 0:
            self._taken.touch()
            os.kill(os.getpid(), KINDS[self._kind])
            hold_until_agreed()
        dist.barrier()

    def note(self, key: str, **facts: Any) -> None:
        self.write("notes", [key, facts])

    def write(self, name: str, line: Any) -> None:
        with open(self.folder / f"{name}-{os.environ['RANK']}.jsonl", "a") as stream:
            stream.write(json.dumps(line) + "\n")

    def notes(self, rank: int) -> dict[str, Any]:
        """The last note under each key."""
        return dict(self.lines("notes", rank))

    def lines(self, name: str, rank: int = 0) -> list[Any]:
        path = self.folder / f"{name}-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def _taken(self) -> Path:
        return self.folder / "taken"

    @property
    def was_interrupted(self) -> bool:
        return self._taken.exists()

    @property
    def has_ended(self) -> bool:
        return "end" in self.notes(0)


def main(shapes: Mapping[str, Callable[[Any], None]] = SHAPES) -> None:
    shape, ranks, interval, snapshots, stride, where = sys.argv[1:]
    folder, world_size = Path(where), int(ranks)
    torch.set_num_threads(1)
    os.environ |= {CHECKPOINT_INTERVAL: interval, CHECKPOINT_SNAPSHOTS: snapshots}
    whole = run(shapes[shape], Case(made(folder / "whole")), world_size)
    places = [(str(name), int(at)) for name, at in whole.lines("places")]
    cases = [(place, kind) for place in dict.fromkeys(places) for kind in sorted(KINDS)]
    different = []
    for number, (place, kind) in enumerate(cases[:: int(stride)]):
        case = run(shapes[shape], Case(made(folder / f"{number}"), place, kind), world_size)
        for rank in range(world_size):
            expected, found = whole.notes(rank), case.notes(rank)
            wrong = [key for key in expected if found.get(key) != expected[key]]
            if wrong:
                different.append([kind, *place, rank, wrong])
    print(json.dumps({"cases": len(cases[:: int(stride)]), "different": different}))


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def run(shape: Callable[[Probe], None], case: Case, world_size: int) -> Case:
    """Launch until the program ends: once, or twice if it is interrupted."""
    for number in range(3):
        launch(shape, case, world_size, case.folder / f"store-{number}")
        if case.has_ended:
            return case
    raise RuntimeError(f"{case.folder}: the program did not end after three launches")


def launch(shape: Callable[[Probe], None], case: Case, world_size: int, store: Path) -> None:
    """One launch of all ranks; if one dies, the others are killed."""
    pids = [fork(shape, case, rank, world_size, store) for rank in range(world_size)]
    left, give_up = set(pids), time.monotonic() + LAUNCH_S
    has_failed = False
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            left.remove(pid)
            has_failed = has_failed or status != 0
        if has_failed or time.monotonic() > give_up:
            for other in left:
                os.kill(other, signal.SIGKILL)
        if not pid:
            time.sleep(0.005)
    if time.monotonic() > give_up:
        raise RuntimeError(f"{case.folder}: a launch took longer than {LAUNCH_S:.0f} s")
    if has_failed and not case.was_interrupted:
        raise RuntimeError(f"{case.folder}: a rank failed by itself; see above")


def fork(
    shape: Callable[[Probe], None], case: Case, rank: int, world_size: int, store: Path
) -> int:
    def train() -> None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        torch.manual_seed(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size
        )
        shape(case)
        dist.barrier()
        dist.destroy_process_group()

    return start_child(train)


if __name__ == "__main__":
    main()
