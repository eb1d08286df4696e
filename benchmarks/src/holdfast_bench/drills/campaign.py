"""A drill on several temporary runs at a time, each with its own testbed and supervisor.

The runs take their faults from one list. While one waits for a start or for the confirmation of a
hang, the others train.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.records.history import load_history
from holdfast.workers.runs import operator
from holdfast_bench.drills.ettr import (
    Calibration,
    Trained,
    calibrate,
    compare,
    goodput_of,
    last_step_of,
    mean_of,
)
from holdfast_bench.drills.node_rehearsal import NodeRehearsal
from holdfast_bench.drills.rehearsal import TestbedContext, TestbedRehearsal
from holdfast_bench.drills.steps import Cut, RecordedRun, Reference
from holdfast_bench.drills.testbed import RANKS, Testbed, throw_away
from holdfast_bench.live_drills.kinds import Kind, draw_faults
from holdfast_bench.live_drills.results import DrillResult, FaultResult
from holdfast_bench.live_drills.runner import Tell, chance_of

# A run's journals grow with it and are read often, so a new run starts after this many faults.
FAULTS_PER_RUN: Final = 40
# The uninterrupted run is as long as a drilled run may become, up to this maximum. Then a new run
# starts.
REFERENCE_STEPS: Final = 500
REFERENCE_STEPS_MAX: Final = 9000
# The drill stops after this number or this share of faults that broke an invariant.
FAILURES_MAX: Final = 5
FAILURES_SHARE: Final = 0.1
CALIBRATION_STEPS: Final = 150


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`count` faults of `kinds` in an order from `seed`, on `at_once` runs at a time.

    No fault starts after `within_s` seconds. With `calibrates`, runs without faults come first, to
    predict the effective training time.
    """

    kinds: Sequence[Kind]
    count: int
    seed: int
    within_s: float = math.inf
    at_once: int = 1
    calibrates: bool = False

    @property
    def failures_max(self) -> int:
        """The number of faults that may break an invariant before the drill stops."""
        return max(FAILURES_MAX, int(self.count * FAILURES_SHARE))


def drill_throw_away(
    plan: Plan, result: DrillResult, folder: Path, tell: Tell, *, kept: Path
) -> None:
    """Inject the faults of `plan` into temporary runs in the empty folder `folder`.

    A run with a broken invariant is moved to the folder `kept`, which is created if needed. The
    outcomes are added to `result`, even if the drill is interrupted. Unfinished faults are then
    dropped, and the runs are stopped.
    """
    campaign = Campaign(plan, result, tell, kept)
    try:
        campaign.run(folder)
    finally:
        campaign.close()


class Campaign:
    """The state that the runs of one drill share: the remaining faults and the results.

    `steps_max` is the length of the uninterrupted run.
    """

    def __init__(self, plan: Plan, result: DrillResult, tell: Tell, kept: Path) -> None:
        self.plan, self.result, self.tell, self.kept = plan, result, tell, kept
        self.trained: list[Trained] = []
        self.calibrations: list[Calibration] = []
        self.is_cut = threading.Event()
        faults = draw_faults(plan.kinds, plan.count, plan.seed)
        self.steps_max = steps_for(faults, plan.at_once)
        self._left = list(enumerate(faults))
        self._taking = threading.Lock()
        self._began = time.monotonic()

    def run(self, folder: Path) -> None:
        """Train the uninterrupted run, then drill the other runs, each in a thread."""
        needs_disk = any(kind.name == "disk-full" for kind in self.plan.kinds)
        with contextlib.ExitStack() as opened:
            testbeds: list[Testbed] = []
            for number in range(self.plan.at_once):
                place = folder / f"place-{number + 1}"
                place.mkdir()
                testbed = throw_away(place, with_small_disk=needs_disk, number=number)
                testbeds.append(opened.enter_context(testbed))
            reference: Reference = {}
            if any(not kind.has_own_job for kind in self.plan.kinds):
                self.tell(f"the uninterrupted run: {self.steps_max} steps")
                reference = testbeds[0].train_reference(self.steps_max)
            pool = opened.enter_context(ThreadPoolExecutor(len(testbeds)))
            # Runs before the pool waits for its threads, and before the testbeds end.
            opened.callback(self.is_cut.set)
            lanes: list[Future[None]] = []
            for one in testbeds:
                one.reference = reference
                lanes.append(pool.submit(Lane(self, one).work))
            for lane in as_completed(lanes):
                lane.result()

    def close(self) -> None:
        """Complete the result."""
        if self._left:
            self.tell(
                f"{len(self._left)} faults were not started: no time left, or too many failures"
            )
        if self.calibrations and self.trained:
            self.result.ettr = compare(mean_of(self.calibrations), self.trained).as_json()
        self.result.wall_s = time.monotonic() - self._began

    def take(self, at: int, *, begun: bool = False) -> tuple[int, Kind] | None:
        """Return the next fault and its number, if there is one for a run at step `at`.

        A run that has `begun` leaves the faults that have jobs of their own for later.
        """
        wrong = sum(1 for one in self.result.faults if not one.ok)
        is_late = time.monotonic() >= self._began + self.plan.within_s
        if self.is_cut.is_set() or is_late or wrong > self.plan.failures_max:
            return None
        with self._taking:
            mine = [one for one in self._left if not (begun and one[1].has_own_job)]
            if mine and at + mine[0][1].steps <= self.steps_max:
                self._left.remove(mine[0])
                return mine[0]
        return None


def steps_for(faults: Sequence[Kind], at_once: int) -> int:
    """Return the steps that a run may train while its share of the faults is rehearsed."""
    steps = [0, *(kind.steps for kind in faults if not kind.has_own_job)]
    share = max(max(steps), sum(steps) // at_once)
    return min(REFERENCE_STEPS_MAX, REFERENCE_STEPS + share)


class Lane:
    """One testbed, on which runs are drilled one after another."""

    def __init__(self, campaign: Campaign, testbed: Testbed) -> None:
        self._campaign, self._testbed = campaign, testbed
        own = f"sqlite:///{testbed.home}/holdfast.db"
        self._url = os.environ.get("HOLDFAST_DATABASE_URL") or own

    def work(self) -> None:
        """Rehearse faults until none is left."""
        with contextlib.suppress(Cut):
            if self._campaign.plan.calibrates:
                self._calibrate()
            while (fault := self._campaign.take(0)) is not None:
                number, kind = fault
                if kind.has_own_job:
                    self._drill_job(number, kind)
                else:
                    self._drill_run(fault)

    def _drill_job(self, number: int, kind: Kind) -> None:
        """Rehearse one fault on a job of several nodes."""
        campaign = self._campaign
        chance = chance_of(campaign.plan.seed, number)
        rehearsal = NodeRehearsal(self._testbed, chance, campaign.result, self._url, campaign.tell)
        fault, paths = rehearsal.rehearse(kind, campaign.is_cut.is_set)
        if not fault.ok:
            self._keep_run(paths)
        shutil.rmtree(paths.directory, ignore_errors=True)

    def _begin_run(self) -> RecordedRun:
        target = self._testbed.begin_run()
        target.is_cut = self._campaign.is_cut.is_set
        return target

    def _drill_run(self, fault: tuple[int, Kind]) -> None:
        """Drill one run until it reaches its limit or a fault breaks an invariant."""
        campaign, testbed = self._campaign, self._testbed
        chance = random.Random(campaign.plan.seed)
        context = TestbedContext(target=self._begin_run(), chance=chance, testbed=testbed)
        rehearsal = TestbedRehearsal(context, campaign.result, self._url, campaign.tell)
        done: list[FaultResult] = []
        following: tuple[int, Kind] | None = fault
        while following is not None:
            number, kind = following
            context.chance = chance_of(campaign.plan.seed, number)
            done.append(rehearsal.rehearse(kind))
            at = context.target.newest.step if context.target.newest else 0
            is_full = len(done) == FAULTS_PER_RUN or not done[-1].ok
            following = None if is_full else campaign.take(at, begun=True)
        is_whole = rehearsal.finish() and done[-1].ok
        testbed.end_attempts()
        with contextlib.suppress(HoldfastError):
            campaign.trained.append(_account(context.target.paths, done))
        if not is_whole:
            self._keep_run(context.target.paths)
        # The testbed's small disk has space for one run.
        shutil.rmtree(context.target.paths.directory, ignore_errors=True)

    def _keep_run(self, paths: RunPaths) -> None:
        """Keep the folder of a run with a broken invariant. Other runs are deleted."""
        campaign, testbed = self._campaign, self._testbed
        place = campaign.kept / testbed.folder.name / paths.name
        try:
            testbed.move_run(paths, place)
        except OSError as error:
            campaign.tell(f"{paths.name} could not be kept: {error}")
        else:
            campaign.result.kept.append(str(place))
            campaign.tell(f"{paths.name} was moved to {place}")

    def _calibrate(self) -> None:
        """Train a run without faults, with one relaunch, and record its costs."""
        campaign = self._campaign
        campaign.tell(
            f"calibration run without faults: twice {CALIBRATION_STEPS} steps and a relaunch"
        )
        target = self._begin_run()
        try:
            _train(target, CALIBRATION_STEPS)
            operator.request(target.paths, "relaunch", by="drill", gpus=RANKS, writer="drill")
            _train(target, CALIBRATION_STEPS, attempt=2)
            operator.request(target.paths, "stop", by="drill", writer="drill")
            self._testbed.wait_for_flow()
            campaign.calibrations.append(calibrate(load_history(target.paths)))
        except HoldfastError as error:
            campaign.tell(f"the calibration failed, so there is no prediction from it: {error}")


def _train(target: RecordedRun, steps: int, attempt: int = 1) -> None:
    """Wait until an attempt has trained this many steps."""

    def has_trained() -> bool:
        newest = target.newest
        if newest is None or newest.place.attempt != attempt:
            return False
        return newest.step >= target.resumed_step(newest.place) + steps

    target.wait_for(f"{steps} steps", has_trained)


def _account(paths: RunPaths, faults: Sequence[FaultResult]) -> Trained:
    history = load_history(paths)
    return Trained(
        goodput=goodput_of(history),
        steps=last_step_of(history),
        faults=tuple((one.kind, one.recovery) for one in faults),
    )
