"""Outcomes as Markdown and JSON. Pure except for the description of the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, Final

import psutil

from .faults import Cost
from .runner import Outcome

TITLES: Final = {
    "torchrun": "torchrun `--max-restarts`, interval checkpoints",
    "nvrx": "NVRx `ft_launcher`, interval checkpoints",
    "dlrover": "DLRover flash checkpoint",
    "submitit": "submitit's requeue, interval checkpoints",
    "lightning": "Lightning's Slurm requeue",
    "holdfast": "**Holdfast**",
}


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "holdfast": version("holdfast"),
        "torch": version("torch"),
    }


def as_json(
    plans: Iterable[dict[str, Any]], outcomes: Iterable[Outcome], command: str
) -> dict[str, Any]:
    """Return all results and how they were measured."""
    peers = [one.as_json() for one in outcomes]
    return {"machine": machine(), "command": command, "plans": list(plans), "peers": peers}


def tables(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table for each place, with the peers in the order of `TITLES`."""
    places = list(dict.fromkeys(one.where for one in outcomes))
    parts = []
    for place in places:
        here = [one for one in outcomes if one.where == place]
        here.sort(key=lambda one: list(TITLES).index(one.peer))
        parts.append(f"### {place}\n\n{table(here)}")
    return "\n\n".join(parts) + "\n"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return one place's rows. Several faults of one kind are listed in order of time."""
    kinds = list(dict.fromkeys(cost.kind for one in outcomes for cost in one.costs))
    headings = ["peer", "first step, s"]
    for kind in kinds:
        headings += [f"{kind}: steps lost", f"{kind}: first new step, s"]
    lines = [[*headings, "ETTR", ""], ["---"] * (len(headings) + 2)]
    for one in outcomes:
        cells = [TITLES[one.peer], _number(one.start_s)]
        for kind in kinds:
            costs = [cost for cost in one.costs if cost.kind == kind]
            cells += [", ".join(map(_lost, costs)), ", ".join(map(_seconds, costs))]
        lines.append([*cells, _ettr(one), remark(one)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def remark(outcome: Outcome) -> str:
    """Return why the job needed a manual restart and why it did not finish, each once."""
    helps = [f"{cost.kind}: {cost.by_hand}" for cost in outcome.costs if cost.by_hand]
    return "; ".join(dict.fromkeys([*helps, *([outcome.problem] if outcome.problem else [])]))


def _ettr(outcome: Outcome) -> str:
    """Return the ETTR, in brackets if the job needed a manual restart to finish."""
    share = _number(outcome.ettr, 2)
    return f"({share})" if share and any(cost.by_hand for cost in outcome.costs) else share


def _lost(cost: Cost) -> str:
    return "all" if cost.steps_lost is None else str(cost.steps_lost)


def _seconds(cost: Cost) -> str:
    if cost.seconds is None:
        return "never"
    return f"never (by hand {cost.seconds:.1f})" if cost.by_hand else f"{cost.seconds:.1f}"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}f}"
