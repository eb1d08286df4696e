"""The result of a drill: its faults, broken invariants and effective training time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast_bench.live_drills.invariants import Broken
from holdfast_bench.live_drills.kinds import Recovery


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """One fault. Seconds count from the fault; None if training was not interrupted.

    `noticed_s` is when an agent or the supervisor detected it. `reported_s` is when the journal
    reported it, and with it `holdfast show`. Both are None for kinds that no journal line reports.
    """

    kind: str
    ok: bool
    detail: str
    run: str
    step: int
    recovery: Recovery = Recovery.UNDISTURBED
    steps_lost: int | None = None
    noticed_s: float | None = None
    reported_s: float | None = None
    first_step_s: float | None = None
    took_s: float = 0.0


@dataclass(kw_only=True)
class DrillResult:
    """The result of a drill that `command` started.

    `refused` has the kinds that could not be rehearsed here, with the reasons. `at_once` is the
    number of runs at a time. `steps` is the number of different steps that were trained, and
    `uncompared` the number of those after the end of the uninterrupted run. `kept` are the folders
    of runs with a broken invariant.
    """

    seed: int
    at_once: int = 1
    command: str = ""
    faults: list[FaultResult] = field(default_factory=list)
    broken: list[Broken] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    uncompared: int = 0
    wall_s: float = 0.0
    ettr: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        return {
            "seed": self.seed,
            "at_once": self.at_once,
            "command": self.command,
            "faults": [dict(vars(one)) for one in self.faults],
            "broken": [one.as_json() for one in self.broken],
            "kept": self.kept,
            "refused": self.refused,
            "steps": self.steps,
            "uncompared": self.uncompared,
            "wall_s": round(self.wall_s, 3),
            "ettr": self.ettr,
        }
