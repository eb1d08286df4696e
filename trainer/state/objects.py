"""Whatever else has a state: schedulers, scalers, averaged weights, loaders, generators.

Three forms, told apart in `train_state.json`. A *document* is plain data beside named tensors,
the same on all ranks. A *module*, such as an `AveragedModel`, is its tensors under canonical
names, sharded as they are. A *per-rank* object, such as a `StatefulDataLoader`, is one row of
bytes for each rank, which that rank alone saves and takes back: its key names the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from holdfast.contracts.errors import CheckpointError
from holdfast.trainer.state import plain
from holdfast.trainer.state.names import Named, Views, as_buffer, copy_unless_same, find_named

SCHEDULER: Final = "scheduler"
EXTRA: Final = "extra"
MODULE: Final = "module"
PER_RANK: Final = "per_rank"
ROW_BYTES_MIN: Final = 4096
_LENGTH_BYTES: Final = 8
# What these hold is one rank's share of the data, so it means nothing at another world size.
_OF_ONE_RANK: Final = "torchdata."
_ELASTIC: Final = (
    "Session.sampler gives a batch_sampler, and Session.distributed_sampler a sampler, whose order "
    "is the same at every number of ranks and needs no state"
)

Tensors = dict[str, torch.Tensor]
SavedShapes = Callable[[], Mapping[str, Sequence[int]]]


class Stateful(Protocol):
    """Anything with a state of its own; what `state_dict` returns must be plain or tensors."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


@dataclass(frozen=True)
class TorchGenerator:
    """A `torch.Generator` as an object with a state."""

    generator: torch.Generator

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        self.generator.set_state(state_dict["state"])


@dataclass(frozen=True)
class NumpyGenerator:
    """A `numpy.random.Generator` as an object with a state."""

    generator: np.random.Generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.generator.bit_generator.state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.generator.bit_generator.state = state_dict["state"]


def is_excluded(name: str, exclude: Collection[str]) -> bool:
    """True when `name`, or a part that it lies in, is to be left as it is."""
    return any(name == one or name.startswith(f"{one}.") for one in exclude)


def is_of_one_rank(thing: object) -> bool:
    """True for what holds one rank's own state: a generator, a loader or sampler of torchdata."""
    return isinstance(
        thing, (torch.Generator, np.random.Generator, TorchGenerator, NumpyGenerator)
    ) or any(kind.__module__.startswith(_OF_ONE_RANK) for kind in type(thing).__mro__)


class Objects:
    """The schedulers and extras of one rank, by the names that they have in a checkpoint."""

    def __init__(
        self,
        schedulers: Sequence[Stateful],
        extra: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """Raises `CheckpointError` on a name or an object that cannot be saved."""
        both = sorted(extra.keys() & per_rank.keys())
        wrong = [name for name in (*extra, *per_rank) if "." in name or not name]
        if wrong or both:
            raise CheckpointError(
                f"extra {wrong or both}: expected names without dots, each in extra or in per_rank"
            )
        self._rank, self._world_size = rank, world_size
        names = [SCHEDULER] if len(schedulers) == 1 else _numbered(SCHEDULER, len(schedulers))
        self._things: dict[str, Stateful] = dict(zip(names, schedulers, strict=True))
        self._alone: dict[str, Stateful] = {}
        for name, thing in {**extra, **per_rank}.items():
            alone = name in per_rank or is_of_one_rank(thing)
            (self._alone if alone else self._things)[f"{EXTRA}.{name}"] = _stateful(name, thing)
        self._views = Views()
        self._row_bytes: dict[str, int] = {}

    def __iter__(self) -> Any:
        return iter((*self._things, *self._alone))

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors by key and a document by name. Raises `CheckpointError` on what is not plain."""
        tensors: Tensors = {}
        documents: dict[str, Any] = {}
        for name, thing in self._things.items():
            module = _named_module(thing, name)
            if module is not None:
                documents[name] = {plain.MARK: MODULE}
                tensors |= self._views.of(module.tensors, module.buffers)
            else:
                documents[name], found = plain.encode(thing.state_dict(), name)
                # The document is one rank's, and so are the tensors that it names.
                tensors |= {
                    key: as_buffer(one) if type(one) is torch.Tensor else one
                    for key, one in found.items()
                }
        for name, thing in self._alone.items():
            kind = type(thing).__name__
            documents[name] = {plain.MARK: PER_RANK, "class": kind, "ranks": self._world_size}
            tensors[self._row_key(name)] = self._row(name, thing.state_dict())
        return tensors, documents

    def left_behind(self, documents: Mapping[str, Any], exclude: Collection[str]) -> list[str]:
        """Per-rank objects of another world size that `exclude` names, whatever was done before."""
        return [
            name
            for name, saved in documents.items()
            if _form(saved) == PER_RANK
            and saved["ranks"] != self._world_size
            and is_excluded(name, exclude)
        ]

    def templates(
        self, documents: Mapping[str, Any], shapes: SavedShapes, exclude: Collection[str]
    ) -> Tensors:
        """What to load into, by key, for the objects of a checkpoint; live tensors where it can.

        Raises `CheckpointError` for a per-rank object saved at another world size.
        """
        found: Tensors = {}
        for name, saved in self._kept(documents, exclude):
            thing, form = self._things.get(name), _form(saved)
            if form == PER_RANK:
                if name in self._alone:
                    self._check_ranks(name, saved)
                    key = self._row_key(name)
                    found[key] = torch.empty(list(shapes()[key]), dtype=torch.uint8)
            elif form == MODULE:
                if thing is not None:
                    module = self._module_of(name, thing)
                    found |= self._views.of(module.tensors, module.buffers)
            else:
                live = plain.encode(thing.state_dict(), name)[1] if thing else {}
                found |= plain.templates(saved, live)
        return found

    def apply(
        self,
        documents: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        exclude: Collection[str],
    ) -> tuple[str, ...]:
        """Put loaded `tensors` back into the objects; returns the names of those restored.

        An object that was saved empty, as a scaler that was off, is left as it was made.
        """
        restored = []
        for name, saved in self._kept(documents, exclude):
            form = _form(saved)
            if form == PER_RANK and name in self._alone:
                self._load(name, self._alone[name], _read_row(tensors[self._row_key(name)]))
            elif form == MODULE and name in self._things:
                for key, live in self._module_of(name, self._things[name]).tensors.items():
                    copy_unless_same(live, tensors[key])
            elif form is None and name in self._things and saved != {}:
                self._load(name, self._things[name], plain.decode(saved, tensors))
            else:
                continue
            restored.append(name)
        return tuple(restored)

    def _kept(
        self, documents: Mapping[str, Any], exclude: Collection[str]
    ) -> list[tuple[str, Any]]:
        return [(n, saved) for n, saved in documents.items() if not is_excluded(n, exclude)]

    def _load(self, name: str, thing: Stateful, state: Any) -> None:
        try:
            thing.load_state_dict(state)
        except Exception as error:
            raise CheckpointError(
                f"{name}: {type(thing).__name__}.load_state_dict refused what the checkpoint has: "
                f"{error}; mend it, or leave it out once with exclude=[{name!r}]"
            ) from error

    def _module_of(self, name: str, thing: Stateful) -> Named:
        found = _named_module(thing, name)
        if found is None:
            raise CheckpointError(
                f"{name}: saved as a module's tensors, but now it is a {type(thing).__name__}; "
                f"expected the same kind of object, or exclude=[{name!r}]"
            )
        return found

    def _check_ranks(self, name: str, saved: Mapping[str, Any]) -> None:
        if saved["ranks"] != self._world_size:
            raise CheckpointError(
                f"{name}: this {saved['class']} was saved by each of {saved['ranks']} ranks and "
                f"cannot go on at {self._world_size}: it holds one rank's share. {_ELASTIC}. Run "
                f"at {saved['ranks']} ranks, or begin it again once with exclude=[{name!r}]"
            )

    # --- rows of bytes --------------------------------------------------------------------

    def _row_key(self, name: str) -> str:
        return f"{name}.rank{self._rank:05d}"

    def _row(self, name: str, state: Any) -> torch.Tensor:
        """`state` as bytes, uint8, in a row that stays as long while they fit in.

        Rows of one length keep the checkpoint's layout, so saving needs no word to other ranks.
        """
        content = plain.to_bytes(state, name)
        needed = _LENGTH_BYTES + len(content)
        if needed > self._row_bytes.get(name, 0):
            self._row_bytes[name] = max(ROW_BYTES_MIN, 1 << (needed + needed // 4).bit_length())
        row = torch.zeros(self._row_bytes[name], dtype=torch.uint8)
        row[:needed] = torch.frombuffer(
            bytearray(len(content).to_bytes(_LENGTH_BYTES, "little") + content), dtype=torch.uint8
        )
        return row


def _read_row(row: torch.Tensor) -> Any:
    content = row.numpy().tobytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    return plain.from_bytes(content[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _named_module(thing: object, name: str) -> Named | None:
    """The tensors of a module that leaves saving to torch, by key; None for anything else."""
    if not isinstance(thing, nn.Module):
        return None
    found = find_named(thing)
    if not found.is_plain:
        return None
    tensors = {f"{name}.{key}": tensor for key, tensor in found.tensors.items()}
    return Named(tensors, {f"{name}.{key}" for key in found.buffers})


def _form(saved: Any) -> str | None:
    """MODULE, PER_RANK, or None for a document."""
    form = saved.get(plain.MARK) if isinstance(saved, dict) else None
    return form if form in (MODULE, PER_RANK) else None


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}.{number}" for number in range(count)]


def _stateful(name: str, thing: Any) -> Stateful:
    """`thing` with a state; raises `CheckpointError` that says what to give instead."""
    if isinstance(thing, torch.Generator):
        return TorchGenerator(thing)
    if isinstance(thing, np.random.Generator):
        return NumpyGenerator(thing)
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        stateful: Stateful = thing
        return stateful
    kind = type(thing).__name__
    instead = "give it state_dict and load_state_dict"
    if isinstance(thing, Sampler | DistributedSampler | DataLoader):
        instead = f"its place in the data would be lost. {_ELASTIC}"
    raise CheckpointError(f"extra {name!r}: a {kind} has no state to save; {instead}")
