"""Attributes of a trainer's subclass that a resume restores, such as the sums of its next log.

A `transformers.Trainer` has its sums since the last log in attributes, and subclasses add more.
Those of known libraries are listed here. A class names its own in `kept_attributes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from holdfast.contracts.errors import SpecError
from holdfast.contracts.node.reporting import report

# By the library of the subclass: attributes with the same value on all ranks.
SHARED: Final = {"trl": ("_total_train_tokens", "entropy_coef", "_last_world_entropy")}
# By the library of the subclass: attributes of one rank.
OF_RANK: Final = {
    "trl": (
        *("_metrics", "_logs", "_textual_logs", "_pending_extra_logs", "_pending_metrics"),
        # Completions that are used for several steps, and the place in them.
        *("_step", "_buffered_inputs", "_entropy_window_stats"),
        # GOLD and online DPO.
        *("_on_policy_loss_total", "_off_policy_loss_total"),
        *("_on_policy_step_equiv", "_off_policy_step_equiv"),
        *("_matched_sum", "_unmatched_sum", "_matched_step_eq", "_unmatched_step_eq", "stats"),
    ),
    "sentence_transformers": ("accum_loss_components",),
}
REFERENCE: Final = "ref_model"
NAMES: Final = "kept_attributes"
# Marks a tensor that was on the trainer's device and not on the CPU.
ON_DEVICE: Final = "holdfast.on_device"
PLAIN: Final = (bool, int, float, str, bytes, np.generic, np.ndarray)


def check_names(trainer: Any) -> None:
    """Raise `SpecError` if a class names an attribute that its trainer lacks."""
    for name, owner in _own_names(trainer).items():
        if not hasattr(trainer, name):
            raise SpecError(
                f"{owner}.{NAMES} names {name!r}, and the trainer has no such attribute; expected "
                "names of attributes. Set it in __init__, or remove the name"
            )


class KeptAttributes:
    """The attributes of a trainer that a checkpoint keeps, in two parts.

    `shared` are the same on all ranks. `of_rank` differ, and a resume at another number of ranks
    lacks them.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._unsaved: set[str] = set()

    def shared(self) -> dict[str, Any]:
        return self._state(_known_names(self._trainer, SHARED))

    def of_rank(self) -> dict[str, Any]:
        """Raises `SpecError` if an attribute that a class names is not plain data or tensors."""
        own = {
            name: as_plain(getattr(self._trainer, name), name) for name in _own_names(self._trainer)
        }
        return self._state(_known_names(self._trainer, OF_RANK)) | own

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put saved attributes back. Containers that exist stay the same objects."""
        for name, value in saved.items():
            live = getattr(self._trainer, name, None)
            setattr(self._trainer, name, restored(live, value, self._trainer.args.device))

    def _state(self, names: Iterator[str]) -> dict[str, Any]:
        found = {}
        for name in names:
            try:
                found[name] = as_plain(getattr(self._trainer, name), name)
            except SpecError as error:
                if name not in self._unsaved:
                    report(f"holdfast: {error}. A resume begins without this attribute")
                self._unsaved.add(name)
        return found


def changing_modules(trainer: Any) -> dict[str, nn.Module]:
    """Return the modules beside the model that training changes, by name in a checkpoint.

    TRL moves a reference model towards the model with `sync_ref_model`.
    """
    reference = getattr(trainer, REFERENCE, None)
    is_synced = getattr(trainer.args, "sync_ref_model", False)
    return {REFERENCE: reference} if is_synced and isinstance(reference, nn.Module) else {}


def as_plain(value: Any, name: str) -> Any:
    """Return a copy of `value` that a checkpoint can have. Raises `SpecError` for another kind."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.device.type == "cpu" else {ON_DEVICE: value.detach()}
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, Mapping):
        return {key: as_plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        items = [as_plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise SpecError(
        f"the trainer's attribute {name} is a {type(value).__name__}; expected numbers, text, "
        "tensors, and lists, tuples and dictionaries of them. Keep such a value, or remove the "
        f"name from {NAMES}"
    )


def restored(live: Any, saved: Any, device: torch.device) -> Any:
    """Return `saved` in the containers of `live`, which may have kinds that no checkpoint has."""
    if isinstance(saved, Mapping):
        if saved.keys() == {ON_DEVICE}:
            return saved[ON_DEVICE].to(device)
        if not isinstance(live, MutableMapping):
            return {key: restored(None, item, device) for key, item in saved.items()}
        for key in live.keys() - saved.keys():
            del live[key]
        for key, item in saved.items():
            # The factory of a `defaultdict` makes the container of a key that is not there yet.
            is_known = key in live or getattr(live, "default_factory", None) is not None
            live[key] = restored(live[key] if is_known else None, item, device)
        return live
    if isinstance(live, deque) and isinstance(saved, list):
        live.clear()
        live.extend(restored(None, item, device) for item in saved)
        return live
    if isinstance(saved, list | tuple):
        return type(saved)(restored(None, item, device) for item in saved)
    return saved


def _known_names(trainer: Any, known: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield the attributes in `known` that the trainer has, of the libraries of its classes."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(trainer).__mro__}
    for library in sorted(libraries & known.keys()):
        yield from (name for name in known[library] if hasattr(trainer, name))


def _own_names(trainer: Any) -> dict[str, str]:
    """Return the names that the trainer's classes give, each with its class.

    Every class counts: `Trainer` in front of a subclass would otherwise hide the subclass's names.
    """
    found: dict[str, str] = {}
    for kind in type(trainer).__mro__:
        names = vars(kind).get(NAMES, ())
        if isinstance(names, str):
            raise SpecError(
                f"{kind.__name__}.{NAMES} = {names!r}: expected a tuple of names of attributes"
            )
        found |= dict.fromkeys(names, kind.__name__)
    return found
