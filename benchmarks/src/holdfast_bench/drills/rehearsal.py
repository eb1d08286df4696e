"""Faults on a temporary run: also its steps, its saves and its end are checked."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import HoldfastError, ServiceError
from holdfast.contracts.node.wire import name_prefix
from holdfast.contracts.records.history import load_history
from holdfast.contracts.states import RunState
from holdfast.workers.runs import operator
from holdfast_bench.drills.comparison import Comparison
from holdfast_bench.drills.context import TestbedContext
from holdfast_bench.drills.faults import FAULTS
from holdfast_bench.drills.testbed import INTERVAL_STEPS, SNAPSHOT_STEPS
from holdfast_bench.live_drills import invariants
from holdfast_bench.live_drills.invariants import Broken
from holdfast_bench.live_drills.kinds import Kind, Loss
from holdfast_bench.live_drills.results import DrillResult
from holdfast_bench.live_drills.runner import Rehearsal, Tell
from holdfast_bench.live_drills.target_run import ProgressMark

SAVED_S_MAX: Final = 3600.0
LOSS_STEPS: Final = {
    Loss.NOTHING: 0,
    Loss.SNAPSHOT: SNAPSHOT_STEPS,
    Loss.CHECKPOINT: 2 * INTERVAL_STEPS,
}
_SOCKETS: Final = Path("/proc/net/unix")


class TestbedRehearsal(Rehearsal):
    """Injects faults into one temporary run, and adds their outcomes to `result`."""

    def __init__(self, context: TestbedContext, result: DrillResult, url: str, tell: Tell) -> None:
        super().__init__(context, result, url, tell)
        self._own, self._run = context, context.target
        self._compared = 0
        self._comparison = Comparison(context.testbed.reference)

    def check(self) -> list[Broken]:
        """Check every invariant after the recovery, and the steps that are new."""
        self._run.look()
        # The lines about the data of these steps are in the journal; the next look reads them.
        known = len(self._run.steps)
        return super().check() + self._check_steps(known)

    def finish(self) -> bool:
        """Stop the run as an operator does, and check that nothing is left of it.

        Returns whether every invariant held.
        """
        paths, testbed = self._run.paths, self._own.testbed
        broken: list[Broken] = []
        try:
            operator.request(paths, "stop", by="drill", writer="drill")
            testbed.wait_for_flow()
            state = load_history(paths).state
            if state is not RunState.CANCELLED:
                broken.append(Broken(invariants.RECOVERS, f"{paths.name} ended in state {state}"))
        except (HoldfastError, OSError) as error:
            broken.append(Broken(invariants.RECOVERS, f"{paths.name}: {error}"))
        broken += self.check()
        try:
            wrong = self._comparison.finish(self._run.events, testbed.train_reference)
            broken += [Broken(invariants.STEPS_ARE_RIGHT, problem) for problem in wrong[:1]]
        except ServiceError as error:
            broken.append(Broken(invariants.STEPS_ARE_RIGHT, str(error)))
        broken += [
            Broken(invariants.NO_ORPHANS, f"socket {name} still exists")
            for name in _sockets_left(paths.directory)
        ]
        new = [one for one in broken if one not in self._seen]
        self.result.broken += new
        self.result.steps += len({s.step for s in self._run.steps})
        self.result.uncompared += self._comparison.uncompared
        return not new

    def _steady(self) -> ProgressMark | None:
        return self._run.steady()

    def _inject(self, kind: Kind) -> str:
        self._own.is_poisoned = False
        return FAULTS[kind.name](self._own)

    def _has_saved(self, since: float) -> bool:
        since = max(since, time.time() - SAVED_S_MAX)
        return bool(self._run.events_of(EventKind.COMMITTED, since))

    def _judge_recovery(
        self, kind: Kind, mark: ProgressMark, after: ProgressMark, fault_at: float
    ) -> Iterator[Broken]:
        """Also check the number of lost steps."""
        yield from super()._judge_recovery(kind, mark, after, fault_at)
        lost = self._steps_lost(mark, after)
        if lost is not None and lost > LOSS_STEPS[kind.loss]:
            text = f"{kind.name}: {lost} steps lost, expected at most {LOSS_STEPS[kind.loss]}"
            yield Broken(invariants.RECOVERS, text)

    def _check_steps(self, known: int) -> list[Broken]:
        """Compare those of the first `known` steps that have not been compared."""
        new, self._compared = self._run.steps[self._compared : known], known
        if self._own.is_poisoned:
            new = [one for one in new if not math.isnan(one.loss)]
        wrong = self._comparison.look(new, self._run.events)
        return [Broken(invariants.STEPS_ARE_RIGHT, problem) for problem in wrong[:1]]


def _sockets_left(run: Path) -> list[str]:
    """Return the names of the run's abstract sockets that are still bound."""
    lines = _SOCKETS.read_text().splitlines()[1:]
    names = {line.split()[-1] for line in lines}
    return sorted(name for name in names if name.startswith(f"@{name_prefix(run)}"))
