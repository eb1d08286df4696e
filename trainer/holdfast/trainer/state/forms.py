"""An optimizer's values by name, and the objects rebuilt from names and bytes.

A checkpoint has tensors and numbers by key. A *form* records what keys, sizes and types do not
show: that entries were a tuple or a deque, that a tensor is on the CPU beside a parameter on the
GPU, or that its placement differs from its parameter's. Forms are plain data in
`train_state.json`. The usual case needs no form, so most optimizers have none at all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from holdfast.contracts.errors import CheckpointError

Form = dict[str, Any]
Forms = dict[str, Form]
"""Forms by the path of their value."""

# The keys of a form. ADDED: a value that the optimizer's class would not have, so the program added
# it; AS: type of a container or NumPy value; OTHER: state of no parameter.
ADDED: Final = "added"
AS: Final = "as"
DOTTED: Final = "dotted"
LENGTH_MAX: Final = "maxlen"
ON: Final = "on"
OTHER: Final = "other"
PLACED: Final = "placed"
WHOLE, LOCAL = "whole", "local"
CPU, BESIDE = "cpu", "parameter"
_NUMBERS: Final = frozenset({bool, int, float, str, type(None)})
SIMPLE: Final = _NUMBERS | {torch.Tensor, torch.nn.Parameter, DTensor}
_SEQUENCES: Final[Mapping[type, str]] = {list: "list", tuple: "tuple", deque: "deque"}
STATE: Final = "state"
GROUPS: Final = "param_groups"


def spread(value: Any, path: str, found: dict[str, Any], forms: Forms | None = None) -> None:
    """Add the tensors and numbers in `value` to `found` by path, and their forms to `forms`.

    A list or tuple of numbers is one value, as in stock DCP. Raises `CheckpointError` on a mapping
    that could not be rebuilt, and for two values with the same path. Planning refuses other values
    that cannot be saved, on all ranks.
    """
    kind = type(value)
    if path in found:
        raise_twice(path)
    # The most frequent case, and the only one that needs no form.
    if kind in SIMPLE or isinstance(value, torch.Tensor):
        found[path] = value
    elif isinstance(value, dict):
        _note(forms, path, _form_of_mapping(value, path))
        for key, one in value.items():
            inner = f"{path}.{key}"
            if isinstance(key, str) and "." in key:
                _note(forms, inner, {DOTTED: True})
            spread(one, inner, found, forms)
    elif kind in _SEQUENCES:
        is_numbers = all(type(one) in _NUMBERS for one in value)
        # A deque of numbers is saved as a list, because DCP has no deques.
        if kind is deque or not is_numbers:
            more = {LENGTH_MAX: value.maxlen} if kind is deque else {}
            _note(forms, path, {AS: _SEQUENCES[kind], **more})
        if is_numbers:
            found[path] = list(value) if kind is deque else value
            return
        for number, one in enumerate(value):
            spread(one, f"{path}.{number}", found, forms)
    elif isinstance(value, np.generic):
        _note(forms, path, {AS: f"numpy.{value.dtype.name}"})
        found[path] = value.item()
    elif kind is np.ndarray:
        _note(forms, path, {AS: "array"})
        try:
            found[path] = torch.from_numpy(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path}: an array of {value.dtype} cannot be saved ({error}); expected numbers in "
                "the byte order of this machine. Let the optimizer keep a tensor"
            ) from error
    else:
        found[path] = value


def raise_twice(path: str) -> NoReturn:
    """Raise `CheckpointError` because two values have the name `path`."""
    raise CheckpointError(
        f"{path}: two values have this name when their keys are joined by dots; rename one of them"
    )


def assemble(leaves: Mapping[str, Any], forms: Mapping[str, Form]) -> dict[str, Any]:
    """Rebuild the value given to `spread` from its results, with paths relative to its path."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, last = _names_of(path, forms)
        node = tree
        # Paths were joined by dots, and some keys contain dots themselves.
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    for path, form in forms.items():
        if form.get(AS) == "empty":
            *parents, last = _names_of(path, forms)
            node = tree
            for name in parents:
                node = node.setdefault(name, {})
            node.setdefault(last, {})
    return {name: _made(value, name, forms) for name, value in tree.items()}


def view_of(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `value` as it is saved: a rank's part of a sharded parameter as a shard."""
    if not _is_local(value, parameter):
        return value
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def form_of(value: torch.Tensor, parameter: torch.Tensor, group: Mapping[str, Any]) -> Form:
    """Return what `blank` could not guess about a tensor in the state of `parameter`."""
    form: Form = {}
    if isinstance(value, DTensor):
        is_like = (
            isinstance(parameter, DTensor)
            and value.shape == parameter.shape
            and value.placements == parameter.placements
        )
        if not is_like:
            form[PLACED] = [_name_placement(one) for one in value.placements]
    elif _is_local(value, parameter):
        form[PLACED] = LOCAL
    elif value.shape == parameter.shape and isinstance(parameter, DTensor):
        form[PLACED] = WHOLE
    on = BESIDE if value.device.type == parameter.device.type else value.device.type
    if on != _usual_device(value.shape, parameter, group):
        form[ON] = on
    return form


def blank(
    entry: STORAGE_TYPES,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
    form: Form,
    was: torch.dtype | None = None,
) -> torch.Tensor | None:
    """Return a tensor to load `entry` into, as the optimizer of `parameter` would create it.

    Returns None for an entry that is a number. `was` is the saved parameter's type. State of that
    type gets the type of the new `parameter`.
    """
    if not isinstance(entry, TensorStorageMetadata):
        return None
    size, dtype, placed = entry.size, entry.properties.dtype, form.get(PLACED)
    on = form.get(ON) or _usual_device(size, parameter, group)
    # Moments of a parameter that is loaded in another precision follow the parameter. Counters are
    # scalars and keep their type.
    if len(size) > 0 and dtype == was:
        dtype = parameter.dtype
    if isinstance(placed, list):
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim != len(placed):
            raise CheckpointError(
                f"a tensor of the optimizer was saved with placements {placed}; expected a "
                "parameter on a mesh with that number of dimensions. Exclude the optimizer once "
                'with exclude=["optimizer"], or use a mesh like the one that saved it'
            )
        places = [Shard(int(one[1:])) if one[0] == "S" else Replicate() for one in placed]
        return empty_dtensor(
            *size, dtype=dtype, device_mesh=parameter.device_mesh, placements=places
        )
    device = parameter.device if on == BESIDE else torch.device(on)
    if size == parameter.shape and placed != WHOLE:
        return torch.empty_like(parameter.detach(), dtype=dtype, device=device)
    return torch.empty(size, dtype=dtype, device=device)


def _is_local(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True for a plain tensor with the size of this rank's part of a sharded parameter."""
    return (
        isinstance(parameter, DTensor)
        and not isinstance(value, DTensor)
        and value.dim() > 0
        and value.shape == parameter._local_tensor.shape
        and any(
            isinstance(one, Shard) and parameter.device_mesh.size(number) > 1
            for number, one in enumerate(parameter.placements)
        )
    )


def _usual_device(size: Sequence[int], parameter: torch.Tensor, group: Mapping[str, Any]) -> str:
    """Counters are on the CPU, unless the whole optimizer step runs on the device."""
    is_beside = len(size) > 0 or group.get("capturable") or group.get("fused")
    return BESIDE if is_beside or parameter.device.type == CPU else CPU


def _name_placement(placement: Any) -> str:
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    raise CheckpointError(
        f"a tensor of the optimizer has placements {placement} that differ from its parameter's; "
        "expected Shard or Replicate"
    )


def _form_of_mapping(value: Mapping[Any, Any], path: str) -> Form:
    """Return the form of a mapping's type and of keys that are not text."""
    kinds = {type(key) for key in value}
    if type(value) not in (dict, OrderedDict) or (not kinds <= {str} and kinds != {int}):
        raise CheckpointError(
            f"{path}: a {type(value).__name__} with keys of {sorted(k.__name__ for k in kinds)} "
            "cannot be rebuilt from a checkpoint; expected a dict whose keys are all text or all "
            "int. Give the optimizer a state_dict that returns one"
        )
    if not value:
        return {AS: "empty"}
    if kinds == {int}:
        return {AS: "numbered"}
    return {AS: "ordered"} if type(value) is OrderedDict else {}


def _note(forms: Forms | None, path: str, form: Form) -> None:
    if forms is not None and form:
        forms.setdefault(path, {}).update(form)


def _names_of(path: str, forms: Mapping[str, Form]) -> Iterator[str]:
    """Yield the keys that were joined to `path`. Some keys may contain dots themselves."""
    parts, at = path.split("."), 0
    while at < len(parts):
        ends = (
            end
            for end in range(len(parts), at + 1, -1)
            if forms.get(".".join(parts[:end]), {}).get(DOTTED)
        )
        end = next(ends, at + 1)
        yield ".".join(parts[at:end])
        at = end


def _made(value: Any, path: str, forms: Mapping[str, Form]) -> Any:
    form = forms.get(path, {})
    kind = form.get(AS, "")
    if form.get(PLACED) == LOCAL and isinstance(value, DTensor):
        return value._local_tensor
    if kind.startswith("numpy."):
        return np.dtype(kind.removeprefix("numpy.")).type(value)
    if kind == "array" and isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        inner = {name: _made(one, f"{path}.{name}", forms) for name, one in value.items()}
        if kind == "numbered":
            return {int(name): one for name, one in inner.items()}
        if kind not in _SEQUENCES.values():
            return OrderedDict(inner) if kind == "ordered" else inner
        value = [inner[name] for name in sorted(inner, key=int)]
    if kind == "deque":
        return deque(value, form[LENGTH_MAX])
    return tuple(value) if kind == "tuple" else value


@dataclass
class SavedPart:
    """The entries and forms of one parameter, or of another name, in a checkpoint, by path.

    `was` is the parameter's type in the checkpoint.
    """

    was: torch.dtype | None = None
    entries: dict[str, STORAGE_TYPES] = field(default_factory=dict)
    forms: Forms = field(default_factory=dict)


@dataclass
class SavedOptimizer:
    """A checkpoint's optimizer state, by the names that the program knows.

    `others` are state entries of no parameter, mapped to the number of their optimizer.
    `knows_forms` is False for a stock DCP checkpoint, which has no forms.
    """

    knows_forms: bool = False
    empty_groups: Mapping[str, Any] = field(default_factory=dict)
    state: dict[str, SavedPart] = field(default_factory=dict)
    options: dict[str, SavedPart] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, entries: Mapping[str, STORAGE_TYPES], forms: Forms | None, known: Collection[str]
    ) -> SavedOptimizer:
        """Build it from entries and forms by key (`state.…`, `param_groups.…`) of `known` names."""
        saved = cls(knows_forms=forms is not None)
        forms = forms or {}
        # First, because the keys of such entries have no parameter's name to end at.
        for key, form in forms.items():
            if OTHER in form:
                saved.others[key.partition(".")[2]] = form[OTHER]
        for key, entry in entries.items():
            if found := saved._place(key, known):
                found[0].entries[found[1]] = entry
        for key, form in forms.items():
            if found := saved._place(key, known):
                found[0].forms[found[1]] = form
        return saved

    def _place(self, key: str, known: Collection[str]) -> tuple[SavedPart, str] | None:
        kind, _, rest = key.partition(".")
        parts = {STATE: self.state, GROUPS: self.options}.get(kind)
        if parts is None:
            return None
        name, path = rest, ""
        # From the longest name down: names of parameters and paths both contain dots.
        while name:
            if name in known or (kind == STATE and name in self.others):
                return parts.setdefault(name, SavedPart()), path
            name, _, last = name.rpartition(".")
            path = f"{last}.{path}" if path else last
        return None
