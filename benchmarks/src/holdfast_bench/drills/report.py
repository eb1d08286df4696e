"""The report of a drill in Markdown, such as `docs/reliability.md`."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.disk.durable import write_bytes
from holdfast.contracts.errors import SpecError
from holdfast_bench.drills.ettr import Ettr, sum_of
from holdfast_bench.drills.node_steps import NODES
from holdfast_bench.drills.testbed import INTERVAL_STEPS, RANKS, SNAPSHOT_STEPS, STEP_S
from holdfast_bench.live_drills import invariants
from holdfast_bench.live_drills.invariants import Broken
from holdfast_bench.live_drills.kinds import KINDS, Recovery
from holdfast_bench.live_drills.results import DrillResult, FaultResult

P95: Final = 0.95
LIBRARIES: Final = ("holdfast", "torch", "prefect", "submitit", "psutil")
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
COMPARED: Final = (
    "After each fault, the drill checked every invariant. It compared every step with an "
    "uninterrupted run: sample ids, loss and weights, bit for bit."
)
OWN_JOBS: Final = (
    f"Each loss of single nodes had a separate job, of {NODES} nodes with a rank each, on this "
    "machine and without a supervisor."
)
HEADINGS: Final = (
    "kind",
    "what happens",
    "faults",
    "passed",
    "steps lost",
    "noticed, s",
    "reported, s",
    "first step, s",
)
COLUMNS: Final = (
    "Seconds count from the fault. *Noticed* is when an agent or the supervisor detected it. "
    "*Reported* is its first journal line, which `holdfast show` has; after the death of a rank, "
    "the agent first stops the other ranks. *First step* is the end of the new processes' first "
    "step. All values are medians with the 95th percentile, or for steps lost the maximum, in "
    "brackets."
)


def read_result(values: Mapping[str, Any]) -> DrillResult:
    """Return the result of `DrillResult.as_json`. Raises `SpecError` for other input."""
    fields = dict(values)
    try:
        faults = [
            FaultResult(**{**one, "recovery": Recovery(one["recovery"])})
            for one in fields.pop("faults")
        ]
        broken = [Broken(**one) for one in fields.pop("broken")]
        if fields["ettr"]:
            Ettr.from_json(fields["ettr"])
        return DrillResult(faults=faults, broken=broken, **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"not the output of a drill ({error!r}); expected that of `holdfast drill --json`"
        ) from error


def write_report(path: Path, results: Sequence[DrillResult]) -> None:
    """Write the report of these drills together to `path`."""
    write_bytes(path, render_report(results, machine()).encode())


def machine() -> str:
    """Return this machine, its versions and its load in one line."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    libraries = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return (
        f"{os.cpu_count()} cores, {memory_gb:.0f} GB of memory, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {libraries}; load average over the last fifteen "
        f"minutes {os.getloadavg()[2]:.1f}"
    )


def render_report(results: Sequence[DrillResult], machine_text: str) -> str:
    """Return the report as Markdown."""
    faults = [one for result in results for one in result.faults]
    broken = [one for result in results for one in result.broken]
    ettr = sum_of([Ettr.from_json(result.ettr) for result in results if result.ettr])
    wrong = sum(1 for one in faults if not one.ok)
    count = len(faults)
    lines = [
        "# Reliability: what a drill measured",
        "",
        *(f"{_opening(result)}\n" for result in results),
        COMPARED,
        "",
        *([f"{OWN_JOBS}\n"] if any(KINDS[one.kind].has_own_job for one in faults) else []),
        f"**After {count - wrong} of {count} faults, every invariant held.**",
        "",
        "This page is the output of:",
        "",
        "<!-- not run: the drill takes long -->",
        "```",
        *(result.command for result in results),
        "```",
        "",
        f"Machine: {machine_text}.",
        "",
        "## Invariants",
        "",
        "| invariant | times broken |",
        "|---|---|",
        *(f"| {name} | {_times_broken(broken, name)} |" for name in INVARIANTS),
        "",
        *_broken_lines(broken),
        "## Faults",
        "",
        COLUMNS,
        "",
        f"| {' | '.join(HEADINGS)} |",
        f"|{'---|' * len(HEADINGS)}",
        *(_row(name, faults) for name in KINDS),
        "",
        *(_ettr_lines(ettr) if ettr else []),
        *(line for result in results for line in _refused_lines(result)),
    ]
    return "\n".join(lines)


def _opening(result: DrillResult) -> str:
    """Describe what was drilled."""
    return (
        f"{len(result.faults)} faults in {result.wall_s / 60:.1f} minutes, "
        f"{_describe_runs(result)} of {RANKS} ranks (steps of {STEP_S * 1000:.0f} ms, a checkpoint "
        f"every {INTERVAL_STEPS} steps, a snapshot in memory every {SNAPSHOT_STEPS}). They trained "
        f"{result.steps} different steps. For {result.uncompared} steps of a rank, there was no "
        "step to compare with."
    )


def _describe_runs(result: DrillResult) -> str:
    if result.at_once == 1:
        return "one after another, on small training runs"
    return f"one after another on each of {result.at_once} small training runs at a time,"


def _ettr_lines(ettr: Ettr) -> list[str]:
    """Return the section about the effective training time and its prediction."""
    costs = ettr.calibration.costs
    figures = (
        ("a step", costs.step_s),
        ("training held up by a save", costs.blocked_s),
        ("from the last step to the end of an attempt", costs.flush_s),
        ("from a launch to the load", costs.start_s),
        ("the load", costs.load_s),
        ("from the end of an attempt to the next one's launch", ettr.calibration.relaunch_s),
        ("from a new run to its first launch", ettr.calibration.queued_s),
        ("from the start of a supervisor to its supervision", ettr.calibration.flow_s),
    )
    text = (
        f"Measured {ettr.paced:.3f}, predicted {ettr.predicted:.3f}: the ratio is "
        f"**{ettr.paced / ettr.predicted:.3f}**. Every step that was not lost counts with its "
        "duration without faults. With slow steps counted in full, as "
        f"`holdfast show` does, the measured value is {ettr.measured:.3f} and the ratio is "
        f"{ettr.measured / ettr.predicted:.3f}. "
        "The prediction comes from [the formula](goodput.md#the-prediction). Its inputs are a "
        "run without faults, the list of the drill's faults and the settings of its runs. A "
        "straggler and a suspension count as stalls; other faults that do not interrupt training "
        "do not count."
    )
    return [
        "## Effective training time",
        "",
        text,
        "",
        "| without faults | seconds |",
        "|---|---|",
        *(f"| {label} | {seconds:.4f} |" for label, seconds in figures),
        "",
    ]


def _row(name: str, faults: Sequence[FaultResult]) -> str:
    mine = [one for one in faults if one.kind == name]
    lost = [one.steps_lost for one in mine if one.steps_lost is not None]
    cells = (
        name,
        KINDS[name].summary,
        str(len(mine)),
        str(sum(1 for one in mine if one.ok)),
        f"{statistics.median(lost):g} ({max(lost)})" if lost else "",
        spread([one.noticed_s for one in mine if one.noticed_s is not None]),
        spread([one.reported_s for one in mine if one.reported_s is not None]),
        spread([one.first_step_s for one in mine if one.first_step_s is not None]),
    )
    return f"| {' | '.join(cells)} |"


def spread(values: Sequence[float]) -> str:
    """Return `median (95th percentile)` of some seconds; empty for none."""
    if not values:
        return ""
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(P95 * len(ordered)))]
    return f"{statistics.median(ordered):.2f} ({high:.2f})"


def _times_broken(broken: Sequence[Broken], name: str) -> int:
    return sum(1 for one in broken if one.invariant == name)


def _broken_lines(broken: Sequence[Broken]) -> list[str]:
    if not broken:
        return []
    lines = [f"- {one.invariant}: {one.detail}" for one in broken]
    return ["Broken invariants:", "", *lines, ""]


def _refused_lines(result: DrillResult) -> list[str]:
    """Return the lines about the kinds of fault that were not rehearsed, with the reasons."""
    if not result.refused:
        return []
    lines = [f"- {name}: {why}" for name, why in result.refused.items()]
    return ["Not rehearsed:", "", *lines, ""]
