"""Random generators that the datasets and the collator of a loader own.

Each fetch draws from them, as from the generators of the process. An example is the collator for
masked words with a seed. Workers of a loader have copies, which their own process uses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

# Where datasets and collators have others that they wrap.
JOINED: Final = "datasets"
WRAPPED: Final = ("dataset", JOINED, "collate_fn", "data_collator")
# Generators with a state, by the name of their kind in a checkpoint.
KINDS: Final[dict[str, type[Any]]] = {
    "torch": torch.Generator,
    "numpy": np.random.Generator,
    "numpy_legacy": np.random.RandomState,
    "python": random.Random,
}
# The first fetches of a pass, at which generators may be new: a collator makes its own at the first
# batch.
FIRST_FETCHES: Final = 2

States = dict[str, Any]


class DataGenerators:
    """The generators that one rank's datasets and collators have as attributes.

    `is_idle` is true while `before_fetch` would return an empty dictionary.
    """

    is_idle = False

    def __init__(self) -> None:
        self._owners: dict[str, Any] = {}
        # The places of the generators that were found: owner and attribute.
        self._found: dict[str, tuple[Any, str]] = {}
        self._fetches = 0

    def watch(self, *loaders: Any) -> None:
        """Watch the generators below `loaders` from now on."""
        self._owners = {
            f"{number}.{path}": owner
            for number, loader in enumerate(loaders)
            for path, owner in _data_of(loader)
        }
        self.begin_pass()

    def begin_pass(self) -> None:
        """Called before a pass over a loader begins, when the program may have made generators."""
        self._fetches, self.is_idle = 0, False

    def before_fetch(self) -> States:
        """Return the states before a fetch. Only a pass's first fetches look for new generators."""
        if self._fetches < FIRST_FETCHES:
            self._fetches += 1
            return self.state_dict()
        self.is_idle = not self._found
        return self._read_found()

    def state_dict(self) -> States:
        self._found = {
            f"{path}.{name}": (owner, name)
            for path, owner in self._owners.items()
            for name, item in attributes_of(owner)
            if _kind_of(item)
        }
        return self._read_found()

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Set the saved states. A generator that is not made yet is made."""
        for place, saved in states.items():
            path, _, name = place.rpartition(".")
            owner = self._owners.get(path)
            if owner is None:
                continue
            item = getattr(owner, name, None)
            if item is None:
                item = _make(saved["kind"], saved["state"])
                setattr(owner, name, item)
            if _kind_of(item) == saved["kind"]:
                _write(item, saved["state"])

    def _read_found(self) -> States:
        states = {}
        for place, (owner, name) in self._found.items():
            item = getattr(owner, name, None)
            if kind := _kind_of(item):
                states[place] = {"kind": kind, "state": _read(item)}
        return states


def owners_of(loader: Any) -> list[Any]:
    """Return each dataset and collator of a loader, and those that they wrap."""
    return [owner for _, owner in _data_of(loader)]


def _data_of(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield each dataset and collator of a loader with the attributes that lead to it."""
    found = [(name, getattr(loader, name, None)) for name in WRAPPED]
    seen: set[int] = set()
    while found:
        path, item = found.pop(0)
        # A collator may be a method of an object that has the generator.
        item = getattr(item, "__self__", item)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if not isinstance(item, list | tuple):
            yield path, item
            found += [(f"{path}.{n}", each) for n, each in attributes_of(item) if n in WRAPPED]
        elif path.endswith(f".{JOINED}"):
            # Other lists are datasets themselves, and may be long.
            found += [(f"{path}.{i}", each) for i, each in enumerate(item)]


def attributes_of(item: Any) -> list[tuple[str, Any]]:
    return list(getattr(item, "__dict__", {}).items())


def _kind_of(item: Any) -> str | None:
    """Return the name of a generator's kind. None for one without a state, and for other things."""
    if isinstance(item, random.SystemRandom):
        return None
    return next((name for name, kind in KINDS.items() if isinstance(item, kind)), None)


def _make(kind: str, state: Any) -> Any:
    if kind == "numpy":
        return np.random.Generator(getattr(np.random, state["bit_generator"])())
    make: Callable[[], Any] = KINDS[kind]
    return make()


def _read(item: Any) -> Any:
    """Return a generator's state as plain data and tensors."""
    if isinstance(item, torch.Generator):
        return item.get_state()
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    if isinstance(item, np.random.RandomState):
        return item.get_state(legacy=False)
    return item.getstate()


def _write(item: Any, state: Any) -> None:
    if isinstance(item, torch.Generator):
        item.set_state(state)
    elif isinstance(item, np.random.Generator):
        item.bit_generator.state = state
    elif isinstance(item, np.random.RandomState):
        item.set_state(state)
    else:
        version, words, gauss = state
        item.setstate((version, tuple(words), gauss))
