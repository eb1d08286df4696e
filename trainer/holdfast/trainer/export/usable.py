"""The state of a checkpoint in the form that `load_state_dict` takes in other programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import OBJ_PATH

from holdfast.trainer.planning.compare_keys import is_of_one_rank
from holdfast.trainer.state import plain
from holdfast.trainer.state.objects import MODULE, PER_RANK

OPTIMIZER: Final = "optimizer"
_STATE: Final = "optimizer.state."
_GROUPS: Final = "optimizer.param_groups."
_OF_GROUP: Final = frozenset({"params", "param_names"})


def make_optimizer(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the argument of `optimizer.load_state_dict`, or None if there are no groups.

    `values` has flattened keys. Parameters keep their order and are numbered. Consecutive
    parameters with equal options form one group, and `param_names` has their names.
    """
    options: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(_GROUPS):
            name, _, option = key.removeprefix(_GROUPS).rpartition(".")
            options.setdefault(name, {})[option] = value
    if not options:
        return None
    groups: list[dict[str, Any]] = []
    for number, (name, own) in enumerate(options.items()):
        known = groups[-1] if groups else {}
        if not _is_same(own, {k: v for k, v in known.items() if k not in _OF_GROUP}):
            groups.append({**own, "params": [], "param_names": []})
        groups[-1]["params"].append(number)
        groups[-1]["param_names"].append(name)
    numbers = {name: number for number, name in enumerate(options)}
    state: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        if key.startswith(_STATE):
            owner, rest = _split(key.removeprefix(_STATE), numbers)
            if owner is not None:
                state.setdefault(numbers[owner], {})[rest] = value
    return {"state": state, "param_groups": groups}


def make_objects(
    documents: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return schedulers and extras by name, as from `state_dict`, without per-rank objects.

    `documents` are those of the train state. `tensors` are all tensors that were read, by key.
    """
    made: dict[str, Any] = {}
    for name, document in documents.items():
        kind = document.get(plain.MARK) if isinstance(document, dict) else None
        if kind == MODULE:
            begin = f"{name}."
            value: Any = {
                k.removeprefix(begin): v for k, v in tensors.items() if k.startswith(begin)
            }
        elif kind == PER_RANK:
            continue
        else:
            value = _loadable(plain.decode(document, tensors))
        part, dot, rest = name.partition(".")
        if dot:
            made.setdefault(part, {})[rest] = value
        else:
            made[part] = value
    return made


def owned_by(key: str, documents: Iterable[str]) -> bool:
    """Return True for a tensor that belongs to one of the named objects."""
    return not is_of_one_rank(key) and any(key.startswith(f"{name}.") for name in documents)


def plain_values(documents: Mapping[str, Any]) -> dict[OBJ_PATH, Any]:
    """Return the values of schedulers and extras that are no tensors, by path as stock DCP has it.

    Tensors are entries of the checkpoint already.
    """
    others = {
        name: document
        for name, document in documents.items()
        if not (isinstance(document, dict) and document.get(plain.MARK) in {MODULE, PER_RANK})
    }
    made = make_objects(others, plain.templates(others))
    flat, paths = flatten_state_dict(made)
    return {paths[key]: v for key, v in flat.items() if not isinstance(v, torch.Tensor)}


def _loadable(value: Any) -> Any:
    """Return `value` with the types that `torch.load(weights_only=True)` and stock DCP accept.

    NumPy arrays become tensors, its numbers Python's, and other mappings plain dictionaries.
    """
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        pairs = {_loadable(key): _loadable(item) for key, item in value.items()}
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else pairs
    if type(value) in {list, tuple}:
        return type(value)(_loadable(item) for item in value)
    return value


def _is_same(one: Any, other: Any) -> bool:
    """Return True for equal options. A tensor prints four digits only, so `repr` is not enough."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return repr(one) == repr(other)


def _split(rest: str, names: Mapping[str, int]) -> tuple[str | None, str]:
    """Split into a parameter's name, which may contain dots, and the rest."""
    at = len(rest)
    while (at := rest.rfind(".", 0, at)) > 0:
        if rest[:at] in names:
            return rest[:at], rest[at + 1 :]
    return None, rest
