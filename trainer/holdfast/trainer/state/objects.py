"""Other objects with a state: schedulers, scalers, averaged weights, loaders, generators.

`train_state.json` distinguishes four forms. A *document* is plain data beside named tensors, the
same on all ranks. A *module*, such as an `AveragedModel`, is its tensors under canonical names,
sharded as they are. A *per-rank* object, such as a `StatefulDataLoader`, is one row of bytes for
each rank. Only that rank saves and restores the row, and the row's key contains the rank. A
*stream* has such rows too, which another number of ranks reads together.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from holdfast.contracts.errors import CheckpointError
from holdfast.contracts.plain_text import counted
from holdfast.contracts.records.topology import FIXED
from holdfast.trainer.data.sampler import is_of_grain
from holdfast.trainer.process import devices
from holdfast.trainer.state import plain, torchdata_loaders
from holdfast.trainer.state.names import Named, Views, as_buffer, copy_unless_same, find_named
from holdfast.trainer.state.run_state import ElasticRows, SavedRows
from holdfast.trainer.state.torchdata_loaders import (
    check_kept_workers,
    check_stream_of_datasets,
    prepare_workers,
)

SCHEDULER: Final = "scheduler"
EXTRA: Final = "extra"
MODULE: Final = "module"
PER_RANK: Final = "per_rank"
STREAM: Final = "stream"
ROW_BYTES_MIN: Final = 4096
_LENGTH_BYTES: Final = 8
# A loader may lie anywhere in an object that saves it. More parts than these are data.
PARTS_MAX: Final = 10_000
# The state of these classes is one rank's share of the data, so it is invalid at other world sizes.
_OF_ONE_RANK: Final = ("torchdata.", "grain.")
_ELASTIC: Final = (
    "Session.sampler gives a batch_sampler, and Session.distributed_sampler a sampler, whose order "
    "is the same at every number of ranks and needs no state"
)

Tensors = dict[str, torch.Tensor]
SavedShapes = Callable[[], Mapping[str, Sequence[int]]]


class Stateful(Protocol):
    """An object with a state. `state_dict` must return plain data or tensors."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class RankLimited(ABC):
    """An object of an adapter that knows which numbers of ranks can continue its state."""

    @abstractmethod
    def rank_limits(self) -> dict[str, Any]:
        """Return the limits by the keys of `contracts.topology.LIMITS`. Empty if there are none."""


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


@dataclass(frozen=True)
class GrainIterator:
    """An iterator of the package `grain` as an object with a state, which is a dict or JSON."""

    iterator: Any

    def state_dict(self) -> dict[str, Any]:
        # An iterator may continue to change what it returned.
        return {"state": copy.deepcopy(self.iterator.get_state())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.iterator.set_state(state_dict["state"])


def is_excluded(name: str, exclude: Collection[str]) -> bool:
    """Return True if `name`, or a part that contains it, is excluded."""
    return any(name == one or name.startswith(f"{one}.") for one in exclude)


def is_of_one_rank(item: object) -> bool:
    """Return True for an object with per-rank state: a generator, or a torchdata loader/sampler."""
    return isinstance(
        item, (torch.Generator, np.random.Generator, TorchGenerator, NumpyGenerator)
    ) or any(kind.__module__.startswith(_OF_ONE_RANK) for kind in type(item).__mro__)


class Objects:
    """The schedulers and extras of one rank, by their names in a checkpoint."""

    def __init__(
        self,
        schedulers: Sequence[Stateful],
        extra: Mapping[str, Any],
        per_rank: Mapping[str, Any],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        """Raises `CheckpointError` if a name is invalid or an object cannot be saved."""
        both = sorted(extra.keys() & per_rank.keys())
        wrong = [name for name in (*extra, *per_rank) if "." in name or not name]
        if wrong or both:
            raise CheckpointError(
                f"extra {wrong or both}: expected names without dots, each only in extra or in "
                "per_rank"
            )
        self._rank, self._world_size = rank, world_size
        numbered = [f"{SCHEDULER}.{number}" for number in range(len(schedulers))]
        names = [SCHEDULER] if len(schedulers) == 1 else numbered
        self._shared: dict[str, Stateful] = dict(zip(names, schedulers, strict=True))
        self._alone: dict[str, Stateful] = {}
        for name, item in {**extra, **per_rank}.items():
            alone = name in per_rank or is_of_one_rank(item)
            (self._alone if alone else self._shared)[f"{EXTRA}.{name}"] = _stateful(name, item)
        # Those that the program has made since, and those of the checkpoint that it has not made.
        self._elastic: dict[str, ElasticRows] = {}
        self._saved_rows: dict[str, SavedRows] = {}
        self._views = Views()
        self._row_bytes: dict[str, int] = {}
        self._modules_at_first = set(self.module_names())

    def __iter__(self) -> Any:
        return iter((*self._shared, *self._alone, *self._saved_rows))

    def saves(self, item: object) -> bool:
        """Return whether `item` is one of the objects, or a part of one, such as an attribute."""
        return _holds((*self._shared.values(), *self._alone.values()), item)

    def add_rows(self, name: str, item: ElasticRows) -> SavedRows | None:
        """Save `item` from now on. Return what the checkpoint has of it, or None.

        Raises `CheckpointError` if the name is in use.
        """
        key = f"{EXTRA}.{name}"
        if not name or "." in name or key in {*self._shared, *self._alone, *self._elastic}:
            raise CheckpointError(
                f"name={name!r}: expected a name without dots that no other stream and no object "
                "of extra or per_rank has"
            )
        self._elastic[key] = item
        return self._saved_rows.pop(key, None)

    def forgotten_rows(self) -> list[str]:
        """Return the names of the checkpoint's streams that the program has not made."""
        return [key.removeprefix(f"{EXTRA}.") for key in self._saved_rows]

    def capture(self) -> tuple[Tensors, dict[str, Any]]:
        """Return tensors by key and documents by name. Raises `CheckpointError` if not plain."""
        tensors: Tensors = {}
        documents: dict[str, Any] = {}
        for name, item in self._shared.items():
            module = _named_module(item, name)
            if module is not None:
                documents[name] = {plain.MARK: MODULE}
                tensors |= self._views.of(module.tensors, module.buffers)
            else:
                documents[name], found = plain.encode(item.state_dict(), name)
                # The document comes from one rank, and so do the tensors that it names.
                tensors |= {
                    key: as_buffer(one) if type(one) is torch.Tensor else one
                    for key, one in found.items()
                }
        for name, item in self._alone.items():
            kind = type(item).__name__
            # The number of ranks is recorded, because another number cannot use the rows.
            documents[name] = {plain.MARK: PER_RANK, "class": kind, "ranks": self._world_size}
            tensors[self._row_key(name, self._rank)] = self._row(
                name, torchdata_loaders.state_of(item)
            )
        for name, rows in self._elastic.items():
            documents[name] = {
                plain.MARK: STREAM,
                "ranks": self._world_size,
                "facts": rows.facts(),
            }
            tensors[self._row_key(name, self._rank)] = self._row(name, rows.state_dict())
        return tensors, documents

    def module_tensors(self) -> Tensors:
        """Return the tensors of modules by key. A load puts them into these very modules."""
        found: Tensors = {}
        for name, item in self._shared.items():
            module = _named_module(item, name)
            if module is not None:
                found |= self._views.of(module.tensors, module.buffers)
        return found

    def module_names(self) -> list[str]:
        return [n for n, item in self._shared.items() if _named_module(item, n) is not None]

    def find_changed_forms(self, exclude: Collection[str]) -> list[str]:
        """Return lines about objects that a new launch would not take for modules."""
        return [
            f"{name}: its {type(self._shared[name]).__name__} had its own state when the Session "
            "was made, and is now saved as a module's tensors"
            for name in self.module_names()
            if name not in self._modules_at_first and not is_excluded(name, exclude)
        ]

    def rank_limits(self, exclude: Collection[str]) -> dict[str, Any]:
        """Return which numbers of ranks can continue this program's objects.

        `RankLimited` objects know it. A per-rank object fixes the number, unless it is left out at
        another one, see `left_behind`.
        """
        found: dict[str, Any] = {}
        kept = [
            f"{name} ({type(item).__name__})"
            for name, item in self._alone.items()
            if not is_excluded(name, exclude) and not getattr(item, "is_of_one_size", False)
        ]
        if kept:
            found[FIXED] = (
                f"{', '.join(kept)} has a state of each rank's own. A program that excludes it "
                "(exclude=['extra.…']) begins it afresh at another number of ranks"
            )
        for item in self._shared.values():
            if isinstance(item, RankLimited):
                found |= item.rank_limits()
        return found

    def left_behind(self, documents: Mapping[str, Any], exclude: Collection[str]) -> list[str]:
        """Return per-rank objects of another world size that are not restored.

        `exclude` names them, or their attribute `is_of_one_size` says that they matter only at the
        world size at which they were saved.
        """
        return [
            name
            for name, saved in documents.items()
            if _form(saved) == PER_RANK
            and saved["ranks"] != self._world_size
            and (
                is_excluded(name, exclude)
                or getattr(self._alone.get(name), "is_of_one_size", False)
            )
        ]

    def templates(
        self, documents: Mapping[str, Any], shapes: SavedShapes, exclude: Collection[str]
    ) -> Tensors:
        """Return tensors to load a checkpoint's objects into, by key, live ones if possible.

        Raises `CheckpointError` for a per-rank object that was saved at another world size.
        """
        found: Tensors = {}
        for name, saved in self._kept(documents, exclude):
            item, form = self._shared.get(name), _form(saved)
            if form == PER_RANK:
                if name in self._alone:
                    self._check_ranks(name, saved)
                    found |= _empty_rows([self._row_key(name, self._rank)], shapes)
            elif form == STREAM:
                found |= _empty_rows(self._keys_of_rows(name, saved), shapes)
            elif form == MODULE:
                if item is not None:
                    module = self._module_of(name, item)
                    found |= self._views.of(module.tensors, module.buffers)
            else:
                live = plain.encode(item.state_dict(), name) if item is not None else None
                found |= plain.templates(saved, live)
        return found

    def apply(
        self,
        documents: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        exclude: Collection[str],
        if_needed: Collection[str] = (),
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Put loaded `tensors` back into the objects.

        Returns the names of restored objects, and lines about objects in `if_needed` that refused
        their state. An object whose saved state is empty, such as a disabled scaler, stays as it
        is.
        """
        restored, refused = [], []
        self._saved_rows.clear()
        for name, saved in self._kept(documents, exclude):
            form = _form(saved)
            try:
                if form == PER_RANK and name in self._alone:
                    row = tensors[self._row_key(name, self._rank)]
                    self._load(name, self._alone[name], _read_row(row))
                elif form == STREAM:
                    keys = self._keys_of_rows(name, saved)
                    rows = [_read_row(tensors[key]) for key in keys]
                    self._saved_rows[name] = SavedRows(dict(saved["facts"]), rows)
                elif form == MODULE and name in self._shared:
                    for key, live in self._module_of(name, self._shared[name]).tensors.items():
                        copy_unless_same(live, tensors[key])
                elif form is None and name in self._shared and saved != {}:
                    self._load(name, self._shared[name], plain.decode(saved, tensors))
                else:
                    continue
            except CheckpointError as error:
                if not is_excluded(name, if_needed):
                    raise
                refused.append(f"{error}")
                continue
            restored.append(name)
        return tuple(restored), tuple(refused)

    def _kept(
        self, documents: Mapping[str, Any], exclude: Collection[str]
    ) -> list[tuple[str, Any]]:
        return [(n, saved) for n, saved in documents.items() if not is_excluded(n, exclude)]

    def _load(self, name: str, item: Stateful, state: Any) -> None:
        try:
            item.load_state_dict(torchdata_loaders.place_of(item, state))
        except Exception as error:
            raise CheckpointError(
                f"{name}: {type(item).__name__}.load_state_dict refused the checkpoint's state: "
                f"{error}; fix it, or exclude the object once with exclude=[{name!r}]"
            ) from error

    def _module_of(self, name: str, item: Stateful) -> Named:
        found = _named_module(item, name)
        if found is None:
            raise CheckpointError(
                f"{name}: saved as a module's tensors, but now it is a {type(item).__name__}; "
                f"expected the same kind of object, or exclude=[{name!r}]"
            )
        return found

    def _check_ranks(self, name: str, saved: Mapping[str, Any]) -> None:
        if saved["ranks"] != self._world_size:
            raise CheckpointError(
                f"{name}: this {saved['class']} was saved by each of {saved['ranks']} ranks and "
                f"cannot continue at {self._world_size}: it contains one rank's share. {_ELASTIC}. "
                f"Run at {counted(saved['ranks'], 'rank')}, or start it afresh once with "
                f"exclude=[{name!r}]"
            )

    # --- rows of bytes --------------------------------------------------------------------

    def _row_key(self, name: str, rank: int) -> str:
        return f"{name}.rank{rank:05d}"

    def _keys_of_rows(self, name: str, saved: Mapping[str, Any]) -> list[str]:
        """Return the keys of a stream's rows that this rank reads: its own at the same size."""
        ranks = range(self._rank, int(saved["ranks"]), self._world_size)
        return [self._row_key(name, rank) for rank in ranks]

    def _row(self, name: str, state: Any) -> torch.Tensor:
        """Return `state` as a uint8 row of bytes, whose length grows only when needed.

        Rows of constant length keep the checkpoint's layout, so a save needs no communication.
        """
        content = plain.to_bytes(state, name)
        needed = _LENGTH_BYTES + len(content)
        if needed > self._row_bytes.get(name, 0):
            # A quarter more, rounded up to a power of two: a state that grows slowly keeps the
            # plan.
            self._row_bytes[name] = max(ROW_BYTES_MIN, 1 << (needed + needed // 4).bit_length())
        row = torch.zeros(self._row_bytes[name], dtype=torch.uint8, device=devices.CPU)
        row[:needed] = torch.frombuffer(
            bytearray(len(content).to_bytes(_LENGTH_BYTES, "little") + content), dtype=torch.uint8
        )
        return row


def _empty_rows(keys: Sequence[str], shapes: SavedShapes) -> Tensors:
    """Return tensors to load the rows of these keys into."""
    return {
        key: torch.empty(list(shapes()[key]), dtype=torch.uint8, device=devices.CPU) for key in keys
    }


def _read_row(row: torch.Tensor) -> Any:
    content = row.numpy().tobytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    return plain.from_bytes(content[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _named_module(item: object, name: str) -> Named | None:
    """Return a module's tensors by key, or None for other objects and for custom `state_dict`."""
    if not isinstance(item, nn.Module):
        return None
    found = find_named(item)
    if not found.is_plain:
        return None
    tensors = {f"{name}.{key}": tensor for key, tensor in found.tensors.items()}
    return Named(tensors, {f"{name}.{key}" for key in found.buffers})


def _form(saved: Any) -> str | None:
    """Return MODULE, PER_RANK, STREAM, or None for a document."""
    form = saved.get(plain.MARK) if isinstance(saved, dict) else None
    return form if form in (MODULE, PER_RANK, STREAM) else None


def _stateful(name: str, item: Any) -> Stateful:
    """Return `item` as an object with a state. Raises `CheckpointError` if it has none."""
    if isinstance(item, torch.Generator):
        return TorchGenerator(item)
    if isinstance(item, np.random.Generator):
        return NumpyGenerator(item)
    if is_of_grain(item):
        return _grain_iterator(name, item)
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        torchdata_loaders.check_samplers(name, item)
        if is_of_one_rank(item):
            check_kept_workers(item)
            check_stream_of_datasets(item)
            prepare_workers(item)
        stateful: Stateful = item
        return stateful
    kind = type(item).__name__
    instead = "give it state_dict and load_state_dict"
    if isinstance(item, Sampler | DistributedSampler | DataLoader):
        instead = f"its position in the data would be lost. {_ELASTIC}"
    raise CheckpointError(f"extra {name!r}: a {kind} has no state to save; {instead}")


def _grain_iterator(name: str, item: Any) -> GrainIterator:
    """Return an iterator with its state. Raises `CheckpointError` for what makes iterators."""
    if not (hasattr(item, "get_state") and hasattr(item, "set_state")):
        raise CheckpointError(
            f"extra {name!r}: a {type(item).__name__} of grain has no place in the data, only its "
            f"iterator has one; read batches = iter(...) yourself, and pass it as "
            f"per_rank={{{name!r}: batches}}"
        )
    return GrainIterator(item)


def _holds(owners: Sequence[Any], item: object) -> bool:
    """Look for `item` among the owners and their parts, the nearest first."""
    found, seen = list(owners), set(map(id, owners))
    for owner in found:
        if owner is item:
            return True
        parts = owner if isinstance(owner, list | tuple | dict) else getattr(owner, "__dict__", {})
        for part in parts.values() if isinstance(parts, dict) else parts:
            if len(found) >= PARTS_MAX:
                break
            if id(part) not in seen:
                seen.add(id(part))
                found.append(part)
    return False
