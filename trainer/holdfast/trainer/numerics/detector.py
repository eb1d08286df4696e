"""Detection of a bad loss, not finite or far above the median of earlier ones, and what follows.

The limit is `median + max(spike_mads x MAD, SPIKE_SHARE_MIN x |median|)`. MAD is the median
absolute deviation of the window's losses. Up to half of the losses may be outliers before the
median or the MAD moves. The decision is a pure function of the policy and of the run's files. A
loss is computed with the weights of the step before it. So a checkpoint of step c is proven good
when the loss of a step after c is good.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.sections import Numerics, NumericsAction
from holdfast.trainer.data.order import SkipWindow

# A converged loss hardly deviates, so an increase below this share of the median is not a spike.
SPIKE_SHARE_MIN: Final = 0.5
# The minimum share of a full window before any loss counts as a spike.
WINDOW_SHARE_MIN: Final = 0.25
# The limit is computed again after this many losses. Sorting the window at each loss would cost
# more than the rest of a step boundary.
LIMIT_LOSSES: Final = 8
SHOWN_LOSSES: Final = 8


@dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A bad loss. `window` has the losses before it, oldest first. `limit` is set for a spike.

    `good_step` is the step of the last good loss, or the step after which training began.
    """

    problem: Literal["nan", "spike"]
    step: int
    loss: float
    good_step: int
    window: tuple[float, ...] = ()
    median: float | None = None
    limit: float | None = None

    def __str__(self) -> str:
        if self.problem == "nan":
            return f"the loss of step {self.step} is {self.loss}"
        return f"the loss of step {self.step}, {self.loss:.6g}, is above the limit {self.limit:.6g}"


class Detector:
    """Checks one rank's losses in step order, beginning after step `after`."""

    def __init__(self, numerics: Numerics, *, after: int = 0) -> None:
        self._numerics = numerics
        self._good_step = after
        self._window: deque[float] = deque(maxlen=numerics.window)
        self._needed = math.ceil(numerics.window * WINDOW_SHARE_MIN)
        self._median = 0.0
        self._limit = math.inf
        self._until_limit = LIMIT_LOSSES
        self._quiet_until = {"nan": 0, "spike": 0}

    @property
    def losses(self) -> list[float]:
        """The window's losses, oldest first."""
        return list(self._window)

    def resume(self, losses: Iterable[float]) -> None:
        """Continue after the window of losses that a checkpoint has."""
        self._window.extend(losses)
        self._set_limit()

    def look(self, step: int, loss: float) -> Anomaly | None:
        """Return the problem with the loss of `step`, or None if there is none.

        The same problem is reported again only after a window's length of steps.
        """
        if not math.isfinite(loss):
            return self._report("nan", step, loss)
        found = None
        if loss > self._limit:
            found = self._report("spike", step, loss)
        else:
            self._good_step = step
        self._window.append(loss)
        self._until_limit -= 1
        if self._until_limit <= 0:
            self._set_limit()
        return found

    def _set_limit(self) -> None:
        if len(self._window) >= self._needed:
            self._median, self._limit = spike_limit(self._window, self._numerics.spike_mads)
            self._until_limit = LIMIT_LOSSES

    def _report(self, problem: Literal["nan", "spike"], step: int, loss: float) -> Anomaly | None:
        if step < self._quiet_until[problem]:
            return None
        self._quiet_until[problem] = step + self._numerics.window
        return self.describe(problem, step, loss)

    def describe(self, problem: Literal["nan", "spike"], step: int, loss: float) -> Anomaly:
        """Return a bad loss with what is known of the losses before it."""
        is_spike = problem == "spike"
        return Anomaly(
            problem=problem,
            step=step,
            loss=loss,
            good_step=self._good_step,
            window=tuple(self._window)[-SHOWN_LOSSES:],
            median=self._median if is_spike else None,
            limit=self._limit if is_spike else None,
        )


def spike_limit(losses: Collection[float], spike_mads: float) -> tuple[float, float]:
    """Return (median, limit) of at least one loss. All losses are finite."""
    middle = median(losses)
    deviation = median([abs(loss - middle) for loss in losses])
    return middle, middle + max(spike_mads * deviation, SPIKE_SHARE_MIN * abs(middle))


@dataclass(frozen=True, kw_only=True)
class Known:
    """The run's facts on disk when a loss is bad.

    `checkpoints` are the committed ones of the current branch, oldest step first. `unfinished` are
    those that may still be committed. `rolled_back` and `skipped` have the step of the bad loss of
    each rollback and each skip so far. With `has_deleted`, the oldest checkpoint may not be the
    run's first. Data has been drawn for the steps up to `reached`. `is_finite` is True if the
    weights of all ranks are finite.
    """

    checkpoints: Sequence[CheckpointName]
    unfinished: Sequence[CheckpointName] = ()
    rolled_back: Sequence[int] = ()
    skipped: Sequence[int] = ()
    reached: int = 0
    is_finite: bool = True
    has_deleted: bool = False


@dataclass(frozen=True, kw_only=True)
class LossDecision:
    """The decision. `excluded` are the checkpoints from which no resume may continue.

    `to` is the newest other checkpoint, or None for the beginning. `skip` is the data to skip.
    """

    action: NumericsAction
    reason: str
    to: CheckpointName | None = None
    excluded: tuple[CheckpointName, ...] = ()
    skip: tuple[SkipWindow, ...] = ()


def policy_for(anomaly: Anomaly, numerics: Numerics) -> NumericsAction:
    """Return the spec's action for this kind of loss."""
    return numerics.on_nan if anomaly.problem == "nan" else numerics.on_spike


def answer(anomaly: Anomaly, numerics: Numerics, known: Known) -> LossDecision:
    """Decide to warn, to stop, to skip data or to roll back.

    A change that would only repeat the last one becomes a stop. A skip with weights that are not
    finite becomes a rollback, because training cannot continue with them.
    """
    policy = policy_for(anomaly, numerics)
    if policy == "warn":
        return LossDecision(action="warn", reason=f"{anomaly}; training continues")
    if policy == "stop":
        return _stop(f"{anomaly}; the policy is to stop", anomaly, known)
    if policy == "skip" and known.is_finite:
        return _skip(anomaly, numerics, known)
    futile = _why_futile(anomaly, numerics, known)
    if futile:
        return _stop(f"{anomaly}; no rollback: {futile}", anomaly, known)
    to, excluded = _split(known, _target(anomaly, numerics))
    began = to.step if to is not None else 0
    first = max(began + 1, anomaly.step - numerics.skip_steps // 2)
    window = SkipWindow(first, numerics.skip_steps)
    return LossDecision(
        action="rollback",
        reason=f"{anomaly}; roll back to {to or 'the beginning'}, and skip the data of "
        f"{counted(numerics.skip_steps, 'step')} from step {first} on",
        to=to,
        excluded=excluded,
        skip=(window,),
    )


def _skip(anomaly: Anomaly, numerics: Numerics, known: Known) -> LossDecision:
    if anomaly.step in known.skipped:
        # The step was trained again after a crash. The window recorded then is still in effect.
        return LossDecision(
            action="warn", reason=f"{anomaly}, as it was before; training continues"
        )
    changes = len(known.rolled_back) + len(known.skipped)
    if changes >= numerics.changes_max:
        return _stop(f"{anomaly}; no skip: {_too_many(changes, numerics)}", anomaly, known)
    first = max(known.reached, anomaly.step) + 1
    return LossDecision(
        action="skip",
        reason=f"{anomaly}; skip the data of {numerics.skip_steps} steps from step {first} on",
        skip=(SkipWindow(first, numerics.skip_steps),),
    )


def _too_many(changes: int, numerics: Numerics) -> str:
    return f"there were {changes} rollbacks and skips, and the limit is {numerics.changes_max}"


def _stop(reason: str, anomaly: Anomaly, known: Known) -> LossDecision:
    to, excluded = _split(known, anomaly.good_step - 1)
    return LossDecision(action="stop", reason=reason, to=to, excluded=excluded)


def _why_futile(anomaly: Anomaly, numerics: Numerics, known: Known) -> str:
    """Return why a rollback would not help, as text, or "" if it may."""
    before = known.rolled_back
    changes = len(before) + len(known.skipped)
    if changes >= numerics.changes_max:
        return _too_many(changes, numerics)
    reached = max(before, default=0)
    if before and anomaly.step <= reached + numerics.margin_steps:
        return f"the last one was for step {reached}, and other data did not help"
    limit = _target(anomaly, numerics)
    if known.has_deleted and not any(name.step <= limit for name in known.checkpoints):
        return (
            f"no checkpoint of step {limit} or earlier is left; keep more of them (checkpoint.keep)"
        )
    return ""


def _target(anomaly: Anomaly, numerics: Numerics) -> int:
    """Return the newest step to which a rollback may return."""
    return min(anomaly.step - 1 - numerics.margin_steps, anomaly.good_step - 1)


def _split(known: Known, limit: int) -> tuple[CheckpointName | None, tuple[CheckpointName, ...]]:
    """Return the newest checkpoint up to step `limit`, and all newer ones."""
    good = [name for name in known.checkpoints if name.step <= limit]
    newer = (n for n in (*known.checkpoints, *known.unfinished) if n.step > limit)
    return (good[-1] if good else None), tuple(newer)
