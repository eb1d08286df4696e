"""The drilled program's records of its steps, and their comparison with the uninterrupted run.

Each rank of `holdfast_bench.drills.program` writes a file for each launch, with one line per step.
A killed rank may leave an incomplete last line, which is ignored.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from holdfast_bench.live_drills.process_list import LaunchPlace
from holdfast_bench.live_drills.target_run import ProgressMark, TargetRun

LOSS_TOLERANCE: Final = 1e-4
_RECORD: Final = re.compile(r"a([0-9]+)\.l([0-9]+)\.rank([0-9]+)\.jsonl")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rank's step. `time` is Unix seconds; `ids` and `weights` are digests."""

    place: LaunchPlace
    rank: int
    step: int
    time: float
    loss: float
    ids: str
    weights: str


@dataclass
class Records:
    """A folder of records, read incrementally."""

    folder: Path
    _offsets: dict[Path, int] = field(default_factory=dict)

    @property
    def poison(self) -> Path:
        """The file that tells the program what to spoil in its next step. It deletes the file."""
        return self.folder / "poison"

    def spoil_step(self, what: str) -> None:
        """Request that the program spoil the `weights` or the `loss` of its next step."""
        new = self.folder / "poison.new"
        new.write_text(what)
        os.replace(new, self.poison)

    def read_new(self) -> list[Step]:
        """Return the steps that were written since the last call, in order of file."""
        found: list[Step] = []
        for path in sorted(self.folder.glob("*.jsonl")):
            match = _RECORD.fullmatch(path.name)
            if match is None:
                continue
            attempt, launch, rank = map(int, match.groups())
            found += self._read(path, LaunchPlace(attempt, launch), rank)
        return found

    def _read(self, path: Path, place: LaunchPlace, rank: int) -> list[Step]:
        with open(path, "rb") as stream:
            stream.seek(self._offsets.get(path, 0))
            content = stream.read()
        whole = content.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + whole
        lines: list[dict[str, Any]] = [json.loads(line) for line in content[:whole].splitlines()]
        return [Step(place=place, rank=rank, **line) for line in lines]


Reference = dict[tuple[int, int], Step]


def reference_of(folder: Path) -> Reference:
    """Return the uninterrupted run's steps by (rank, step)."""
    return {(one.rank, one.step): one for one in Records(folder).read_new()}


def difference(step: Step, reference: Reference) -> str | None:
    """Describe how a step differs from the uninterrupted run's; return None if it does not.

    With the same world size, the weights must be equal bit for bit.
    """
    expected = reference.get((step.rank, step.step))
    if expected is None:
        return None
    where = f"{step.place} rank {step.rank} step {step.step}"
    if step.ids != expected.ids:
        return f"{where}: samples differ from the uninterrupted run's"
    if abs(step.loss - expected.loss) > LOSS_TOLERANCE:
        return f"{where}: loss {step.loss}, expected {expected.loss}"
    if step.weights != expected.weights:
        return f"{where}: weights differ from the uninterrupted run's"
    return None


def gaps(steps: list[Step]) -> list[str]:
    """Return the gaps in a rank's steps within one launch. `steps` are in file order."""
    last: dict[tuple[LaunchPlace, int], int] = {}
    found = []
    for one in steps:
        key = (one.place, one.rank)
        if key in last and one.step != last[key] + 1:
            found.append(f"{one.place} rank {one.rank}: step {one.step} after {last[key]}")
        last[key] = one.step
    return found


class Cut(Exception):
    """Raised to end the drill at once."""


@dataclass(kw_only=True)
class RecordedRun(TargetRun):
    """A run with `records` of its steps. `is_cut` returns whether the drill must end."""

    records: Records
    is_cut: Callable[[], bool] = lambda: False
    steps: list[Step] = field(default_factory=list)

    def look(self) -> None:
        """Read what is new in the journals and records. Raises `Cut` if the drill must end."""
        if self.is_cut():
            raise Cut
        super().look()

    def newest_step_of(self, place: LaunchPlace) -> int:
        """Return the last step that any rank of the launch finished; -1 if there is none."""
        return max((s.step for s in self.steps if s.place == place), default=-1)

    def _read_steps(self) -> list[ProgressMark]:
        new = self.records.read_new()
        self.steps += new
        return [ProgressMark(place=s.place, step=s.step, time=s.time) for s in new]
