"""Inject seeded faults into a run, one after another, and check the invariants after each."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import psutil

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.disk.paths import RunPaths
from holdfast.contracts.errors import HoldfastError, RunStateError
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import RunState
from holdfast.lineage.database.sqlite_file import database_url
from holdfast_bench.live_drills import invariants, process_list
from holdfast_bench.live_drills.faults import FAULTS, FaultContext
from holdfast_bench.live_drills.invariants import Broken
from holdfast_bench.live_drills.kinds import Kind, Recovery, draw_faults
from holdfast_bench.live_drills.results import DrillResult, FaultResult
from holdfast_bench.live_drills.target_run import ProgressMark, TargetRun

MOMENT_S_MAX: Final = 1.0
STEPS_AFTER: Final = 5
# A drill of a live run stops after more than this many faults that broke an invariant.
FAILURES_MAX: Final = 5
CHECKPOINT_TRIES_MAX: Final = 5
EVIDENCE_CHARACTERS_MAX: Final = 400

Tell = Callable[[str], None]


class Rehearsal:
    """Injects faults into one run, and adds their outcomes to `result`."""

    def __init__(self, context: FaultContext, result: DrillResult, url: str, tell: Tell) -> None:
        self.context, self.result, self.tell = context, result, tell
        self._target = context.target
        self._url = url
        self._seen = set(result.broken)
        self._whole: set[str] = set()

    def rehearse(self, kind: Kind) -> FaultResult:
        """Inject one fault, wait for the recovery, and check the invariants."""
        began = time.monotonic()
        target, context = self._target, self.context
        broken: list[Broken] = []
        detail, fault_at, mark, after = kind.summary, time.time(), None, None
        try:
            mark = target.wait_for("training", self._steady)
            time.sleep(context.chance.uniform(0.0, MOMENT_S_MAX))
            target.look()
            context.recovery = None
            context.acted_at = fault_at = time.time()
            detail = self._inject(kind)
            after = self._wait_for_recovery(kind, mark, fault_at)
            broken += self._judge_recovery(kind, mark, after, fault_at)
        except (HoldfastError, OSError, psutil.Error) as error:
            broken.append(Broken(invariants.RECOVERS, f"{kind.name}: {error}"))
        broken += self.check()
        new = [one for one in broken if one not in self._seen]
        self._seen |= set(new)
        self.result.broken += new
        return self._record(kind, detail, mark, after, new, time.monotonic() - began)

    def _steady(self) -> ProgressMark | None:
        return self._target.steady(commits=False)

    def _inject(self, kind: Kind) -> str:
        """Inject the fault and describe what was done."""
        return FAULTS[kind.name](self.context)

    def _wait_for_recovery(self, kind: Kind, mark: ProgressMark, fault_at: float) -> ProgressMark:
        """Wait until the run trains again, in the same launch or in a newer one."""
        target = self._target
        if (self.context.recovery or kind.recovery) is not Recovery.UNDISTURBED:
            return target.wait_for(
                "the recovery", lambda: target.steady(after=mark.place, commits=False)
            )
        target.look()
        reached = max(target.newest_step_of(mark.place), mark.step) + STEPS_AFTER

        def goes_on() -> ProgressMark | None:
            newest = target.newest
            is_further = newest is not None and (newest.place > mark.place or newest.step > reached)
            return newest if is_further and self._has_saved(fault_at) else None

        return target.wait_for("more steps and a new checkpoint", goes_on)

    def _has_saved(self, since: float) -> bool:
        """Return whether the run has saved since a fault. A live run may save rarely."""
        return True

    def _judge_recovery(
        self, kind: Kind, mark: ProgressMark, after: ProgressMark, fault_at: float
    ) -> Iterator[Broken]:
        """Check that the recovery and its cause match the kind of fault."""
        recovery = self.context.recovery or kind.recovery
        came = _recovery_between(mark, after)
        if came is not recovery:
            text = f"{kind.name}: expected recovery {recovery}, got {came} "
            text += f"({mark.place} → {after.place})"
            ends = self._target.events_of(EventKind.LAUNCH_ENDED, fault_at)
            evidence = f"; {str(ends[-1].data)[:EVIDENCE_CHARACTERS_MAX]}" if ends else ""
            yield Broken(invariants.RECOVERS, text + evidence)
        endings = self._target.events_of(EventKind.ATTEMPT_ENDED, fault_at)
        causes = {str(ending.data.get("cause")) for ending in endings}
        wrong = causes - {cause.value for cause in kind.causes}
        if kind.causes and came is Recovery.NEW_ATTEMPT and wrong:
            expected = ", ".join(sorted(kind.causes))
            text = f"{kind.name}: cause {', '.join(wrong)}, expected {expected}"
            yield Broken(invariants.ENDINGS_EXPLAINED, text)

    def _steps_lost(self, mark: ProgressMark, after: ProgressMark) -> int | None:
        """Return the number of steps before the fault that had to be repeated."""
        if after.place == mark.place:
            return None
        done = self._target.newest_step_of(mark.place)
        return max(0, done - self._target.resumed_step(after.place))

    def _record(
        self,
        kind: Kind,
        detail: str,
        mark: ProgressMark | None,
        after: ProgressMark | None,
        broken: Sequence[Broken],
        took_s: float,
    ) -> FaultResult:
        lost = first = None
        came, acted_at = Recovery.UNDISTURBED, self.context.acted_at
        if mark is not None and after is not None and after.place != mark.place:
            came = _recovery_between(mark, after)
            lost = self._steps_lost(mark, after)
            began = self._target.first_of(after.place)
            first = round(began.time - acted_at, 3) if began else None
        lines = [e for k in kind.reported_by for e in self._target.events_of(k, acted_at)]
        text = "; ".join([detail, *(f"BROKEN {b.invariant}: {b.detail}" for b in broken)])
        one = FaultResult(
            kind=kind.name,
            ok=not broken,
            detail=text,
            run=self._target.paths.name,
            step=mark.step if mark else -1,
            recovery=came,
            steps_lost=lost,
            noticed_s=_earliest_s(map(_noticed_at, lines), acted_at),
            reported_s=_earliest_s((line.time for line in lines), acted_at),
            first_step_s=first,
            took_s=round(took_s, 3),
        )
        self.result.faults.append(one)
        number = len(self.result.faults)
        self.tell(f"{number}: {'ok' if one.ok else 'BROKEN'} {kind.name} ({took_s:.1f} s): {text}")
        return one

    # --- invariants -----------------------------------------------------------------------

    def check(self) -> list[Broken]:
        """Check every invariant after the recovery."""
        target = self._target
        target.look()
        paths, events, history = target.paths, target.events, load_history(target.paths)
        return [
            *self._check_checkpoints(),
            *invariants.check_submissions(paths, events),
            *invariants.check_records(self._url, paths, events, history),
            *self._check_orphans(),
        ]

    def _check_checkpoints(self) -> list[Broken]:
        """Check the checkpoints, and repeat the check if one is missing.

        A checkpoint may have been deleted before its journal line was read.
        """
        target, broken = self._target, list[Broken]()
        for _ in range(CHECKPOINT_TRIES_MAX):
            broken = invariants.check_checkpoints(target.paths, target.events, whole=self._whole)
            if not broken:
                break
            target.look()
        return broken

    def _check_orphans(self) -> list[Broken]:
        target = self._target
        owners = [p for p in (target.controller(), target.flow()) if p is not None]
        with contextlib.suppress(HoldfastError):
            owners.append(target.agent())
        # Of other nodes, this machine has processes only where a cluster runs on it.
        owners += target.job_processes()
        place = target.newest.place if target.newest else None
        found = process_list.orphans(target.paths, owners, place)
        return [Broken(invariants.NO_ORPHANS, f"process {process}") for process in found]


def drill_live(
    paths: RunPaths,
    kinds: Sequence[Kind],
    count: int,
    seed: int,
    *,
    tell: Tell,
    within_s: float = math.inf,
) -> DrillResult:
    """Inject `count` faults into a running run. Raises `RunStateError` if it is not running."""
    began = time.monotonic()
    if load_history(paths).state is not RunState.RUNNING:
        raise RunStateError(f"run {paths.name} is not running; expected a run that is training")
    result = DrillResult(seed=seed)
    context = FaultContext(TargetRun(paths), chance_of(seed, 0))
    rehearsal = Rehearsal(context, result, database_url(), tell)
    for number, kind in enumerate(draw_faults(kinds, count, seed)):
        wrong = sum(1 for one in result.faults if not one.ok)
        if wrong > FAILURES_MAX or time.monotonic() >= began + within_s:
            break
        context.chance = chance_of(seed, number)
        rehearsal.rehearse(kind)
    result.wall_s = time.monotonic() - began
    return result


def chance_of(seed: int, number: int) -> random.Random:
    """Return the random numbers for fault `number`. They do not depend on its run."""
    return random.Random(f"{seed} {number}")


def _noticed_at(line: Event) -> float:
    """Return when an agent detected the event of a line.

    The agent writes the line about the end of a launch only after it has stopped all ranks.
    """
    return float(line.data.get("trained_until") or line.time)


def _earliest_s(times: Iterable[float], since: float) -> float | None:
    first = min(times, default=None)
    return None if first is None else round(first - since, 3)


def _recovery_between(mark: ProgressMark, after: ProgressMark) -> Recovery:
    if after.place == mark.place:
        return Recovery.UNDISTURBED
    same = after.place.attempt == mark.place.attempt
    return Recovery.IN_PLACE if same else Recovery.NEW_ATTEMPT
