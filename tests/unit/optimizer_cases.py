"""Optimizers to train with and without a session: all of torch's, and some like third parties'."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

WIDTH = 3
# Values of options that differ from what they are by default, tried one at a time.
CHANGED: dict[str, Any] = {
    "lr": lambda: torch.tensor(0.05),
    "weight_decay": 0.1,
    "momentum": 0.9,
    "dampening": 0.3,
    "nesterov": True,
    "amsgrad": True,
    "maximize": True,
    "foreach": True,
    "fused": True,
    "capturable": True,
    "differentiable": True,
    "centered": True,
    "decoupled_weight_decay": True,
    "betas": (0.8, 0.95),
    "eps": 1e-4,
    "rho": 0.8,
    "alpha": 0.9,
    "lambd": 0.01,
    "t0": 2.0,
    "etas": (0.4, 1.3),
    "step_sizes": (1e-5, 0.1),
    "lr_decay": 0.1,
    "initial_accumulator_value": 0.2,
    "momentum_decay": 0.01,
    "beta2_decay": -0.7,
    "d": 1.5,
    "max_iter": 3,
    "max_eval": 4,
    "tolerance_grad": 1e-9,
    "tolerance_change": 1e-11,
    "history_size": 2,
    "line_search_fn": "strong_wolfe",
    "ns_coefficients": (3.4, -4.7, 2.0),
    "ns_steps": 3,
    "adjust_lr_fn": "match_rms_adamw",
}
# Options that need another option to have an effect or to be accepted.
OF_CLASS: dict[tuple[str, str], Any] = {
    ("Adafactor", "eps"): (1e-9, 1e-2),
}
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("SGD", "dampening"): {"momentum": 0.9},
    ("SGD", "nesterov"): {"momentum": 0.9},
    ("ASGD", "alpha"): {"t0": 1.0},
    # With its default learning rate of 1, it climbs to infinity in torch 2.15.
    ("LBFGS", "maximize"): {"lr": 1e-3},
}
COMBINED: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True},
        {"momentum": 0.9, "weight_decay": 0.1, "fused": True},
    ],
    "Adam": [
        {"amsgrad": True, "weight_decay": 0.1, "fused": True},
        {"amsgrad": True, "weight_decay": 0.1, "foreach": True, "maximize": True},
    ],
    "RMSprop": [{"momentum": 0.5, "centered": True, "weight_decay": 0.1}],
    "NAdam": [{"weight_decay": 0.1, "decoupled_weight_decay": True}],
}


@dataclass(frozen=True)
class Case:
    """One net, and how its optimizer is made; `name` has no dots."""

    name: str
    make: Callable[[nn.Module], Optimizer]
    is_sparse: bool = False
    needs_2d: bool = False


def torch_classes() -> list[type[Optimizer]]:
    """Every optimizer that `torch.optim` offers."""
    found = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    return [kind for kind in found if issubclass(kind, Optimizer) and kind is not Optimizer]


def torch_cases() -> Iterator[Case]:
    """Each class with each of its options changed; `KeyError` for an option with no other value."""
    for kind in torch_classes():
        options: list[dict[str, Any]] = [{}, *COMBINED.get(kind.__name__, [])]
        for option in list(inspect.signature(kind).parameters)[1:]:
            value = OF_CLASS.get((kind.__name__, option), CHANGED[option])
            more = WITH.get((kind.__name__, option), {})
            options.append({**more, option: value})
        for given in options:
            yield torch_case(kind, given)


def torch_case(kind: type[Optimizer], options: dict[str, Any]) -> Case:
    said = "_".join(f"{k}_{v}" for k, v in options.items() if not callable(v))
    name = re.sub(r"\W", "_", f"{kind.__name__}_{said or '_'.join(options)}")

    def make(net: nn.Module) -> Optimizer:
        given = {k: v() if callable(v) else v for k, v in options.items()}
        trained = [p for p in net.parameters() if p.requires_grad]
        if kind is torch.optim.LBFGS:
            return kind(trained, **given)
        given.setdefault("lr", 0.02)
        groups = [{"params": trained[:1]}, {"params": trained[1:]}] if len(trained) > 1 else trained
        if isinstance(groups[0], dict) and not isinstance(given["lr"], torch.Tensor):
            groups[0]["lr"] = given["lr"] / 2
        return kind(groups, **given)

    return Case(name, make, kind is torch.optim.SparseAdam, kind is torch.optim.Muon)


class Net(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        if case.is_sparse:
            self.inner: nn.Module = nn.Embedding(6, WIDTH, sparse=True)
        else:
            bias = not case.needs_2d
            first, second = nn.Linear(WIDTH, 4, bias=bias), nn.Linear(4, 2, bias=bias)
            self.inner = nn.Sequential(first, nn.Tanh(), second)
            self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, step: int) -> torch.Tensor:
        drawn = torch.Generator().manual_seed(step)
        if isinstance(self.inner, nn.Embedding):
            found = self.inner(torch.randint(0, 6, (4,), generator=drawn))
            return torch.as_tensor(found).square().sum()
        given = self.frozen(torch.randn(4, WIDTH, generator=drawn))
        return torch.as_tensor(self.inner(given)).square().mean()


def train_step(net: nn.Module, optimizer: Optimizer, step: int) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = net(step)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        return
    closure()
    optimizer.step()


def is_runnable(case: Case) -> bool:
    """True when plain torch trains it here: `capturable` needs an accelerator."""
    torch.manual_seed(0)
    net = Net(case)
    try:
        optimizer = case.make(net)
        train_step(net, optimizer, 1)
    except (RuntimeError, AssertionError, ValueError):
        return False
    return True


# --- like those of third parties ---------------------------------------------------------------


class Hoarder(Optimizer):
    """Its first step creates state of many types."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": np.float64(0.05), "scale": np.float32(0.7), "notes": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            group["notes"] = [*group["notes"], group["seen"] * 1.5]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {
                        "step": 0,
                        "name.with.dots": torch.ones(2),
                        "past": deque(maxlen=3),
                        "losses": deque([0.5], maxlen=2),
                        "nested": OrderedDict(m=torch.zeros_like(p), empty={}),
                        "levels": {0: torch.zeros(1), 7: torch.zeros(1)},
                        "pair": (torch.zeros_like(p), 0),
                        "array": np.zeros(3),
                        "scalar": np.float32(1.0),
                        "nothing": None,
                        "word": "begun",
                        "flag": True,
                        "old": torch.zeros_like(p, dtype=torch.float64),
                    }
                state["step"] += 1
                state["past"].append(p.grad.clone())
                state["losses"].append(float(p.grad.sum()))
                state["nested"]["m"].lerp_(p.grad, 0.1)
                state["levels"][7] += p.grad.sum()
                state["pair"][0].add_(p.grad)
                state["pair"] = (state["pair"][0], state["pair"][1] + 1)
                state["array"] += float(p.grad.mean())
                state["scalar"] = np.float32(state["scalar"] * group["scale"])
                state["word"] += "."
                state["old"].add_(p.grad.double(), alpha=0.5)
                state["name.with.dots"].mul_(0.9)
                assert isinstance(state["past"], deque)
                assert state["past"].maxlen == 3
                assert isinstance(group["scale"], np.float32)
                past = torch.stack(list(state["past"])).mean(0)
                factor = float(state["scalar"]) + state["array"][0] + sum(state["losses"])
                change = past + state["nested"]["m"] + state["pair"][0] * 0.1 + state["old"].float()
                change = change * (factor + float(state["levels"][7]) + len(group["notes"]))
                p.add_(change * state["name.with.dots"][0], alpha=-float(group["lr"]) * 0.01)


class Eager(Optimizer):
    """Creates its state in the constructor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"m": torch.full_like(p, 0.1), "all": [torch.ones_like(p), 3]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["m"].mul_(0.9).add_(p.grad)
                state["all"][0].add_(p.grad.abs())
                state["all"][1] += 1
                p.sub_(state["m"] / state["all"][0] / state["all"][1], alpha=group["lr"])


class Noisy(Optimizer):
    """Draws random numbers, more of them where it has no state yet; decays without a gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["bias"] = torch.randn_like(p)
                p.mul_(0.99).add_(torch.randn_like(p) + self.state[p]["bias"], alpha=0.01)


class Shared(Optimizer):
    """Keeps state that all parameters share, under its own names."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        own = state["for all"]
        own.setdefault("steps", 0)
        own.setdefault("norm", torch.zeros(()))
        own["steps"] += 1
        state["best.norm"] = torch.tensor(0.5) + own["norm"]
        for group in self.param_groups:
            for p in group["params"]:
                own["norm"] += p.grad.norm()
                p.sub_(
                    p.grad / (own["norm"] + own["steps"] + state["best.norm"]), alpha=group["lr"]
                )


class CustomStateDict(torch.optim.Adam):
    """Overrides `state_dict`: it stores the doubled first moments."""

    def state_dict(self) -> dict[str, Any]:
        said = super().state_dict()
        said["state"] = {
            number: {**values, "exp_avg": values["exp_avg"] * 2}
            for number, values in said["state"].items()
        }
        return said

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for values in self.state.values():
            values["exp_avg"] = values["exp_avg"] / 2


class Wrapper(Optimizer):
    """Delegates to another optimizer without calling the base constructor, as Accelerate's does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def hooked(net: nn.Module) -> Optimizer:
    optimizer = torch.optim.Adam(trained(net), lr=0.02, weight_decay=0.1)
    optimizer.register_state_dict_post_hook(lambda its, said: None)
    return optimizer


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


THIRD_PARTY = [
    Case("hoarder", lambda net: Hoarder(trained(net))),
    Case("eager", lambda net: Eager(trained(net))),
    Case("noisy", lambda net: Noisy(trained(net))),
    Case("shared", lambda net: Shared(trained(net))),
    Case("custom_state_dict", lambda net: CustomStateDict(trained(net), lr=0.02, weight_decay=0.1)),
    Case("wrapped", lambda net: Wrapper(torch.optim.Adam(trained(net), weight_decay=0.1))),
    Case("hooked", hooked),
]
