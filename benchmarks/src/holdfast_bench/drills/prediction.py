"""Prediction of a run's ETTR from calibrated costs and a list of faults. Pure functions.

docs/goodput.md derives the formula. It uses no measurement from a run with faults, so a measured
ETTR can be compared with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
