"""A drill on throw-away runs: several at once, each with a place and a flow of its own.

The runs take their faults from one list. While one waits, for a start or for a proof that a rank
hangs, the others train.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from holdfast.contracts.errors import HoldfastError
from holdfast.contracts.history import load_history
from holdfast.contracts.paths import RunPaths
from holdfast.flows.drills.ettr import (
    Calibration,
    Trained,
    calibrate,
    compare,
    goodput_of,
    last_step_of,
    mean_of,
)
from holdfast.flows.drills.fault_context import FaultContext
from holdfast.flows.drills.kinds import Kind, draw_faults
from holdfast.flows.drills.results import DrillResult, FaultResult
from holdfast.flows.drills.runner import Rehearsal, Tell, chance_of
from holdfast.flows.drills.target_run import Cut, TargetRun
from holdfast.flows.drills.testbed import RANKS, Testbed, throw_away
from holdfast.workers import operator

# A run's journals grow with it, and every look reads them: a new run after so many faults.
FAULTS_PER_RUN: Final = 40
# The uninterrupted run is as long as the faults may make the drilled one, up to here; then a new
# run begins.
REFERENCE_STEPS: Final = 500
REFERENCE_STEPS_MAX: Final = 9000
# So many faults that broke something, or one in so many, and no other one is begun.
FAILURES_MAX: Final = 5
FAILURES_SHARE: Final = 0.1
CALIBRATION_STEPS: Final = 150


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`count` faults of `kinds` in an order that follows from `seed`, on `at_once` runs.

    After `within_s` seconds no other fault is begun. With `calibrates` the share of time trained
    is held against the predicted one, from runs without faults that come first.
    """

    kinds: Sequence[Kind]
    count: int
    seed: int
    within_s: float = math.inf
    at_once: int = 1
    calibrates: bool = False

    @property
    def failures_max(self) -> int:
        """Faults that may break something before the drill gives up."""
        return max(FAILURES_MAX, int(self.count * FAILURES_SHARE))


def drill_throw_away(
    plan: Plan, result: DrillResult, folder: Path, tell: Tell, *, kept: Path
) -> None:
    """The faults of `plan` against throw-away runs in `folder`, which is empty.

    A run in which something broke is moved to the folder `kept`, made for the first of them. What
    came of them is in `result`, whatever ends the drill: interrupted, faults under way are
    dropped and the runs ended.
    """
    campaign = Campaign(plan, result, tell, kept)
    try:
        campaign.conduct(folder)
    finally:
        campaign.close()


class Campaign:
    """What the runs of one drill share: the faults that are left, and what came of the others.

    `steps_max` is the length of the uninterrupted run.
    """

    def __init__(self, plan: Plan, result: DrillResult, tell: Tell, kept: Path) -> None:
        self.plan, self.result, self.tell, self.kept = plan, result, tell, kept
        self.trained: list[Trained] = []
        self.calibrations: list[Calibration] = []
        self.is_cut = threading.Event()
        faults = draw_faults(plan.kinds, plan.count, plan.seed)
        self.steps_max = steps_for(faults, plan.at_once)
        self._left = deque(enumerate(faults))
        self._began = time.monotonic()

    def conduct(self, folder: Path) -> None:
        """The uninterrupted run first, then the drilled ones, each in a thread."""
        needs_disk = any(kind.name == "disk-full" for kind in self.plan.kinds)
        with contextlib.ExitStack() as opened:
            testbeds: list[Testbed] = []
            for number in range(self.plan.at_once):
                place = folder / f"place-{number + 1}"
                place.mkdir()
                testbed = throw_away(place, with_small_disk=needs_disk, number=number)
                testbeds.append(opened.enter_context(testbed))
            self.tell(f"the uninterrupted run: {self.steps_max} steps")
            reference = testbeds[0].train_reference(self.steps_max)
            pool = opened.enter_context(ThreadPoolExecutor(len(testbeds)))
            # Set before the pool waits for its threads, and before the stands are ended.
            opened.callback(self.is_cut.set)
            lanes: list[Future[None]] = []
            for one in testbeds:
                one.reference = reference
                lanes.append(pool.submit(Lane(self, one).work))
            for lane in as_completed(lanes):
                lane.result()

    def close(self) -> None:
        """Sum up what was done."""
        if self._left:
            self.tell(f"{len(self._left)} faults were not begun: time was up, or too much broke")
        if self.calibrations and self.trained:
            self.result.ettr = compare(mean_of(self.calibrations), self.trained)
        self.result.wall_s = time.monotonic() - self._began

    def take(self, at: int) -> tuple[int, Kind] | None:
        """The next fault and its number, if there is one for a run that is at step `at`."""
        wrong = sum(1 for one in self.result.faults if not one.ok)
        is_late = time.monotonic() >= self._began + self.plan.within_s
        if self.is_cut.is_set() or is_late or wrong > self.plan.failures_max:
            return None
        with contextlib.suppress(IndexError):
            number, kind = self._left.popleft()
            if at + kind.steps <= self.steps_max:
                return number, kind
            self._left.appendleft((number, kind))
        return None


def steps_for(faults: Sequence[Kind], at_once: int) -> int:
    """Steps that a run may do while its share of the faults is rehearsed; room for each of them."""
    steps = [kind.steps for kind in faults]
    share = max(max(steps), sum(steps) // at_once)
    return min(REFERENCE_STEPS_MAX, REFERENCE_STEPS + share)


class Lane:
    """One stand, and the runs that are drilled on it one after another."""

    def __init__(self, campaign: Campaign, testbed: Testbed) -> None:
        self._campaign, self._testbed = campaign, testbed
        own = f"sqlite:///{testbed.home}/holdfast.db"
        self._url = os.environ.get("HOLDFAST_DATABASE_URL") or own

    def work(self) -> None:
        """Rehearse faults until none is left for it."""
        with contextlib.suppress(Cut):
            if self._campaign.plan.calibrates:
                self._calibrate()
            while (fault := self._campaign.take(0)) is not None:
                self._drill_run(fault)

    def _begin_run(self) -> TargetRun:
        target = self._testbed.begin_run()
        target.is_cut = self._campaign.is_cut.is_set
        return target

    def _drill_run(self, fault: tuple[int, Kind]) -> None:
        """One run and its faults, until it is full or one of them broke something."""
        campaign, testbed = self._campaign, self._testbed
        context = FaultContext(self._begin_run(), random.Random(campaign.plan.seed), testbed)
        rehearsal = Rehearsal(context, campaign.result, self._url, campaign.tell)
        done: list[FaultResult] = []
        following: tuple[int, Kind] | None = fault
        while following is not None:
            number, kind = following
            context.chance = chance_of(campaign.plan.seed, number)
            done.append(rehearsal.rehearse(kind))
            at = context.target.newest.step if context.target.newest else 0
            is_full = len(done) == FAULTS_PER_RUN or not done[-1].ok
            following = None if is_full else campaign.take(at)
        is_whole = rehearsal.finish(testbed) and done[-1].ok
        testbed.end_attempts()
        with contextlib.suppress(HoldfastError):
            campaign.trained.append(_account(context.target.paths, done))
        if not is_whole:
            self._keep_run(context.target.paths)
        # The place's disk is as small as one run needs it for a disk that fills up.
        shutil.rmtree(context.target.paths.directory, ignore_errors=True)

    def _keep_run(self, paths: RunPaths) -> None:
        """Keep what tells why something broke: all else goes with the drill."""
        campaign, testbed = self._campaign, self._testbed
        place = campaign.kept / testbed.folder.name / paths.name
        try:
            testbed.move_run(paths, place)
        except OSError as error:
            campaign.tell(f"{paths.name} could not be kept: {error}")
        else:
            campaign.result.kept.append(str(place))
            campaign.tell(f"{paths.name} is kept in {place}")

    def _calibrate(self) -> None:
        """A run without faults, relaunched once by an operator, and ended by one."""
        campaign = self._campaign
        campaign.tell(f"a run without faults: twice {CALIBRATION_STEPS} steps and a relaunch")
        target = self._begin_run()
        try:
            _train(target, CALIBRATION_STEPS)
            operator.request(target.paths, "relaunch", by="drill", gpus=RANKS, writer="drill")
            _train(target, CALIBRATION_STEPS, attempt=2)
            operator.request(target.paths, "stop", by="drill", writer="drill")
            self._testbed.wait_for_flow()
            campaign.calibrations.append(calibrate(load_history(target.paths)))
        except HoldfastError as error:
            campaign.tell(f"no share of trained time is predicted from it: {error}")


def _train(target: TargetRun, steps: int, attempt: int = 1) -> None:
    """Wait until an attempt has done so many steps."""

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
