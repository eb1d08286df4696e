"""A temporary run under drill, whose program records every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast_bench.drills.steps import Records, Step
from holdfast_bench.live_drills.place import LaunchPlace
from holdfast_bench.live_drills.target_run import ProgressMark, TargetRun


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
