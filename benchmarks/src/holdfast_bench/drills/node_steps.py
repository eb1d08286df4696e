"""Compares the steps of a job of several nodes, whose size may change, with uninterrupted runs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import CheckpointName
from holdfast_bench.drills.steps import Step, difference, gaps
from holdfast_bench.drills.testbed import STEPS_UNBOUNDED, Testbed
from holdfast_bench.live_drills.process_list import LaunchPlace

NODES: Final = 4

# For each launch after a loss: its place, its number of ranks, and the step that it resumed from.
Sizes = list[tuple[LaunchPlace, int, int]]


def compare_steps(testbed: Testbed, steps: Sequence[Step], sizes: Sizes) -> list[str]:
    """Return how the steps differ from those of runs that nothing interrupts.

    A run that changes its size continues at the new size from a checkpoint of an uninterrupted run
    at the old one. Only one change of size is compared.
    """
    changes = [(place, ranks, at) for place, ranks, at in sizes if ranks != NODES]
    place, ranks, at = changes[0] if changes else (LaunchPlace(STEPS_UNBOUNDED, 0), NODES, 0)
    before = [step for step in steps if step.place < place]
    after = [step for step in steps if step.place >= place]
    folder = Path(tempfile.mkdtemp(prefix="whole-", dir=testbed.folder))
    wrong = gaps(list(steps))
    if before:
        last = max(step.step for step in before)
        wrong += _differences(
            testbed, before, last, ranks=NODES, directory=folder, interval=at or STEPS_UNBOUNDED
        )
    if after:
        for path in [*folder.rglob("step-*")]:
            name = CheckpointName.parse(path.name)
            if name is not None and name.step > at:
                shutil.rmtree(path)
        last = max(step.step for step in after)
        wrong += _differences(
            testbed, after, last, ranks=ranks, directory=folder, interval=STEPS_UNBOUNDED
        )
    shutil.rmtree(folder, ignore_errors=True)
    return wrong


def _differences(
    testbed: Testbed,
    steps: Sequence[Step],
    last: int,
    *,
    ranks: int,
    directory: Path,
    interval: int,
) -> list[str]:
    reference = testbed.train_reference(last, ranks=ranks, directory=directory, interval=interval)
    found = [difference(step, reference) for step in steps]
    found += [
        f"{step.place} rank {step.rank} step {step.step}: no step to compare with"
        for step in steps
        if (step.rank, step.step) not in reference
    ]
    return [problem for problem in found if problem]
