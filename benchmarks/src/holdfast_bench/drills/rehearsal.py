"""Faults on a temporary run: also its steps, its saves and its end are checked.

Faults of a run's disk, index, Prefect server, cloud and files act on files and servers of the
testbed only, and restore them. Every step is compared with an uninterrupted run. After a rollback
or a skip, a run trains on other data. It is then compared with a run that skips the same windows
from its start. That run is trained when the drilled run has ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from holdfast.contracts.disk.journal import Event, EventKind
from holdfast.contracts.errors import HoldfastError, ServiceError
from holdfast.contracts.node.wire import name_prefix
from holdfast.contracts.records.history import load_history
from holdfast.contracts.spec.sections import Numerics
from holdfast.contracts.states import RunState
from holdfast.lineage.database.heal import MAGIC, quarantine
from holdfast.workers.runs import operator
from holdfast_bench.drills.steps import RecordedRun, Reference, Step, difference, gaps
from holdfast_bench.drills.testbed import INTERVAL_STEPS, SNAPSHOT_STEPS, Testbed
from holdfast_bench.live_drills import faults, invariants
from holdfast_bench.live_drills.faults import FaultContext
from holdfast_bench.live_drills.invariants import Broken
from holdfast_bench.live_drills.kinds import Kind, Loss, Recovery
from holdfast_bench.live_drills.process_list import LaunchPlace, place_of
from holdfast_bench.live_drills.results import DrillResult
from holdfast_bench.live_drills.runner import Rehearsal, Tell
from holdfast_bench.live_drills.target_run import ProgressMark, TargetRun

SAVED_S_MAX: Final = 3600.0
LOSS_STEPS: Final = {
    Loss.NOTHING: 0,
    Loss.SNAPSHOT: SNAPSHOT_STEPS,
    Loss.CHECKPOINT: 2 * INTERVAL_STEPS,
}
_SOCKETS: Final = Path("/proc/net/unix")
Window = tuple[int, int]
_CHANGES: Final = frozenset({EventKind.ROLLED_BACK, EventKind.NUMERICS})
PREFECT_GAP_STEPS: Final = 50
DATABASE_BACK_S: Final = 120.0
# Space for journals and logs on the full disk. No checkpoint of a testbed fits in it.
LEFT_BYTES: Final = 1 << 20
SAVE_FAILS_S: Final = 180.0
POISON_S_MAX: Final = 120.0
# The testbed's runs use these defaults, except for the action after such a loss.
POLICY: Final = Numerics()
AFTER_NAN: Final[Mapping[str, Recovery]] = {
    "stop": Recovery.NEW_ATTEMPT,
    "rollback": Recovery.IN_PLACE,
    "skip": Recovery.UNDISTURBED,
}


@dataclass(kw_only=True)
class TestbedContext(FaultContext):
    """The run, the source of random numbers and the testbed.

    A fault sets `is_poisoned` if steps have no loss until the recovery.
    """

    # pytest would otherwise take the class for tests.
    __test__: ClassVar = False
    hang_s_max: ClassVar[float] = 180.0

    target: RecordedRun
    testbed: Testbed
    is_poisoned: bool = False

    def start_flow(self) -> None:
        """Start another supervisor for the run in its testbed."""
        self.testbed.start_flow(self.target.paths)

    def reap_flow(self) -> None:
        """Reap the supervisor, which was killed."""
        self.testbed.kill_flow()


def fill_disk(context: TestbedContext) -> str:
    """Fill the root until a save has failed, then free the space.

    Space that the keep rules free meanwhile is filled too, so that no save can use it.
    """
    root, target = context.testbed.root, context.target
    filler, since = root / ".filler", time.time()

    def failed_saves() -> list[Event]:
        with open(filler, "ab") as stream, contextlib.suppress(OSError):
            stream.write(bytes(max(0, _free_bytes(root) - LEFT_BYTES)))
        return target.events_of(EventKind.SAVE_FAILED, since)

    try:
        failed = target.wait_for("a failed save", failed_saves, SAVE_FAILS_S)
    finally:
        filler.unlink(missing_ok=True)
    return f"a full disk: {str(failed[0].data.get('error'))[:120]}"


def take_database(context: TestbedContext) -> str:
    """Overwrite the index. It is then set aside, and the supervisor fills a new one.

    The files are overwritten in place and not truncated, because other processes have them mapped.
    """
    home = context.testbed.home
    index = home / "holdfast.db"
    overwritten = 0
    for path in (index, home / "holdfast.db-wal"):
        if path.is_file():
            _overwrite(path)
            overwritten += 1
    # Any process that opens the index does this. The supervisor still has its pages in memory.
    aside = quarantine(index)
    if aside is None:
        raise ServiceError(f"{index} was overwritten, but still accepted as an index")
    context.target.wait_for("the supervisor's new index", index.is_file, DATABASE_BACK_S)
    for path in home.glob(f"{aside.name}*"):
        path.unlink(missing_ok=True)
    return f"{overwritten} files of the index overwritten, then set aside"


def _overwrite(path: Path) -> None:
    """Overwrite a SQLite file, except for its header string."""
    with open(path, "r+b") as stream:
        stream.seek(len(MAGIC))
        stream.write(b"not a database " * (max(0, path.stat().st_size - len(MAGIC)) // 15))


def announce_preemption(context: TestbedContext) -> str:
    """Announce a preemption until the agent has received it."""
    cloud, target, since = context.testbed.cloud, context.target, time.time()
    cloud.preempt()
    try:
        heard = target.wait_for(
            "the agent's report of the notice", lambda: target.events_of(EventKind.SIGNAL, since)
        )
    finally:
        cloud.calm()
    return f"received as {heard[0].data.get('source')}: {heard[0].data.get('detail')}"


def take_prefect(context: TestbedContext) -> str:
    """Run the flow with a real Prefect server, kill the server, and restart it later.

    The supervisor without Prefect then takes over again.
    """
    testbed, target = context.testbed, context.target
    testbed.prefect.start()
    _change_flow(context, with_prefect=True)
    testbed.prefect.kill()
    _await_steps(target, "training without a Prefect server")
    testbed.prefect.start()
    _await_steps(target, "training with a Prefect server")
    survived = target.flow() is not None
    _change_flow(context, with_prefect=False)
    return f"SIGKILL to the Prefect server; its flow {'continued' if survived else 'ended'}"


def _await_steps(target: TargetRun, what: str) -> None:
    """Wait until some more steps were trained."""
    step = target.newest.step if target.newest else 0
    target.wait_for(what, lambda: target.newest and target.newest.step >= step + PREFECT_GAP_STEPS)


def _change_flow(context: TestbedContext, *, with_prefect: bool) -> None:
    """Replace the run's supervisor, if it has one."""
    testbed, target, since = context.testbed, context.target, time.time()
    testbed.kill_flow()
    testbed.start_flow(target.paths, with_prefect=with_prefect)
    target.wait_for("a new supervisor", lambda: target.events_of(EventKind.SUPERVISED, since))


def _free_bytes(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def poison_step(context: TestbedContext) -> str:
    """Spoil one step: its loss and the weights after it become NaN.

    For a run that skips data, only the reported loss becomes NaN, and training continues. The
    ranks do not report another loss for a while, so this waits until they would.
    """
    target, testbed = context.target, context.testbed
    before = _numerics(target, 0.0)
    reached = max((int(line.data["step"]) for line in before), default=-POLICY.window)
    target.wait_for(
        "a step far enough after the last spoiled one",
        lambda: target.newest and target.newest.step > reached + POLICY.window,
    )
    since = context.acted_at = time.time()
    what = "loss" if testbed.on_nan == "skip" else "weights"
    context.is_poisoned = what == "weights"
    target.records.spoil_step(what)
    reports = target.wait_for(
        "the ranks' report of a spoiled step", lambda: _numerics(target, since), POISON_S_MAX
    )
    action = str(reports[0].data.get("action"))
    expected = testbed.on_nan if len(before) < POLICY.changes_max else "stop"
    if action != expected:
        raise ServiceError(
            f"expected the action {expected} after a spoiled step, got {action}: {reports[0].data}"
        )
    context.recovery = AFTER_NAN[action]
    return f"NaN in the {what} of one step; action: {action}"


def _numerics(target: TargetRun, since: float) -> list[Event]:
    """Return the reports of NaN losses, without those of spikes."""
    lines = target.events_of(EventKind.NUMERICS, since)
    return [line for line in lines if line.data.get("problem") == "nan"]


FAULTS: Final[Mapping[str, Callable[[TestbedContext], str]]] = {
    **faults.FAULTS,
    "spot-notice": announce_preemption,
    "disk-full": fill_disk,
    "database-down": take_database,
    "prefect-down": take_prefect,
    "nan": poison_step,
}


@dataclass(frozen=True, kw_only=True)
class Change:
    """Skipped data. `window` is the first step with other data, and the number of skipped steps.

    Launches newer than `place` skip the data; if `is_there`, `place` itself does so too.
    """

    place: LaunchPlace
    is_there: bool
    window: Window

    def is_for(self, step: Step) -> bool:
        """Return whether the step's launch knew of the change."""
        return step.place > self.place or (self.is_there and step.place == self.place)


def changes_of(events: Iterable[Event]) -> list[Change]:
    """Return the windows of rollbacks and skips, in the order of the journal."""
    return [
        Change(
            place=place_of(event),
            is_there=event.kind is EventKind.NUMERICS,
            window=(int(first), int(steps)),
        )
        for event in events
        if event.kind in _CHANGES
        for first, steps in event.data.get("skip") or ()
    ]


class Comparison:
    """Compares one run's steps with `reference`, the uninterrupted run's.

    `uncompared` counts the steps after its end, and those of data that was skipped later.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._waiting: list[Step] = []
        self.uncompared = 0

    def look(self, new: Sequence[Step], events: Iterable[Event]) -> list[str]:
        """Return the problems of `new` steps in file order. `events` were read after them."""
        changes = changes_of(events)
        found = []
        for step in new:
            if _is_changed(step, [one for one in changes if one.is_for(step)]):
                self._waiting.append(step)
            else:
                found += self._compare(step, self._reference)
        return found + gaps(list(new))

    def finish(
        self, events: Iterable[Event], train: Callable[[int, list[Window]], Reference]
    ) -> list[str]:
        """Return the problems of the steps after changes of data.

        `train` returns a reference with a number of steps and windows.
        """
        if not self._waiting:
            return []
        changes = changes_of(events)
        windows = sorted({one.window for one in changes})
        reference = train(max(step.step for step in self._waiting), windows)
        found = []
        for step in self._waiting:
            if _is_changed(step, [one for one in changes if not one.is_for(step)]):
                self.uncompared += 1
            else:
                found += self._compare(step, reference)
        self._waiting.clear()
        return found

    def _compare(self, step: Step, reference: Reference) -> list[str]:
        self.uncompared += (step.rank, step.step) not in reference
        problem = difference(step, reference)
        return [problem] if problem else []


def _is_changed(step: Step, changes: Iterable[Change]) -> bool:
    return any(step.step >= one.window[0] for one in changes)


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
