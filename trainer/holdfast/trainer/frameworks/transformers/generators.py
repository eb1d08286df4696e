"""Random generators that a loader or its samplers own, which no seed and no epoch resets.

Each pass over such a loader draws from where the pass before ended. So a resume within an epoch
needs the states at the epoch's start, to draw the same order again. A resume in a new epoch needs
the states at the end of the epoch before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import Sampler

from holdfast.trainer.state.objects import NumpyGenerator, TorchGenerator

# A sampler need not be a `Sampler`, but a loader has it under one of these names.
PARTS: Final = ("sampler", "batch_sampler", "batch_samplers", "generator", "synchronized_generator")

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
