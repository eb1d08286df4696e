"""`python -m holdfast_bench.frameworks`: compare each adapter with its bare framework, as JSON.

A pair is two programs one after the other, with Holdfast and without, in changing order. `blocked`
is how much longer than others a step with a save takes, Holdfast's ÷ the framework's own.
`overhead_us` is how much longer a step of a tiny model takes with Holdfast, in microseconds: in CPU
time of the training thread, and in wall time. One rank runs these steps, because Holdfast sends no
message in a step, and ranks that wait for each other hide microseconds. The two programs of such a
pair take turns of a few steps, because a shared machine changes its speed by more than that.
`own_step_us` is the wall time of a tiny step without Holdfast, which shows the machine's speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from holdfast.contracts.errors import HoldfastError, PreflightError
from holdfast_bench.frameworks.steps import (
    Settings,
    blocked,
    extra_per_step,
    turns_of,
    usual_step,
)
from holdfast_bench.limits.__main__ import default_directory
from holdfast_bench.limits.figures import spread
from holdfast_bench.limits.launch import Launch
from holdfast_bench.limits.runner import machine, report_progress, versions

# Frameworks, and the packages that contain them.
FRAMEWORKS: Final = {
    "transformers": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "fabric": "lightning",
    "deepspeed": "deepspeed",
}
KINDS: Final = ("own", "holdfast")
WIDTH: Final = 1024
# Parameters and AdamW's two moments, all of them 32-bit floats.
BYTES_PER_PARAMETER: Final = 12
RANKS: Final = 2
PROGRAM_S_MAX: Final = 300.0
POLL_S: Final = 0.1
BLOCKED_MAX: Final = 1 / 3
OVERHEAD_US_MAX: Final = 50.0
# When each step of a program began, by clock: see `Model`.
Times = dict[str, list[float]]


@dataclass(frozen=True)
class Plan:
    """What to measure. `state_bytes` is the size of parameters and optimizer state."""

    directory: Path
    frameworks: tuple[str, ...]
    state_bytes: int = 300_000_000
    pairs: int = 3
    saves: int = 4
    save_every: int = 8
    step_s: float = 0.25
    steps: int = 1000
    # Pairs of programs with short steps for each pair with saves. Two processes of the same
    # program differ by more than the overhead, so this figure needs many.
    short_pairs: int = 5
    with_blocked: bool = True

    def quick(self) -> Plan:
        """Return the shortest plan with all programs, to check that they work, not how fast."""
        return replace(
            self, state_bytes=4_000_000, pairs=1, saves=2, step_s=0.01, steps=200, short_pairs=1
        )

    def with_saves(self) -> Settings:
        """The program that saves a large state."""
        layers = max(1, self.state_bytes // (BYTES_PER_PARAMETER * WIDTH * WIDTH))
        steps = self.save_every * self.saves + self.save_every // 2
        return Settings(
            "", "", min(WIDTH, 256 * layers), layers, steps, self.step_s, self.save_every, ""
        )

    def with_short_steps(self) -> Settings:
        """The program whose steps are as short as the framework can make them."""
        return Settings("", "", 8, 1, self.steps, 0.0, 0, "")


def main() -> int:
    """Return the exit status: 0 measured, 1 a program failed, 2 this machine cannot run it."""
    options = parse_options()
    plan = Plan(
        options.directory,
        tuple(options.framework or FRAMEWORKS),
        pairs=options.pairs,
        with_blocked=not options.only_steps,
    )
    try:
        found = measure(plan.quick() if options.quick else plan)
    except HoldfastError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, PreflightError) else 1
    print(json.dumps(found, indent=1))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast_bench.frameworks", description=__doc__
    )
    parser.add_argument("--directory", type=Path, default=default_directory())
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only-steps", action="store_true", help="no programs with saves")
    parser.add_argument("--quick", action="store_true", help="a few megabytes and one pair")
    return parser.parse_args()


def measure(plan: Plan) -> dict[str, Any]:
    """Return the figures of all frameworks of the plan.

    Raises `PreflightError` if one is not installed, and `RunFailedError` if a program fails.
    """
    installed = {name: installed_version(name) for name in plan.frameworks}
    plan.directory.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir=plan.directory)).resolve()
    try:
        found = {name: measure_one(plan, name, work) for name in plan.frameworks}
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {
        "machine": machine(plan.directory),
        "versions": versions() | installed,
        "conditions": {"ranks": RANKS, "state_bytes": plan.state_bytes, "pairs": plan.pairs},
        "targets": {"blocked": round(BLOCKED_MAX, 3), "overhead_us": OVERHEAD_US_MAX},
        "frameworks": found,
    }


def installed_version(framework: str) -> str:
    package = FRAMEWORKS[framework]
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise PreflightError(
            f"{package} is not installed in this environment. Install Holdfast with the extra "
            f"`{package}`, or name other ones with --framework"
        ) from error


def measure_one(plan: Plan, framework: str, work: Path) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    ratios: list[float] = []
    overheads_us: dict[str, list[float]] = {"cpu": [], "wall": []}
    steps_us: list[float] = []
    for pair in range(plan.pairs):
        report_progress(f"{framework}, pair {pair + 1} of {plan.pairs}")
        order = KINDS if pair % 2 == 0 else KINDS[::-1]
        if plan.with_blocked:
            saves = {kind: run(plan.with_saves(), framework, kind, work) for kind in order}
            lasted = {kind: blocked(saves[kind]["starts"], plan.save_every) for kind in KINDS}
            for kind in KINDS:
                seconds[kind] += lasted[kind]
            ratios.append(statistics.median(lasted["holdfast"]) / statistics.median(lasted["own"]))
        for short in range(plan.short_pairs):
            first = order if short % 2 == 0 else order[::-1]
            found = take_turns(plan.with_short_steps(), framework, first, work)
            steps_us.append(1e6 * usual_step(found["own"]["starts"]))
            for clock, times in (("cpu", "cpu_s"), ("wall", "starts")):
                own, ours = (found[kind][times] for kind in KINDS)
                overheads_us[clock].append(1e6 * extra_per_step(own, ours))
    figures: dict[str, Any] = {
        "overhead_us": {clock: spread(each) for clock, each in overheads_us.items()},
        "own_step_us": spread(steps_us),
    }
    if plan.with_blocked:
        figures["blocked"] = spread(ratios)
        figures["blocked_s"] = {kind: spread(each) for kind, each in seconds.items()}
    return figures


def run(settings: Settings, framework: str, kind: str, work: Path) -> Times:
    """Run one program; return when its steps began, by both clocks: see `Model`."""
    end_by = time.time() + PROGRAM_S_MAX
    with started(settings, framework, kind, work, ranks=RANKS, end_by=end_by) as launch:
        found: Times = launch.result()
        return found


def take_turns(
    settings: Settings, framework: str, kinds: Sequence[str], work: Path
) -> dict[str, Times]:
    """Run the programs of both kinds at once, one rank each, which step in turns."""
    end_by = time.time() + PROGRAM_S_MAX
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=work)))
        given = replace(settings, turns=stack.enter_context(turns_of(kinds, folder)))
        both = {
            kind: stack.enter_context(started(given, framework, kind, work, ranks=1, end_by=end_by))
            for kind in kinds
        }
        while any(one.process.poll() is None for one in both.values()):
            for one in both.values():
                one.check_time()
                if one.process.poll():
                    one.result()
            time.sleep(POLL_S)
        return {kind: one.result() for kind, one in both.items()}


@contextlib.contextmanager
def started(
    settings: Settings, framework: str, kind: str, work: Path, *, ranks: int, end_by: float
) -> Iterator[Launch]:
    """One program under torchrun, and its folder, until the end of the block."""
    folder = work / f"{framework}-{kind}"
    given = replace(settings, framework=framework, kind=kind, directory=str(folder))
    package = "holdfast_bench.frameworks"
    try:
        with Launch("programs", ranks, asdict(given), end_by=end_by, package=package) as launch:
            yield launch
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
