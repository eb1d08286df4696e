"""What is to come of a bad loss: a pure function of the policy and of what disk knows.

A loss is computed with the weights of the step before it. So a checkpoint of step c is proven
once the loss of a step after c was good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.contracts.paths import CheckpointName
from holdfast.contracts.spec import Numerics, NumericsAction
from holdfast.trainer.data.order import SkipWindow
from holdfast.trainer.numerics.detector import Anomaly


@dataclass(frozen=True, kw_only=True)
class Known:
    """What disk knows of a run when a loss is bad.

    `checkpoints` are those of the current branch that are committed, oldest step first,
    `unfinished` those that are not and may yet be. `rolled_back` has the step of the loss of each
    rollback so far, `skipped` that of each skip. With `has_deleted` the oldest that there is need
    not be the first. Data has been drawn for the steps up to `reached`; `is_finite` says that no
    rank has weights that are not.
    """

    checkpoints: Sequence[CheckpointName]
    unfinished: Sequence[CheckpointName] = ()
    rolled_back: Sequence[int] = ()
    skipped: Sequence[int] = ()
    reached: int = 0
    is_finite: bool = True
    has_deleted: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """`excluded` are the checkpoints that nobody is to go on from, `to` the newest of the others
    (None: from the beginning), `skip` the data that is passed over."""

    action: NumericsAction
    reason: str
    to: CheckpointName | None = None
    excluded: tuple[CheckpointName, ...] = ()
    skip: tuple[SkipWindow, ...] = ()


def policy_for(anomaly: Anomaly, numerics: Numerics) -> NumericsAction:
    """What the spec says about such a loss."""
    return numerics.on_nan if anomaly.problem == "nan" else numerics.on_spike


def answer(anomaly: Anomaly, numerics: Numerics, known: Known) -> Answer:
    """Warn, stop, train on with later data, or go back.

    A change that would only repeat the last one is a stop, and a skip with weights that are not
    finite a rollback: nothing can be trained on with these.
    """
    policy = policy_for(anomaly, numerics)
    if policy == "warn":
        return Answer(action="warn", reason=f"{anomaly}; training goes on")
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
    return Answer(
        action="rollback",
        reason=f"{anomaly}; back to {to or 'the beginning'}, and from step {first} on the data of "
        f"{numerics.skip_steps} steps is passed over",
        to=to,
        excluded=excluded,
        skip=(window,),
    )


def _skip(anomaly: Anomaly, numerics: Numerics, known: Known) -> Answer:
    if anomaly.step in known.skipped:
        # Trained again after a crash: the window that was recorded then still stands.
        return Answer(action="warn", reason=f"{anomaly}, as it was before; training goes on")
    changes = len(known.rolled_back) + len(known.skipped)
    if changes >= numerics.changes_max:
        return _stop(f"{anomaly}; no skip: {_too_many(changes, numerics)}", anomaly, known)
    first = max(known.reached, anomaly.step) + 1
    return Answer(
        action="skip",
        reason=f"{anomaly}; from step {first} on the data of {numerics.skip_steps} steps is "
        "passed over",
        skip=(SkipWindow(first, numerics.skip_steps),),
    )


def _too_many(changes: int, numerics: Numerics) -> str:
    return f"{changes} rollbacks and skips, {numerics.changes_max} are granted"


def _stop(reason: str, anomaly: Anomaly, known: Known) -> Answer:
    to, excluded = _split(known, anomaly.good_step - 1)
    return Answer(action="stop", reason=reason, to=to, excluded=excluded)


def _why_futile(anomaly: Anomaly, numerics: Numerics, known: Known) -> str:
    """Why a rollback is not worth it, in words; empty when it is."""
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
            f"no checkpoint is left of step {limit} or before; keep more of them (checkpoint.keep)"
        )
    return ""


def _target(anomaly: Anomaly, numerics: Numerics) -> int:
    """The newest step that a rollback may go back to."""
    return min(anomaly.step - 1 - numerics.margin_steps, anomaly.good_step - 1)


def _split(known: Known, limit: int) -> tuple[CheckpointName | None, tuple[CheckpointName, ...]]:
    """The newest checkpoint of step `limit` or before, and all that are newer."""
    good = [name for name in known.checkpoints if name.step <= limit]
    newer = (n for n in (*known.checkpoints, *known.unfinished) if n.step > limit)
    return (good[-1] if good else None), tuple(newer)
