"""A drill: seeded faults against a run, one after another, and the invariants after each."""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from holdfast.contracts.errors import HoldfastError, ServiceError
from holdfast.contracts.history import load_history
from holdfast.contracts.journal import EventKind
from holdfast.contracts.paths import RunPaths
from holdfast.contracts.states import RunState
from holdfast.flows.drills import census, invariants
from holdfast.flows.drills.ettr import (
    Calibration,
    Trained,
    calibrate,
    compare,
    goodput_of,
    last_step_of,
)
from holdfast.flows.drills.faults import FAULTS
from holdfast.flows.drills.invariants import Broken
from holdfast.flows.drills.kinds import Kind, Loss, Recovery, draw_faults
from holdfast.flows.drills.results import DrillResult, FaultResult
from holdfast.flows.drills.scene import Scene
from holdfast.flows.drills.stand import INTERVAL_STEPS, RANKS, SNAPSHOT_STEPS, Stand, throw_away
from holdfast.flows.drills.steps import difference, gaps
from holdfast.flows.drills.subject import Mark, Subject
from holdfast.lineage.database import database_url
from holdfast.workers import operator

# A run's journals grow with it, and every look reads them: a new run after so many faults.
FAULTS_PER_RUN: Final = 40
MOMENT_S_MAX: Final = 1.0
STEPS_AFTER: Final = 5
# The uninterrupted run is as long as the faults may make the drilled one, up to here; then a new
# run begins.
REFERENCE_STEPS: Final = 500
REFERENCE_STEPS_MAX: Final = 9000
FAILURES_MAX: Final = 5
CALIBRATION_STEPS: Final = 150
LOSS_STEPS: Final = {
    Loss.NOTHING: 0,
    Loss.SNAPSHOT: SNAPSHOT_STEPS,
    Loss.CHECKPOINT: 2 * INTERVAL_STEPS,
}
# What a journal says first when something was hurt.
_NOTICED: Final = (
    EventKind.NOTICE,
    EventKind.SIGNAL,
    EventKind.NUMERICS,
    EventKind.SAVE_FAILED,
    EventKind.HANG_SUSPECTED,
    EventKind.STRAGGLER,
    EventKind.INCARNATION_ENDED,
    EventKind.NODE_LOST,
    EventKind.ATTEMPT_ENDED,
)


Tell = Callable[[str], None]


class Rehearsal:
    """Faults against one run. `result` takes what comes of them."""

    def __init__(self, scene: Scene, result: DrillResult, url: str, tell: Tell) -> None:
        self.scene, self.result, self.tell = scene, result, tell
        self._subject = scene.subject
        self._url = url
        self._seen = set(result.broken)
        self._whole: set[str] = set()
        self._compared = 0

    def rehearse(self, kind: Kind) -> None:
        """One fault, its recovery, and the invariants; what is wrong goes to the result."""
        began = time.monotonic()
        subject = self._subject
        broken: list[Broken] = []
        detail, fault_at, mark, after = kind.words, time.time(), None, None
        try:
            mark = subject.wait_for("training", self._settled)
            time.sleep(self.scene.chance.uniform(0.0, MOMENT_S_MAX))
            subject.look()
            self.scene.recovery, self.scene.is_poisoned = None, False
            fault_at = time.time()
            detail = FAULTS[kind.name](self.scene)
            after = self._wait_for_recovery(kind, mark, fault_at)
            broken += self._judge_recovery(kind, mark, after, fault_at)
        except (HoldfastError, OSError, psutil.Error) as error:
            broken.append(Broken(invariants.RECOVERS, f"{kind.name}: {error}"))
        broken += self.check()
        new = [one for one in broken if one not in self._seen]
        self._seen |= set(new)
        self.result.broken += new
        self._note(kind, detail, mark, after, fault_at, new, time.monotonic() - began)

    def _settled(self) -> Mark | None:
        return self._subject.settled(commits=self.scene.stand is not None)

    def _wait_for_recovery(self, kind: Kind, mark: Mark, fault_at: float) -> Mark:
        """The run trains again: in the same incarnation, or in a newer one."""
        subject = self._subject
        if (self.scene.recovery or kind.recovery) is not Recovery.UNDISTURBED:
            return subject.wait_for(
                "training again", lambda: subject.settled(after=mark.place, commits=False)
            )
        subject.look()
        reached = max(subject.newest_step_of(mark.place), mark.step) + STEPS_AFTER

        def goes_on() -> Mark | None:
            newest = subject.newest
            is_further = newest is not None and (newest.place > mark.place or newest.step > reached)
            has_saved = self.scene.stand is None or subject.events_of(
                EventKind.COMMITTED, max(fault_at, time.time() - 3600.0)
            )
            return newest if is_further and has_saved else None

        return subject.wait_for("more steps, and a checkpoint of them", goes_on)

    def _judge_recovery(
        self, kind: Kind, mark: Mark, after: Mark, fault_at: float
    ) -> Iterator[Broken]:
        """Whether the run came back as the kind says, for the cause it says, at its price."""
        recovery = self.scene.recovery or kind.recovery
        came = _recovery_between(mark, after)
        if came is not recovery:
            words = f"{kind.name}: expected {recovery}, came {came}"
            yield Broken(invariants.RECOVERS, f"{words} ({mark.place} → {after.place})")
        causes = {
            str(e.data.get("cause"))
            for e in self._subject.events_of(EventKind.ATTEMPT_ENDED, fault_at)
        }
        wrong = causes - {cause.value for cause in kind.causes}
        if kind.causes and came is Recovery.NEW_ATTEMPT and wrong:
            expected = ", ".join(sorted(kind.causes))
            words = f"{kind.name}: ended by {', '.join(wrong)}, expected {expected}"
            yield Broken(invariants.ENDINGS_EXPLAINED, words)
        lost = self._steps_lost(mark, after)
        if self.scene.stand is not None and lost is not None and lost > LOSS_STEPS[kind.loss]:
            words = f"{kind.name}: {lost} steps lost, expected {LOSS_STEPS[kind.loss]} or fewer"
            yield Broken(invariants.RECOVERS, words)

    def _steps_lost(self, mark: Mark, after: Mark) -> int | None:
        """Steps that were done before the fault and had to be done again."""
        if after.place == mark.place:
            return None
        done = self._subject.newest_step_of(mark.place)
        return max(0, done - self._subject.resumed_step(after.place))

    def _note(
        self,
        kind: Kind,
        detail: str,
        mark: Mark | None,
        after: Mark | None,
        fault_at: float,
        broken: Sequence[Broken],
        took_s: float,
    ) -> None:
        lost = first = None
        came = Recovery.UNDISTURBED
        if mark is not None and after is not None and after.place != mark.place:
            came = _recovery_between(mark, after)
            lost = self._steps_lost(mark, after)
            began = self._subject.first_of(after.place)
            first = round(began.time - fault_at, 3) if began else None
        told = [e.time for k in _NOTICED for e in self._subject.events_of(k, fault_at)]
        noticed = round(min(told) - fault_at, 3) if told else None
        words = "; ".join([detail, *(f"BROKEN {b.invariant}: {b.detail}" for b in broken)])
        one = FaultResult(
            kind=kind.name,
            ok=not broken,
            detail=words,
            run=self._subject.paths.name,
            step=mark.step if mark else -1,
            recovery=came,
            steps_lost=lost,
            noticed_s=noticed,
            first_step_s=first,
            took_s=round(took_s, 3),
        )
        self.result.faults.append(one)
        number = len(self.result.faults)
        self.tell(f"{number}: {'ok' if one.ok else 'BROKEN'} {kind.name} ({took_s:.1f} s): {words}")

    # --- invariants -----------------------------------------------------------------------

    def check(self) -> list[Broken]:
        """Every invariant, now that the run has settled again."""
        subject = self._subject
        subject.look()
        paths, events = subject.paths, subject.events
        broken = [
            *invariants.check_checkpoints(paths, events, whole=self._whole),
            *invariants.check_resumes(paths, events),
            *invariants.check_submissions(paths, events),
            *invariants.check_endings(load_history(paths).attempts, events),
            *invariants.check_commands(events),
            *self._check_steps(),
            *self._check_orphans(),
        ]
        try:
            broken += invariants.check_index(self._url, paths)
        except HoldfastError as error:
            broken.append(Broken(invariants.INDEX_IS_DISK, str(error)))
        return broken

    def _check_steps(self) -> list[Broken]:
        """Steps that were not compared before are the uninterrupted run's."""
        stand, steps = self.scene.stand, self._subject.steps
        if stand is None:
            return []
        new, self._compared = steps[self._compared :], len(steps)
        if self.scene.is_poisoned:
            new = [one for one in new if not math.isnan(one.loss)]
        self.result.uncompared += sum((one.rank, one.step) not in stand.reference for one in new)
        wrong = [words for one in new if (words := difference(one, stand.reference))]
        wrong += gaps(new)
        return [Broken(invariants.STEPS_ARE_RIGHT, words) for words in wrong[:1]]

    def _check_orphans(self) -> list[Broken]:
        subject = self._subject
        owners = [p for p in (subject.controller(), subject.flow()) if p is not None]
        with contextlib.suppress(HoldfastError):
            owners.append(subject.agent())
        place = subject.newest.place if subject.newest else None
        found = census.orphans(subject.paths, owners, place)
        return [Broken(invariants.NO_ORPHANS, f"process {words}") for words in found]

    # --- the end --------------------------------------------------------------------------

    def finish(self, stand: Stand) -> None:
        """Stop the run as an operator does: nothing of it may be left."""
        paths = self._subject.paths
        broken: list[Broken] = []
        try:
            operator.request(paths, "stop", by="drill", writer="drill")
            stand.wait_for_flow()
            state = load_history(paths).state
            if state is not RunState.CANCELLED:
                broken.append(Broken(invariants.RECOVERS, f"{paths.name} is {state} at its end"))
        except (HoldfastError, OSError) as error:
            broken.append(Broken(invariants.RECOVERS, f"{paths.name}: {error}"))
        broken += self.check()
        broken += [
            Broken(invariants.NO_ORPHANS, f"socket {name} is left")
            for name in census.sockets_left(load_history(paths).record.uid)
        ]
        self.result.broken += [one for one in broken if one not in self._seen]
        self.result.steps += len({s.step for s in self._subject.steps})


def drill_throw_away(
    kinds: Sequence[Kind],
    count: int,
    seed: int,
    *,
    folder: Path,
    tell: Tell,
    within_s: float = math.inf,
    calibrates: bool = False,
) -> DrillResult:
    """`count` faults against throw-away runs in `folder`, which is empty.

    After `within_s` seconds no other fault is begun. With `calibrates` the share of time trained
    is held against the predicted one, from a run without faults that comes first.
    """
    began = time.monotonic()
    result = DrillResult(seed=seed)
    faults, chance = draw_faults(kinds, count, seed), random.Random(seed)
    needs_disk = any(kind.name == "disk-full" for kind in faults)
    steps = min(REFERENCE_STEPS_MAX, REFERENCE_STEPS + sum(kind.steps for kind in faults))
    with throw_away(folder, with_small_disk=needs_disk) as stand:
        tell(f"the uninterrupted run: {steps} steps")
        stand.make_reference(steps)
        url = os.environ.get("HOLDFAST_DATABASE_URL") or f"sqlite:///{stand.home}/holdfast.db"
        costs = _calibrate(stand, tell) if calibrates else None
        trained: list[Trained] = []
        left = deque(faults)
        while left and not _is_over(result, began + within_s):
            scene = Scene(stand.begin_run(), chance, stand)
            rehearsal = Rehearsal(scene, result, url, tell)
            told = len(result.faults)
            for _ in range(FAULTS_PER_RUN):
                rehearsal.rehearse(left.popleft())
                at = scene.subject.newest.step if scene.subject.newest else 0
                is_full = not left or at + left[0].steps > steps
                if is_full or _is_over(result, began + within_s):
                    break
            rehearsal.finish(stand)
            trained.append(_account(scene.subject.paths, result.faults[told:]))
        if left:
            tell(f"{len(left)} faults were not begun: time was up, or too much went wrong")
        result.ettr = compare(costs, trained) if costs else None
    result.wall_s = time.monotonic() - began
    return result


def _is_over(result: DrillResult, ends_at: float) -> bool:
    """True when no other fault is to be begun: time is up, or too much went wrong."""
    wrong = sum(1 for one in result.faults if not one.ok)
    return wrong > FAILURES_MAX or time.monotonic() >= ends_at


def _calibrate(stand: Stand, tell: Tell) -> Calibration | None:
    """A run without faults, relaunched once by an operator, and ended by one; None if disturbed."""
    tell(f"a run without faults: twice {CALIBRATION_STEPS} steps and a relaunch")
    subject = stand.begin_run()
    try:
        _train(subject, CALIBRATION_STEPS)
        operator.request(subject.paths, "relaunch", by="drill", gpus=RANKS, writer="drill")
        _train(subject, CALIBRATION_STEPS, attempt=2)
        operator.request(subject.paths, "stop", by="drill", writer="drill")
        stand.wait_for_flow()
        return calibrate(load_history(subject.paths))
    except HoldfastError as error:
        tell(f"no share of trained time is predicted: {error}")
        return None


def _train(subject: Subject, steps: int, attempt: int = 1) -> None:
    """Wait until an attempt has done so many steps."""

    def has_trained() -> bool:
        newest = subject.newest
        if newest is None or newest.place.attempt != attempt:
            return False
        return newest.step >= subject.resumed_step(newest.place) + steps

    subject.wait_for(f"{steps} steps", has_trained)


def _account(paths: RunPaths, faults: Sequence[FaultResult]) -> Trained:
    history = load_history(paths)
    return Trained(
        goodput=goodput_of(history),
        steps=last_step_of(history),
        faults=tuple((one.kind, one.recovery) for one in faults),
    )


def drill_live(
    paths: RunPaths,
    kinds: Sequence[Kind],
    count: int,
    seed: int,
    *,
    tell: Tell,
    within_s: float = math.inf,
) -> DrillResult:
    """`count` faults against a run that trains. Raises `ServiceError` when it does not."""
    began = time.monotonic()
    if load_history(paths).state is not RunState.RUNNING:
        raise ServiceError(f"run {paths.name} does not train now; drill one that does")
    result = DrillResult(seed=seed)
    scene = Scene(Subject(paths), random.Random(seed))
    rehearsal = Rehearsal(scene, result, database_url(), tell)
    for kind in draw_faults(kinds, count, seed):
        if _is_over(result, began + within_s):
            break
        rehearsal.rehearse(kind)
    result.wall_s = time.monotonic() - began
    return result


def _recovery_between(mark: Mark, after: Mark) -> Recovery:
    if after.place == mark.place:
        return Recovery.UNDISTURBED
    same = after.place.attempt == mark.place.attempt
    return Recovery.IN_PLACE if same else Recovery.NEW_ATTEMPT
