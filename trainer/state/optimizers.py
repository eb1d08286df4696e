"""Optimizer state by the names of parameters, as stock DCP flattens it, gathered and put back.

An optimizer fills a parameter's state at its first step with a gradient. A checkpoint taken
before that, or with untouched parameters, would lack keys that a later one has: such state is
made here, and so is that of a frozen parameter which was trained when the checkpoint was saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, Final

import torch
from torch.optim import Optimizer

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.state.names import copy_unless_same

STATE: Final = "state"
GROUPS: Final = "param_groups"
# Not of a parameter: the list itself, and the names that the program gave, which know wrappers.
_NOT_OPTIONS: Final = frozenset({"params", "param_names"})
NAMES_SHOWN: Final = 5
# What a step with a zero gradient leaves behind, and what it must be for an untouched parameter.
UNTOUCHED: Final = {"step": 0.0, "mu_product": 1.0}


def is_plain(optimizer: Optimizer) -> bool:
    """True when the optimizer's own methods have no say in what is saved of it or loaded."""
    kind, own = type(optimizer), optimizer.__dict__
    hooks = (
        optimizer._optimizer_state_dict_pre_hooks,
        optimizer._optimizer_state_dict_post_hooks,
        optimizer._optimizer_load_state_dict_pre_hooks,
        optimizer._optimizer_load_state_dict_post_hooks,
    )
    return not any(hooks) and all(
        getattr(kind, name) is getattr(Optimizer, name) and name not in own
        for name in ("state_dict", "load_state_dict")
    )


def check_names(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
    """Raise `CheckpointError` unless each parameter is one of the model's and of one optimizer."""
    seen: set[int] = set()
    for optimizer in optimizers:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        strange = [p for p in every if id(p) not in names]
        if strange:
            shapes = ", ".join(str(tuple(p.shape)) for p in strange[:NAMES_SHOWN])
            raise CheckpointError(
                f"{type(optimizer).__name__} has {len(strange)} parameters that are not of the "
                f"model (shapes {shapes}); expected the model's own. Make the optimizer after the "
                "model is sharded, and give Session every module that it trains: "
                "model=[model, head]"
            )
        twice = sorted(names[id(p)] for p in every if id(p) in seen)
        if twice:
            raise CheckpointError(
                f"two optimizers have the parameters {', '.join(twice[:NAMES_SHOWN])}; expected "
                "each parameter in one of them"
            )
        seen.update(id(p) for p in every)


class OptimizerState:
    """The flattened state of one plain optimizer: `state.<name>.…`, `param_groups.<name>.…`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Keys of each group's options, and what they were made of.
        self._keys: dict[int, tuple[list[str], list[str], list[str]]] = {}

    def gather(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Tensors, the live ones, and numbers by key; `names` by the ids of parameters."""
        found: dict[str, Any] = {}
        state = self._optimizer.state
        for number, group in enumerate(self._optimizer.param_groups):
            owners = [names[id(p)] for p in group["params"]]
            for parameter, name in zip(group["params"], owners, strict=True):
                for key, value in state.get(parameter, {}).items():
                    if isinstance(value, dict):
                        found.update(_flatten(value, f"{STATE}.{name}.{key}"))
                    else:
                        found[f"{STATE}.{name}.{key}"] = value
            options = {k: v for k, v in group.items() if k not in _NOT_OPTIONS}
            found.update(
                zip(self._option_keys(number, owners, list(options)), cycle(options.values()))
            )
        return found

    def put_back(self, loaded: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Take over what `gather` would give; what is not in `loaded` stays as it is."""
        for key, holder, name in self._places(names):
            if key in loaded:
                value, live = loaded[key], holder[name]
                if isinstance(live, torch.Tensor):
                    copy_unless_same(live, value)
                else:
                    holder[name] = value

    def _option_keys(self, number: int, owners: list[str], options: list[str]) -> list[str]:
        """A key for each parameter and option of a group, made anew only when these changed."""
        kept = self._keys.get(number)
        if kept is None or kept[0] != owners or kept[1] != options:
            keys = [f"{GROUPS}.{name}.{option}" for name in owners for option in options]
            kept = self._keys[number] = owners, options, keys
        return kept[2]

    def _places(self, names: Mapping[int, str]) -> Iterator[tuple[str, dict[str, Any], str]]:
        """(key, mapping, name in it) of every value; an option stands under each parameter."""
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                name = names[id(parameter)]
                yield from _leaves(state.get(parameter, {}), f"{STATE}.{name}")
                for option in group:
                    if option not in _NOT_OPTIONS:
                        yield f"{GROUPS}.{name}.{option}", group, option


def materialise_saved(
    optimizer: Optimizer, names: Mapping[int, str], saved: Collection[str]
) -> None:
    """Make the state of frozen parameters which the keys `saved` say that they had.

    A parameter frozen now may have been trained: its program unfreezes it again later.
    """
    trained = {key.removeprefix(f"optimizer.{STATE}.").rpartition(".")[0] for key in saved}
    frozen = [
        p
        for group in optimizer.param_groups
        for p in group["params"]
        if not p.requires_grad and not optimizer.state.get(p) and names[id(p)] in trained
    ]
    _make(optimizer, frozen)


def materialise(optimizer: Optimizer) -> int:
    """Give every trainable parameter without state the state of one that was never stepped.

    Takes one step with zero gradients and a learning rate of zero for those parameters alone,
    then sets their counters back. Parameters, gradients and other state stay as they are.
    Returns the number of parameters that gained a state: 0 when all had one, or when the
    optimizer keeps none.
    """
    state = optimizer.state
    return _make(
        optimizer,
        [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad and not state.get(p)
        ],
    )


def _make(optimizer: Optimizer, lacking: Sequence[torch.Tensor]) -> int:
    if not lacking:
        return 0
    groups = optimizer.param_groups
    every = [p for group in groups for p in group["params"]]
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
    except TypeError as error:
        raise CheckpointError(
            f"{type(optimizer).__name__} cannot step without a closure, so the state that it will "
            "have cannot be made before training; expected an optimizer that steps from "
            f'gradients. Save this one whole: Session(model, extra={{"optimizer": optimizer}})'
        ) from error
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


def _flatten(values: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    """Nested mappings as one, the keys joined by dots, as stock DCP joins them."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found.update(_flatten(value, f"{prefix}.{key}"))
        else:
            found[f"{prefix}.{key}"] = value
    return found


def _leaves(values: dict[Any, Any], prefix: str) -> Iterator[tuple[str, dict[Any, Any], Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", values, key
