"""The faults of a comparison, drawn from a seed, and their costs from the ranks' records. Pure."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

# The least number of steps between two faults, so that one is over before the next.
GAP_STEPS: Final = 15


@dataclass(frozen=True, kw_only=True)
class Job:
    """The training job: `steps` steps of `step_s` seconds, saved to disk every `save_steps` and,
    if the peer supports it, to memory every `snapshot_steps`. The state has 12 bytes × width²."""

    steps: int
    step_s: float = 0.2
    save_steps: int = 50
    snapshot_steps: int = 10
    width: int = 1024

    def in_folder(self, folder: str) -> dict[str, Any]:
        """Return the settings that the programs read."""
        return {**asdict(self), "folder": folder}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`kind` happens to `rank` after `step`. A fault of the whole job has rank 0."""

    kind: str
    step: int
    rank: int = 0


@dataclass(frozen=True)
class Line:
    """A record that a process finished a step at a wall-clock time."""

    time: float
    pid: int
    step: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one fault. Without a recovery, `steps_lost` and `seconds` are None.

    `by_hand` is the reason for a manual restart, empty if the job recovered by itself.
    """

    kind: str
    step: int
    steps_lost: int | None = None
    seconds: float | None = None
    by_hand: str = ""


def draw(
    seed: int, kinds: Iterable[str], job: Job, *, ranks: int, rest_s: float = 3.0
) -> tuple[Fault, ...]:
    """Return one fault for each of `kinds`, in order, at steps and ranks that the seed chooses.

    No fault comes before the first save or in the last `rest_s` seconds of steps. Raises
    `ValueError` if the job has too few steps for them.
    """
    chance, wanted = random.Random(seed), tuple(kinds)
    room = job.steps - round(rest_s / job.step_s) - job.save_steps
    share = room // max(1, len(wanted))
    if share <= GAP_STEPS:
        raise ValueError(
            f"{len(wanted)} faults in {job.steps} steps: more than {GAP_STEPS} steps are expected "
            f"for each after the first {job.save_steps} and before the last {rest_s:.0f} s. Use "
            "more --steps or --slurm-steps"
        )
    starts = range(job.save_steps, job.save_steps + share * len(wanted), share)
    return tuple(
        Fault(
            kind=kind,
            step=start + chance.randrange(share - GAP_STEPS) + 1,
            rank=chance.randrange(ranks) if kind == "kill-rank" else 0,
        )
        for kind, start in zip(wanted, starts, strict=True)
    )


def read_lines(text: str) -> list[Line]:
    """Return the lines of a rank's record without an incomplete line."""
    found = []
    for line in text.splitlines():
        try:
            found.append(Line(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def cost_of(fault: Fault, at: float, before: int, lines: Iterable[Line], by_hand: str = "") -> Cost:
    """Return the cost of `fault`, which came at `at` when the process `before` wrote the record."""
    kept = list(lines)
    old = [line.step for line in kept if line.pid == before]
    new = [line for line in kept if line.pid != before and line.time > at]
    if not new or not old:
        return Cost(kind=fault.kind, step=fault.step, by_hand=by_hand)
    return Cost(
        kind=fault.kind,
        step=fault.step,
        steps_lost=old[-1] + 1 - new[0].step,
        seconds=new[0].time - at,
        by_hand=by_hand,
    )


def ettr_of(job: Job, began_at: float, lines: Iterable[Line]) -> float | None:
    """Return productive ÷ wall time from `began_at` to the end of the last step, None if missing.

    Each step counts once, with the length that the job asks for.
    """
    ends = [line.time for line in lines if line.step == job.steps]
    return job.steps * job.step_s / (ends[0] - began_at) if ends else None
