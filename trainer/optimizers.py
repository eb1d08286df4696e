"""Optimizer state that does not exist yet, made so that every checkpoint has the same keys.

An optimizer fills a parameter's state at its first step with a gradient. A checkpoint taken
before that, or with untouched parameters, would lack keys that a later one has.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.optim import Optimizer

# What a step with a zero gradient leaves behind, and what it must be for an untouched parameter.
UNTOUCHED: Final = {"step": 0.0, "mu_product": 1.0}


def materialise(optimizer: Optimizer) -> int:
    """Give every trainable parameter without state the state of one that was never stepped.

    Takes one step with zero gradients and a learning rate of zero for those parameters alone,
    then sets their counters back. Parameters, gradients and other state stay as they are.
    Returns the number of parameters that gained a state: 0 when all had one, or when the
    optimizer keeps none.
    """
    groups = optimizer.param_groups
    every = [p for group in groups for p in group["params"]]
    lacking = [p for p in every if p.requires_grad and not optimizer.state.get(p)]
    if not lacking:
        return 0
    gradients = [p.grad for p in every]
    rates = [group.get("lr") for group in groups]
    wanted = {id(p) for p in lacking}
    try:
        for parameter in every:
            parameter.grad = torch.zeros_like(parameter) if id(parameter) in wanted else None
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
    gained = [p for p in lacking if optimizer.state.get(p)]
    for parameter in gained:
        _set_back(optimizer.state[parameter])
    return len(gained)


def _set_back(state: dict[str, Any]) -> None:
    for name, value in UNTOUCHED.items():
        if isinstance(state.get(name), torch.Tensor):
            state[name].fill_(value)
        elif name in state:
            state[name] = type(state[name])(value)
