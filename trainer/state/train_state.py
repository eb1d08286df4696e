"""What a checkpoint of a training program holds: tensors by name, and one JSON document.

Tensors (model, optimizer, random number generators, tensors of schedulers and of extras) go
through DCP under the keys `model.…`, `optimizer.…`, `rng.rank00000.…`, `scheduler.…` and
`extra.<name>.…`. Everything else is `train_state.json`. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.state import optimizers as flattened
from holdfast.trainer.state import rng
from holdfast.trainer.state.fit import FIT, Fit
from holdfast.trainer.state.names import (
    Named,
    Views,
    copy_unless_same,
    find_named,
    is_fsdp1,
    merge_disjoint,
)
from holdfast.trainer.state.objects import EXTRA, SCHEDULER, Objects, Stateful, is_excluded

__all__ = ["Progress", "Restored", "State", "Stateful", "TrainState", "listed"]

FORMAT: Final = 1
OPTIONS: Final = StateDictOptions(flatten_optimizer_state_dict=True)
MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
RNG: Final = "rng"

State = dict[str, Any]
T = TypeVar("T")


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
        models: nn.Module | Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Stateful] = (),
        extra: Mapping[str, Any] | None = None,
        *,
        rank: int,
        world_size: int,
        per_rank: Mapping[str, Any] | None = None,
        fit: Fit | None = None,
    ) -> None:
        """`models` are the parts of one model under the names that they have in the whole.

        `fit` is how a checkpoint that does not fit is taken over. Raises `CheckpointError` for
        what cannot be saved.
        """
        self._models = (models,) if isinstance(models, nn.Module) else tuple(models)
        self._optimizers = tuple(optimizers)
        self._flattened = [flattened.OptimizerState(each) for each in self._optimizers]
        self._objects = Objects(
            schedulers, extra or {}, per_rank or {}, rank=rank, world_size=world_size
        )
        self._rank, self._world_size = rank, world_size
        self._fit = fit or Fit()
        self._views = Views()
        self._stateless: set[int] = set()
        self._generators: dict[str, torch.Tensor] | None = None
        # FSDP1 turns flat parameters into named ones by collectives of its own.
        self._is_fsdp1 = any(is_fsdp1(model) for model in self._models)
        self._check(self._find())

    def fit_for(self, document: Mapping[str, Any]) -> Fit:
        """How the checkpoint of `document` is to be taken over."""
        left = self._objects.left_behind(document["objects"], self._fit.exclude)
        return self._fit.still_to_do(document).without(left)

    def capture(self, progress: Progress) -> tuple[State, dict[str, Any]]:
        """This rank's state now: what DCP saves, and the document (rank 0's is the one kept).

        The tensors share memory with the live ones. Raises `CheckpointError` when an extra holds
        something that could only be pickled.
        """
        generators = rng.capture()
        state = self._tensors() | {RNG: {_rank_key(self._rank): generators}}
        tensors, documents = self._objects.capture()
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
            FIT: self._fit.describe(),
            "objects": documents,
        }
        return state, document

    def template(
        self, document: Mapping[str, Any], metadata: Callable[[], Metadata] | None = None
    ) -> State:
        """A state with exactly the keys of the checkpoint that `document` belongs to.

        `metadata` reads that checkpoint's; it is asked only where its keys must be known. Raises
        `CheckpointError` for what cannot go on at this world size.
        """
        if document.get("format") != FORMAT:
            raise CheckpointError(
                f"train_state.json has format {document.get('format')!r}; this version of "
                f"Holdfast reads {FORMAT}"
            )
        state = self.tensors(metadata)
        saved_ranks = int(document["world_size"])
        # The states of ranks that are no more are read by rank 0 and left unused, so that the
        # keys of all ranks together are those of the checkpoint.
        mine = [self._rank] if self._rank < saved_ranks else []
        orphans = range(self._world_size, saved_ranks) if self._rank == 0 else range(0)
        for rank in (*mine, *orphans):
            kinds = rng.empty_like_saved(document["rng"])
            state.setdefault(RNG, {})[_rank_key(rank)] = kinds

        def shapes() -> dict[str, Sequence[int]]:
            return _shapes(metadata()) if metadata is not None else {}

        exclude = self.fit_for(document).exclude
        _put(state, self._objects.templates(document["objects"], shapes, exclude))
        return state

    def apply(self, state: State, document: Mapping[str, Any]) -> Restored:
        """Put a loaded `state` and its document back into the program's objects."""
        exclude = self.fit_for(document).exclude
        parts = self.put_back(state, exclude)
        saved = document["objects"]
        parts += self._objects.apply(saved, _flat_objects(state), exclude)
        own = state.get(RNG, {}).get(_rank_key(self._rank))
        if is_excluded(RNG, exclude):
            own = None
        if own is not None:
            rng.restore(own)
            parts.append(RNG)
        else:
            rng.reseed(int(document["seed"]), self._rank, int(document["step"]))
        self._generators = rng.capture()
        ours = set(self._objects)
        return Restored(
            parts=tuple(parts),
            missing=tuple(name for name in self._objects if name not in saved),
            unused=tuple(
                name for name in saved if name not in ours and not is_excluded(name, exclude)
            ),
            reseeded=own is None,
        )

    def tensors(self, metadata: Callable[[], Metadata] | None = None) -> State:
        """Model and optimizer state alone; `metadata` is as for `template`."""
        self._materialise_saved(metadata)
        return self._tensors()

    def weights(self) -> Iterable[torch.Tensor]:
        """Parameters and buffers of all models, as they are on this rank."""
        for model in self._models:
            yield from model.parameters()
            yield from model.buffers()

    def put_back(self, state: State, exclude: Collection[str] = ()) -> list[str]:
        """Put model and optimizer state back as `tensors` gave it; returns what was put back."""
        parts = []
        if not is_excluded(MODEL, exclude):
            self._apply_model(state[MODEL])
            parts.append(MODEL)
        if self._optimizers and not is_excluded(OPTIMIZER, exclude):
            self._apply_optimizers(state[OPTIMIZER])
            parts.append(OPTIMIZER)
        return parts

    def rewind_generators(self) -> None:
        """Put the random generators back to where `apply` left them; the first call alone does.

        What a program draws between a resume and its first step, as the iterator of a loader
        does, an uninterrupted run never drew there.
        """
        if self._generators is not None:
            rng.restore(self._generators)
            self._generators = None

    # --- model and optimizers -------------------------------------------------------------

    def _find(self) -> Named:
        """Names of all models together; raises `CheckpointError` on one that two of them have."""
        parts = [find_named(model) for model in self._models]
        if len(parts) == 1:
            return parts[0]
        return Named(
            merge_disjoint([part.tensors for part in parts]),
            {key: name for part in parts for key, name in part.parameters.items()},
            all(part.is_plain for part in parts),
        )

    def _check(self, named: Named) -> None:
        if not self._is_fsdp1:
            flattened.check_names(self._optimizers, named.parameters)
        by_torch = self._is_fsdp1 or not all(map(flattened.is_plain, self._optimizers))
        if by_torch and len(self._models) > 1 and self._optimizers:
            raise CheckpointError(
                "several models with FSDP1, or with an optimizer that has a state_dict of its "
                "own, are not supported; use fully_shard, or one model that holds them all"
            )

    def _tensors(self) -> State:
        """Model and optimizer state, with the optimizer's made where it does not exist yet."""
        for optimizer in self._optimizers:
            if id(optimizer) not in self._stateless:
                flattened.materialise(optimizer)
                if not optimizer.state:
                    self._stateless.add(id(optimizer))
        named = self._find()
        if named.is_plain:
            state: State = {MODEL: self._views.of(named.tensors)}
        else:
            state = {MODEL: merge_disjoint([get_model_state_dict(m) for m in self._models])}
        if self._optimizers:
            state[OPTIMIZER] = self._optimizer_tensors(named)
        return state

    def _optimizer_tensors(self, named: Named) -> State:
        if not self._is_fsdp1 and all(map(flattened.is_plain, self._optimizers)):
            found: State = {}
            try:
                for each in self._flattened:
                    found |= each.gather(named.parameters)
            except KeyError:
                # A parameter was replaced behind the optimizer's back; this says which.
                self._check(named)
                raise
            return found
        return get_optimizer_state_dict(self._models[0], self._optimizers, options=OPTIONS)

    def _materialise_saved(self, metadata: Callable[[], Metadata] | None) -> None:
        """State of frozen parameters that the checkpoint has: made, so that it is restored."""
        frozen = any(
            not p.requires_grad and not optimizer.state.get(p)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        )
        if frozen and metadata is not None and not self._is_fsdp1:
            names, saved = self._find().parameters, metadata().state_dict_metadata
            for optimizer in self._optimizers:
                flattened.materialise_saved(optimizer, names, saved)

    def _apply_model(self, loaded: State) -> None:
        named = self._find()
        if named.is_plain:
            for name, live in named.tensors.items():
                copy_unless_same(live, loaded[name])
            return
        for model in self._models:
            own = get_model_state_dict(model)
            set_model_state_dict(model, {name: loaded[name] for name in own})

    def _apply_optimizers(self, loaded: State) -> None:
        if not self._is_fsdp1 and all(map(flattened.is_plain, self._optimizers)):
            names = self._find().parameters
            for each in self._flattened:
                each.put_back(loaded, names)
            return
        set_optimizer_state_dict(self._models[0], self._optimizers, loaded, options=OPTIONS)


def listed(given: T | Sequence[T] | None) -> tuple[T, ...]:
    """One, several or none as a tuple."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _rank_key(rank: int) -> str:
    return f"rank{rank:05d}"


def _shapes(metadata: Metadata) -> dict[str, Sequence[int]]:
    entries = metadata.state_dict_metadata.items()
    return {key: e.size for key, e in entries if isinstance(e, TensorStorageMetadata)}


def _put(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Place tensors named `part.rest` where DCP's flattening gives them that name again."""
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        state.setdefault(part, {})[rest or "value"] = tensor


def _flat_objects(state: State) -> dict[str, torch.Tensor]:
    parts = (SCHEDULER, EXTRA)
    return {f"{part}.{key}": t for part in parts for key, t in state.get(part, {}).items()}
