"""What comes of a drill: each fault, what was broken, and how much of its time the run trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.contracts.errors import SpecError
from holdfast.flows.drills.ettr import Ettr
from holdfast.flows.drills.invariants import Broken
from holdfast.flows.drills.kinds import Recovery


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """One fault. Seconds count from the fault; None where nothing was interrupted.

    `noticed_s` is when somebody knew of it, `reported_s` the journal line that says so, from which
    `holdfast show` has it; None for kinds that no journal tells of.
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
    """All of a drill, that `command` began. `refused` are kinds that could not be rehearsed here,
    `at_once` runs were drilled at a time.

    `steps` different ones were trained; `uncompared` lie beyond the uninterrupted run's end.
    `kept` are the folders of runs in which something broke.
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
    ettr: Ettr | None = None

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
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
            "ettr": self.ettr.as_json() if self.ettr else None,
        }

    @staticmethod
    def from_json(told: Mapping[str, Any]) -> DrillResult:
        """What `as_json` told. Raises `SpecError` for anything else."""
        fields = dict(told)
        try:
            faults = [
                FaultResult(**{**one, "recovery": Recovery(one["recovery"])})
                for one in fields.pop("faults")
            ]
            broken = [Broken(**one) for one in fields.pop("broken")]
            ettr = fields.pop("ettr")
            return DrillResult(
                faults=faults,
                broken=broken,
                ettr=Ettr.from_json(ettr) if ettr else None,
                **fields,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SpecError(
                f"not the answer of a drill ({error!r}); give what `holdfast drill --json` wrote"
            ) from error
