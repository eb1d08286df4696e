"""The effective training time ratio of a drill, measured and predicted. Pure functions.

The costs come from a run without faults that was relaunched once. Of the drill itself, only the
list of its faults goes into the prediction. docs/goodput.md derives the formula.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from typing import Any, Final

from holdfast.contracts.account.goodput import Goodput, account
from holdfast.contracts.account.timeline import spans_of
from holdfast.contracts.disk.journal import EventKind
from holdfast.contracts.errors import ServiceError
from holdfast.contracts.records.history import RunHistory
from holdfast.contracts.records.tally import LaunchSpan
from holdfast.workers.agent.watch.hangs import STRAGGLER_WINDOW_S, TIMES_MIN
from holdfast_bench.drills.testbed import (
    INTERVAL_STEPS,
    POLL_S,
    SILENCE_S,
    SNAPSHOT_STEPS,
    STEP_S,
)
from holdfast_bench.live_drills.kinds import FREE_S, HELD_S, KINDS, SUSPENDED_S, Loss, Recovery

# Detection times from the testbed's settings. None of them is measured.
DETECTION_S: Final = {"hang": SILENCE_S["train"], "corrupt-checkpoint": 0.0}
# A step may end while its rank is held up, and another one before the next time.
STALLS_S: Final = {
    "straggler": TIMES_MIN * STRAGGLER_WINDOW_S * (1 - 2 * STEP_S / (HELD_S + FREE_S)),
    "suspended": SUSPENDED_S,
}
ANNOUNCED: Final = frozenset({"sigterm", "sigusr2", "spot-notice", "kill-flow"})
INTERVALS: Final = {
    Loss.NOTHING: 0,
    Loss.SNAPSHOT: SNAPSHOT_STEPS,
    Loss.CHECKPOINT: INTERVAL_STEPS,
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a run without faults, in seconds.

    `step_s` is a step and `blocked_s` the time for which a save blocks training. `flush_s` is the
    commit after the last step, `start_s` the start up to the load and `load_s` the load.
    """

    step_s: float
    blocked_s: float
    flush_s: float
    start_s: float
    load_s: float


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An interruption. `wait_s` is the queue time and back-off before the next attempt starts.

    After an announced fault, the run commits a last step and loses nothing. Any other fault is
    detected after `detection_s`. Training then continues from a state that is at most
    `interval_steps` steps old.
    """

    is_announced: bool
    interval_steps: int = 0
    detection_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A fault that stops training for `held_s` seconds without ending the attempt."""

    held_s: float


def predict_ettr(
    costs: Costs,
    faults: Iterable[Fault | Stall],
    *,
    steps: int,
    save_steps: int,
    queued_s: float = 0.0,
) -> float:
    """Return the predicted ETTR of a run of `steps` steps that saves every `save_steps` steps.

    `queued_s` is the queue time before the first start. Raises `ValueError` for a run without steps
    or saves.
    """
    if steps < 1 or save_steps < 1:
        raise ValueError(
            f"{steps} steps, a save every {save_steps}: expected 1 or more of both; give the "
            "numbers of the run's spec"
        )
    productive_s = steps * costs.step_s
    begin_s = costs.start_s + costs.load_s
    fixed_s = queued_s + begin_s + steps // save_steps * costs.blocked_s + costs.flush_s
    held_s = sum(
        one.held_s if isinstance(one, Stall) else _lost_s(one, costs) + one.wait_s + begin_s
        for one in faults
    )
    return productive_s / (productive_s + fixed_s + held_s)


def _lost_s(fault: Fault, costs: Costs) -> float:
    """Return the average seconds that the end of an attempt costs."""
    if fault.is_announced:
        return costs.blocked_s + costs.flush_s
    # The fault happens at a random time between two saves, so half an interval is trained again.
    return fault.detection_s + fault.interval_steps / 2 * costs.step_s


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Seconds of a run without faults.

    `queued_s` is the time until its first launch, `relaunch_s` from an attempt's end to the next
    launch, and `flow_s` from a supervisor's start to its supervision.
    """

    costs: Costs
    queued_s: float
    relaunch_s: float
    flow_s: float


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One drilled run: its goodput, its last step, and (kind, recovery) of each of its faults."""

    goodput: Goodput
    steps: int
    faults: tuple[tuple[str, Recovery], ...]


@dataclass(frozen=True, kw_only=True)
class Ettr:
    """Seconds of drilled runs.

    `training_s` is the measured training time, and `paced_s` the training time of the same steps
    at their duration without faults. `total_s` is the wall time, and `expected_s` the predicted
    wall time.
    """

    training_s: float
    paced_s: float
    total_s: float
    expected_s: float
    calibration: Calibration

    @property
    def measured(self) -> float:
        """The share of wall time that `holdfast show` counts as training."""
        return self.training_s / self.total_s if self.total_s else 0.0

    @property
    def paced(self) -> float:
        """The share of wall time if each step that was not lost took as long as without faults."""
        return self.paced_s / self.total_s if self.total_s else 0.0

    @property
    def predicted(self) -> float:
        """The predicted share."""
        return self.paced_s / self.expected_s if self.expected_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the values for `--json`."""
        shares = {"measured": self.measured, "paced": self.paced, "predicted": self.predicted}
        return {**shares, **asdict(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Ettr:
        """Return the `Ettr` of `as_json`'s output. Raises `KeyError` for other input."""
        calibration = dict(values["calibration"])
        costs = Costs(**calibration.pop("costs"))
        names = ("training_s", "paced_s", "total_s", "expected_s")
        seconds = {name: values[name] for name in names}
        return Ettr(calibration=Calibration(costs=costs, **calibration), **seconds)


def goodput_of(history: RunHistory) -> Goodput:
    """Return an ended run's goodput. Raises `ServiceError` if no attempt has ended."""
    ended = [view.ended_at for view in history.attempts if view.ended_at]
    if not ended:
        raise ServiceError(f"{history.paths.name}: none of its attempts has ended")
    spans = spans_of(history)
    return account(spans, created_at=history.record.created_at, until=max(ended))


def last_step_of(history: RunHistory) -> int:
    """Return the last step that any rank finished; 0 if there is none."""
    return max((view.last_step or 0 for view in history.attempts), default=0)


def calibrate(history: RunHistory) -> Calibration:
    """Return the costs of an ended run without faults and with two attempts.

    Raises `ServiceError` if the run had other attempts or launches.
    """
    kept, spans = goodput_of(history), spans_of(history)
    launches = [one for span in spans for one in span.launches]
    begun = [one.started_at for one in launches if one.started_at is not None]
    taken = [e.time for e in history.events if e.kind is EventKind.SUPERVISED]
    first_end, steps = spans[0].ended_at, last_step_of(history)
    if len(spans) != 2 or len(begun) != 2 or first_end is None or not taken or not steps:
        raise ServiceError(
            f"{history.paths.name}: expected two attempts of one launch each, got "
            f"{len(spans)} attempts and {len(begun)} launches. The calibration was disturbed; run "
            "the drill again."
        )
    costs = Costs(
        step_s=kept.training_s / steps,
        blocked_s=kept.blocked_s / max(1, steps // INTERVAL_STEPS),
        flush_s=kept.flushing_s / 2,
        start_s=sum(_start_s(one) for one in launches) / 2,
        load_s=_load_s(launches[1]),
    )
    created_at = history.record.created_at
    return Calibration(
        costs=costs,
        queued_s=begun[0] - created_at,
        relaunch_s=begun[1] - first_end,
        flow_s=taken[0] - created_at,
    )


def mean_of(calibrations: Sequence[Calibration]) -> Calibration:
    """Return the mean of each value over one or more calibrations."""

    def mean(figures: Iterable[Any], name: str) -> float:
        return fmean(getattr(one, name) for one in figures)

    costs = [one.costs for one in calibrations]
    return Calibration(
        costs=Costs(**{f.name: mean(costs, f.name) for f in fields(Costs)}),
        queued_s=mean(calibrations, "queued_s"),
        relaunch_s=mean(calibrations, "relaunch_s"),
        flow_s=mean(calibrations, "flow_s"),
    )


def compare(calibration: Calibration, runs: Iterable[Trained]) -> Ettr:
    """Return the measured and the predicted values of the drilled `runs`."""
    costs = calibration.costs
    training_s = total_s = paced_s = expected_s = 0.0
    for run in runs:
        faults = [found for one in run.faults for found in _fault(*one, calibration)]
        share = predict_ettr(
            costs,
            faults,
            steps=max(1, run.steps),
            save_steps=INTERVAL_STEPS,
            queued_s=calibration.queued_s,
        )
        paced_s += run.steps * costs.step_s
        expected_s += max(1, run.steps) * costs.step_s / share
        training_s += run.goodput.training_s
        total_s += run.goodput.total_s
    return Ettr(
        training_s=training_s,
        paced_s=paced_s,
        total_s=total_s,
        expected_s=expected_s,
        calibration=calibration,
    )


def sum_of(parts: Sequence[Ettr]) -> Ettr | None:
    """Return the sum over several drills; None if there is none."""
    if not parts:
        return None
    return Ettr(
        training_s=sum(one.training_s for one in parts),
        paced_s=sum(one.paced_s for one in parts),
        total_s=sum(one.total_s for one in parts),
        expected_s=sum(one.expected_s for one in parts),
        calibration=mean_of([one.calibration for one in parts]),
    )


def _fault(kind: str, recovery: Recovery, calibration: Calibration) -> list[Fault | Stall]:
    """Return the formula's input for one fault; nothing if it did not disturb training."""
    if recovery is Recovery.UNDISTURBED:
        return [Stall(held_s=STALLS_S[kind])] if kind in STALLS_S else []
    # A restart in place has no back-off, because every fault comes after new committed steps.
    wait_s = 0.0 if recovery is Recovery.IN_PLACE else calibration.relaunch_s
    if kind == "kill-flow":
        # The attempt had ended when its supervisor was killed, so a new supervisor starts first.
        wait_s += calibration.flow_s
    return [
        Fault(
            is_announced=kind in ANNOUNCED,
            interval_steps=INTERVALS[KINDS[kind].loss],
            detection_s=DETECTION_S.get(kind, POLL_S),
            wait_s=wait_s,
        )
    ]


def _start_s(launch: LaunchSpan) -> float:
    """Return the seconds from a launch of torchrun until its ranks load."""
    if launch.started_at is None or launch.trained_from is None:
        return 0.0
    return launch.trained_from - launch.started_at - _load_s(launch)


def _load_s(launch: LaunchSpan) -> float:
    if launch.loads_from is None or launch.trained_from is None:
        return 0.0
    return launch.trained_from - launch.loads_from
