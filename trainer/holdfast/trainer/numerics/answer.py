"""The decision about a bad loss: a pure function of the policy and of the run's files.

A loss is computed with the weights of the step before it. So a checkpoint of step c is proven
good when the loss of a step after c is good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.plain_text import counted
from holdfast.contracts.spec.sections import Numerics, NumericsAction
from holdfast.trainer.data.order import SkipWindow
from holdfast.trainer.numerics.detector import Anomaly


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
