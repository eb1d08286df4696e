"""The page that a drill's figures make: `docs/reliability.md` is one."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from holdfast.contracts.durable import write_bytes
from holdfast.flows.drills import invariants
from holdfast.flows.drills.conduct import DrillResult, FaultResult
from holdfast.flows.drills.kinds import KINDS, REFUSED
from holdfast.flows.drills.stand import INTERVAL_STEPS, RANKS, SNAPSHOT_STEPS, STEP_S

P95: Final = 0.95
INVARIANTS: Final = (
    invariants.COMMITTED_STAYS,
    invariants.BELIEVED_IS_WHOLE,
    invariants.RESUME_IS_RIGHT,
    invariants.STEPS_ARE_RIGHT,
    invariants.NO_ORPHANS,
    invariants.ONE_SUBMISSION,
    invariants.ENDINGS_EXPLAINED,
    invariants.INDEX_IS_DISK,
    invariants.ONE_COMMAND,
    invariants.RECOVERS,
)
COLUMNS: Final = (
    "Seconds count from the fault. *Noticed* is the first line of a journal that says so, which "
    "an agent writes once it has also ended what was left; *first step* is the end of the first "
    "step that the new processes did. Both are medians, with the 95th percentile in brackets."
)


def write_report(path: Path, result: DrillResult) -> None:
    """Replace the page at `path` by one with the figures of `result`."""
    write_bytes(path, render_report(result, machine()).encode())


def machine() -> str:
    """This machine and the versions on it, in one line."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "submitit", "psutil"))
    return (
        f"{os.cpu_count()} cores, {memory_gb:.0f} GB of memory, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {libraries}"
    )


def render_report(result: DrillResult, machine_words: str) -> str:
    """The page as Markdown: pure."""
    wrong = sum(1 for one in result.faults if not one.ok)
    count = len(result.faults)
    lines = [
        "# Reliability: what a drill measured",
        "",
        _opening(result),
        "",
        f"**{count - wrong} of {count} faults left every invariant whole.**",
        "",
        "This page is written by:",
        "",
        "```",
        f"holdfast drill --count {count} --seed {result.seed} --report docs/reliability.md",
        "```",
        "",
        f"Machine: {machine_words}.",
        "",
        "## Invariants",
        "",
        "| invariant | times broken |",
        "|---|---|",
        *(f"| {name} | {_times_broken(result, name)} |" for name in INVARIANTS),
        "",
        *_broken_lines(result),
        "## Faults",
        "",
        COLUMNS,
        "",
        "| kind | what happens | faults | whole | steps lost, most | noticed, s | first step, s |",
        "|---|---|---|---|---|---|---|",
        *(_row(name, result.faults) for name in KINDS),
        "",
        *_refused_lines(result),
    ]
    return "\n".join(lines)


def _opening(result: DrillResult) -> str:
    """What was drilled, in words."""
    return (
        f"{len(result.faults)} faults in {result.wall_s / 60:.1f} minutes, one after another, on "
        f"small training runs of {RANKS} ranks (steps of {STEP_S * 1000:.0f} ms, a checkpoint "
        f"every {INTERVAL_STEPS} steps, a snapshot in memory every {SNAPSHOT_STEPS}). After each "
        "fault every invariant was checked, and every step was compared with a run that nothing "
        f"interrupted: sample ids, loss and weights, bit for bit. {result.steps} different steps "
        "were trained."
    )


def _row(name: str, faults: Sequence[FaultResult]) -> str:
    mine = [one for one in faults if one.kind == name]
    lost = [one.steps_lost for one in mine if one.steps_lost is not None]
    cells = (
        name,
        KINDS[name].words,
        str(len(mine)),
        str(sum(1 for one in mine if one.ok)),
        str(max(lost)) if lost else "",
        spread([one.noticed_s for one in mine if one.noticed_s is not None]),
        spread([one.first_step_s for one in mine if one.first_step_s is not None]),
    )
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float]) -> str:
    """`median (95th percentile)` of seconds; empty for none."""
    if not values:
        return ""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(P95 * len(ordered)))]
    return f"{statistics.median(ordered):.2f} ({high:.2f})"


def _times_broken(result: DrillResult, name: str) -> int:
    return sum(1 for one in result.broken if one.invariant == name)


def _broken_lines(result: DrillResult) -> list[str]:
    if not result.broken:
        return []
    lines = [f"- {one.invariant}: {one.detail}" for one in result.broken]
    return ["What was seen:", "", *lines, ""]


def _refused_lines(result: DrillResult) -> list[str]:
    """Kinds that were not rehearsed, and why."""
    refused = {**REFUSED, **result.refused}
    if not refused:
        return []
    lines = [f"- {name}: {why}" for name, why in refused.items()]
    return ["Not rehearsed:", "", *lines, ""]
