"""Random generators that a loader's parts own, which no seed and no epoch resets.

Each pass over a sampler draws from where the pass before ended. So a resume within an epoch needs
the states at the epoch's start, to draw the same order again. A resume in a new epoch needs the
states at the end of the epoch before. Each fetch draws from the generators of the dataset and of
the collator, so these are like the generators of the process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Sampler

from holdfast.trainer.state.objects import NumpyGenerator, TorchGenerator

# A sampler need not be a `Sampler`, but a loader has it under one of these names.
PARTS: Final = ("sampler", "batch_sampler", "batch_samplers", "generator", "synchronized_generator")

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

States = dict[str, Any]


class LoaderGenerators:
    """The generators of one rank's loader: their states now, and at the start of the epoch."""

    def __init__(self) -> None:
        self._loader: Any = None
        self._begin: States = {}
        # What a resume must set when the loader begins.
        self._again: States | None = None

    def watch(self, loader: Any) -> None:
        """Watch the generators of `loader` from now on."""
        self._loader = loader

    def begin_epoch(self) -> None:
        """Forget a resume: it concerned the epoch before, whose loader did not begin."""
        self._again = None

    def state_dict(self) -> dict[str, States]:
        return {"begin": self._begin, "now": self._states()}

    def resume(self, saved: Mapping[str, States], *, is_same_epoch: bool) -> None:
        """Set the saved states, and those of the epoch's start when the loader begins."""
        self._set(saved["now"])
        self._begin = saved["begin"]
        self._again = saved["begin"] if is_same_epoch else None

    def begin(self) -> None:
        """Called before the loader begins an epoch."""
        if self._again is not None:
            self._set(self._again)
            self._again = None
        self._begin = self._states()

    def _states(self) -> States:
        return {path: item.state_dict() for path, item in _generators(self._loader)}

    def _set(self, states: States) -> None:
        for path, item in _generators(self._loader):
            if path in states:
                item.load_state_dict(states[path])


def _generators(loader: Any) -> Iterator[tuple[str, TorchGenerator | NumpyGenerator]]:
    """Yield each generator of a loader with the attributes that lead to it."""
    found = [(name, getattr(loader, name, None)) for name in PARTS]
    seen: set[int] = set()
    while found:
        path, item = found.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Generator):
            yield path, TorchGenerator(item)
        elif isinstance(item, np.random.Generator):
            yield path, NumpyGenerator(item)
        elif isinstance(item, list | tuple):
            found += [(f"{path}.{i}", each) for i, each in enumerate(item) if _is_sampler(each)]
        else:
            found += [(f"{path}.{n}", each) for n, each in _attributes(item) if _is_part(n, each)]


def _attributes(item: Any) -> list[tuple[str, Any]]:
    return list(getattr(item, "__dict__", {}).items())


def _is_sampler(item: Any) -> bool:
    return isinstance(item, Sampler)


def _is_part(name: str, item: Any) -> bool:
    return name in PARTS or isinstance(item, torch.Generator | np.random.Generator | Sampler)


class DataGenerators:
    """The generators that one rank's datasets and collators have as attributes."""

    def __init__(self) -> None:
        self._owners: list[tuple[str, Any]] = []

    def watch(self, loader: Any) -> None:
        """Watch the generators below `loader` from now on, also those that are made later."""
        self._owners = list(_data_of(loader))

    def state_dict(self) -> States:
        return as_saved(self.note())

    def note(self) -> States:
        """Return the states for `as_saved`, which converts them to tensors."""
        found = {}
        for path, owner in self._owners:
            for name, item in _attributes(owner):
                if isinstance(item, tuple(KINDS.values())) and (kind := _kind_of(item)):
                    found[f"{path}.{name}"] = {"kind": kind, "state": _read(item)}
        return found

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Set the saved states. A generator that is not made yet is made."""
        owners = dict(self._owners)
        for place, saved in states.items():
            path, _, name = place.rpartition(".")
            owner = owners.get(path)
            if owner is None:
                continue
            item, kind = getattr(owner, name, None), saved["kind"]
            if item is None:
                item = _make(kind, saved["state"])
                setattr(owner, name, item)
            if isinstance(item, KINDS[kind]):
                _write(item, saved["state"])


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
            found += [(f"{path}.{n}", each) for n, each in _attributes(item) if n in WRAPPED]
        elif path.endswith(f".{JOINED}"):
            # Other lists are datasets themselves, and may be long.
            found += [(f"{path}.{i}", each) for i, each in enumerate(item)]


def _kind_of(item: Any) -> str | None:
    """Return the name of a generator's kind, or None if it has no state."""
    if isinstance(item, random.SystemRandom):
        return None
    return next(name for name, kind in KINDS.items() if isinstance(item, kind))


def _make(kind: str, state: Any) -> Any:
    if kind == "numpy":
        return np.random.Generator(getattr(np.random, state["bit_generator"])())
    make: Callable[[], Any] = KINDS[kind]
    return make()


def _read(item: Any) -> Any:
    """Return a generator's state as it gives it."""
    if isinstance(item, torch.Generator):
        return item.get_state()
    if isinstance(item, np.random.Generator):
        return item.bit_generator.state
    if isinstance(item, np.random.RandomState):
        return item.get_state(legacy=False)
    return item.getstate()


def as_saved(noted: States) -> States:
    """Return the states of `DataGenerators.note` as a checkpoint can have them."""
    saved = dict(noted)
    for place, each in noted.items():
        if each["kind"] == "python":
            version, words, gauss = each["state"]
            saved[place] = {**each, "state": [version, torch.tensor(words), gauss]}
    return saved


def _write(item: Any, state: Any) -> None:
    """Set a generator to a state that `as_saved` or `_read` returned."""
    if isinstance(item, torch.Generator):
        item.set_state(state)
    elif isinstance(item, np.random.Generator):
        item.bit_generator.state = state
    elif isinstance(item, np.random.RandomState):
        item.set_state(state)
    else:
        version, words, gauss = state
        item.setstate(
            (version, words if isinstance(words, tuple) else tuple(words.tolist()), gauss)
        )
