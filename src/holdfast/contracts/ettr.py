"""What share of its time a run will train, from calibrated costs and a list of faults. Pure.

docs/goodput.md derives the formula. Nothing measured under the faults goes into it, so that a
measured ETTR can be held against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of a run without faults, in seconds: a step, what a save holds it up, a commit after the
    last step, a start up to the load, a load."""

    step_s: float
    blocked_s: float
    flush_s: float
    start_s: float
    load_s: float


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An interruption. `wait_s` passes before its attempt's successor starts: queue and back-off.

    An announced one is met with a commit and loses nothing. Any other is noticed after
    `detection_s`, and training goes on from a state that is `interval_steps` steps old at most.
    """

    is_announced: bool
    interval_steps: int = 0
    detection_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Stall:
    """A fault that interrupts nothing: for `held_s` seconds no step goes on."""

    held_s: float


def predict_ettr(
    costs: Costs,
    faults: Iterable[Fault | Stall],
    *,
    steps: int,
    save_steps: int,
    queued_s: float = 0.0,
) -> float:
    """Productive over wall time of a run of `steps` steps that saves every `save_steps` of them.

    `queued_s` passes before the first start. Raises `ValueError` for a run without steps or
    saves.
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
    """Seconds that the end of an attempt costs, on average over the moments of a fault."""
    if fault.is_announced:
        return costs.blocked_s + costs.flush_s
    # It comes anywhere between two saved states: half of the interval is trained again.
    return fault.detection_s + fault.interval_steps / 2 * costs.step_s
