"""Outcomes as Markdown and JSON. Pure but for the machine's own description."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Final

import psutil

from .conduct import Outcome
from .faults import Cost, Fault, Job

TITLES: Final = {
    "torchrun": "torchrun `--max-restarts`, interval checkpoints",
    "nvrx": "NVRx `ft_launcher`, interval checkpoints",
    "dlrover": "DLRover flash checkpoint",
    "submitit": "submitit's requeue, interval checkpoints",
    "lightning": "Lightning's Slurm requeue",
    "holdfast": "**Holdfast**",
}
NEVER: Final = "never"


def machine() -> dict[str, Any]:
    """Where this runs."""
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "holdfast": version("holdfast"),
        "torch": version("torch"),
    }


def as_json(
    job: Job, faults: dict[str, Sequence[Fault]], outcomes: Iterable[Outcome], command: str
) -> dict[str, Any]:
    """Everything that was measured, and how."""
    return {
        "machine": machine(),
        "command": command,
        "job": asdict(job),
        "faults": {where: [asdict(one) for one in found] for where, found in faults.items()},
        "peers": [one.as_json() for one in outcomes],
    }


def tables(outcomes: Sequence[Outcome]) -> str:
    """A table in Markdown for each place, the peers in the order of `TITLES`."""
    places = list(dict.fromkeys(one.where for one in outcomes))
    parts = []
    for place in places:
        here = [one for one in outcomes if one.where == place]
        here.sort(key=lambda one: list(TITLES).index(one.peer))
        parts.append(f"### {place}\n\n{table(here)}")
    return "\n\n".join(parts) + "\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """One place's rows. Several faults of one kind stand in the order in which they came."""
    kinds = list(dict.fromkeys(cost.kind for one in outcomes for cost in one.costs))
    headings = ["peer", "first step, s"]
    for kind in kinds:
        headings += [f"{kind}: steps lost", f"{kind}: first new step, s"]
    lines = [[*headings, "ETTR", ""], ["---"] * (len(headings) + 2)]
    for one in outcomes:
        cells = [TITLES[one.peer], _number(one.start_s)]
        for kind in kinds:
            costs = [cost for cost in one.costs if cost.kind == kind]
            cells += [_values(costs, "steps_lost"), _values(costs, "seconds")]
        lines.append([*cells, _number(one.ettr, 2), remark(one)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remark(outcome: Outcome) -> str:
    """Who helped, and why the job is not over; each said once."""
    helps = [f"{cost.kind}: {cost.help}" for cost in outcome.costs if cost.help]
    return "; ".join(dict.fromkeys([*helps, *([outcome.problem] if outcome.problem else [])]))


def _values(costs: Sequence[Cost], name: str) -> str:
    found = [getattr(cost, name) for cost in costs]
    return ", ".join(NEVER if value is None else _number(value) for value in found)


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.{digits}f}"
