"""What a checkpoint of a training program holds: tensors by name, and one JSON document.

Tensors (model, optimizer, random number generators, tensors of the scheduler and of extras) go
through DCP under the keys `model.…`, `optimizer.…`, `rng.rank00000.…`, `scheduler.…` and
`extra.<name>.…`. Everything else is `train_state.json`. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer import plain, rng
from holdfast.trainer.optimizers import materialise

FORMAT: Final = 1
OPTIONS: Final = StateDictOptions(flatten_optimizer_state_dict=True)
SCHEDULER: Final = "scheduler"
EXTRA: Final = "extra"

State = dict[str, Any]


class Stateful(Protocol):
    """Anything with a state of its own; what `state_dict` returns must be plain or tensors."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where training stands: the plain part of a checkpoint that the session itself keeps."""

    step: int
    seed: int
    epoch: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `TrainState.apply` put back; `missing` and `unused` are in words for people."""

    parts: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    reseeded: bool = False


class TrainState:
    """Gathers and puts back the state of one program on one rank."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        scheduler: Stateful | None,
        extra: Mapping[str, Stateful],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._model = model
        self._optimizers = tuple(optimizers)
        # The scheduler is one more object with a state, under a name of its own.
        self._objects: dict[str, Stateful] = {f"{EXTRA}.{name}": o for name, o in extra.items()}
        if scheduler is not None:
            self._objects = {SCHEDULER: scheduler, **self._objects}
        self._rank = rank
        self._world_size = world_size
        self._stateless: set[int] = set()
        wrong = [name for name in extra if "." in name or not name]
        if wrong:
            raise CheckpointError(f"extra {wrong}: expected names without dots")

    def capture(self, progress: Progress) -> tuple[State, dict[str, Any]]:
        """This rank's state now: what DCP saves, and the document (rank 0's is the one kept).

        The tensors are the live ones, not copies. Raises `CheckpointError` when an extra holds
        something that could only be pickled.
        """
        generators = rng.capture()
        state = self._tensors() | {"rng": {_rank_key(self._rank): generators}}
        documents: dict[str, Any] = {}
        for name, thing in self._objects.items():
            documents[name], tensors = plain.encode(thing.state_dict(), name)
            _put(state, tensors)
        document = {
            "format": FORMAT,
            "step": progress.step,
            "seed": progress.seed,
            "epoch": progress.epoch,
            "data": progress.data,
            "best": progress.best,
            "world_size": self._world_size,
            "rng": sorted(generators),
            "objects": documents,
        }
        return state, document

    def template(self, document: Mapping[str, Any]) -> State:
        """A state with exactly the keys of the checkpoint that `document` belongs to."""
        if document.get("format") != FORMAT:
            raise CheckpointError(
                f"train_state.json has format {document.get('format')!r}; this version of "
                f"Holdfast reads {FORMAT}"
            )
        state = self._tensors()
        saved_ranks = int(document["world_size"])
        # The states of ranks that are no more are read by rank 0 and left unused, so that the
        # keys of all ranks together are those of the checkpoint.
        mine = [self._rank] if self._rank < saved_ranks else []
        orphans = range(self._world_size, saved_ranks) if self._rank == 0 else range(0)
        for rank in (*mine, *orphans):
            kinds = rng.empty_like_saved(document["rng"])
            state.setdefault("rng", {})[_rank_key(rank)] = kinds
        for name, saved in document["objects"].items():
            thing = self._objects.get(name)
            live = plain.encode(thing.state_dict(), name)[1] if thing else {}
            _put(state, plain.templates(saved, live))
        return state

    def apply(self, state: State, document: Mapping[str, Any]) -> Restored:
        """Put a loaded `state` and its document back into the program's objects."""
        set_model_state_dict(self._model, state["model"])
        parts = ["model"]
        if self._optimizers:
            optimizer_state = state["optimizer"]
            set_optimizer_state_dict(
                self._model, self._optimizers, optimizer_state, options=OPTIONS
            )
            parts.append("optimizer")
        tensors = _flat_objects(state)
        objects = document["objects"]
        for name, saved in objects.items():
            if name in self._objects:
                self._objects[name].load_state_dict(plain.decode(saved, tensors))
                parts.append(name)
        own = state.get("rng", {}).get(_rank_key(self._rank))
        if own is not None:
            rng.restore(own)
            parts.append("rng")
        else:
            rng.reseed(int(document["seed"]), self._rank, int(document["step"]))
        return Restored(
            parts=tuple(parts),
            missing=tuple(name for name in self._objects if name not in objects),
            unused=tuple(name for name in objects if name not in self._objects),
            reseeded=own is None,
        )

    def _tensors(self) -> State:
        """Model and optimizer state, with the optimizer's made where it does not exist yet."""
        for optimizer in self._optimizers:
            if id(optimizer) not in self._stateless:
                materialise(optimizer)
                if not optimizer.state:
                    self._stateless.add(id(optimizer))
        state: State = {"model": get_model_state_dict(self._model)}
        if self._optimizers:
            state["optimizer"] = get_optimizer_state_dict(
                self._model, self._optimizers, options=OPTIONS
            )
        return state


def _rank_key(rank: int) -> str:
    return f"rank{rank:05d}"


def _put(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Place tensors named `part.rest` where DCP's flattening gives them that name again."""
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        state.setdefault(part, {})[rest or "value"] = tensor


def _flat_objects(state: State) -> dict[str, torch.Tensor]:
    parts = (SCHEDULER, EXTRA)
    return {f"{part}.{key}": t for part in parts for key, t in state.get(part, {}).items()}
