"""What a session needs of the state of a program, whatever saves and restores that state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, Protocol

import torch

# In `train_state.json`: the framework that wrote the files. Absent for files of DCP.
FRAMEWORK: Final = "framework"
# In `program` of the train state: see `not_restored`, the complete steps of the current epoch, and
# the last losses of rank 0, see `numerics`.
PROGRAM: Final = "program"
MADE_WITH: Final = "made_with"
STEPS_IN_EPOCH: Final = "steps_in_epoch"
LOSSES: Final = "losses"

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """Training progress: the plain data of a checkpoint that belongs to the session itself.

    `in_epoch` is True if a loop over epochs has begun `epoch` and has not completed its end.
    `program` has the keys below.
    """

    step: int
    seed: int
    epoch: int = 0
    in_epoch: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)

    def as_document(self) -> dict[str, Any]:
        """Return the keys of `train_state.json` for it."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The result of `TrainState.apply`. `missing`, `unused` and `refused` are names to report."""

    parts: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    reseeded: bool = False


class ElasticRows(Protocol):
    """An object whose rows any number of ranks can continue together, such as a stream."""

    def facts(self) -> dict[str, Any]:
        """Return plain data that is the same on all ranks."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state as plain data."""
        ...


class SavedRows(NamedTuple):
    """The saved `facts` of an `ElasticRows`, and the rows that this rank has read.

    The ranks have read all rows together. At the same size, each has read its own.
    """

    facts: dict[str, Any]
    rows: list[dict[str, Any]]


class Streams(Protocol):
    """Saves and restores objects that a program makes after its checkpoint was loaded."""

    def add_rows(self, name: str, item: ElasticRows) -> SavedRows | None:
        """Save `item` from now on. Return what the checkpoint has of it, or None."""
        ...

    def forgotten_rows(self) -> list[str]:
        """Return the names of the checkpoint's streams that the program has not made."""
        ...


class ProgramState(Protocol):
    """The state of one program on one rank."""

    @property
    def awaits_first_step(self) -> bool:
        """True while the program's first step will create state, so that no save can be planned."""
        ...

    def capture(self, progress: TrainingProgress) -> tuple[State, dict[str, Any]]:
        """Return this rank's current state, and the document, which rank 0 saves."""
        ...

    def rewind_generators(self, *, is_last: bool) -> list[str]:
        """Restore the random generators as resumed: see `rng.ResumedGenerators.rewind`."""
        ...

    def rewind_seeds(self) -> None:
        """Take back the seeds that loaders' iterators drew, if nothing else was drawn."""
        ...

    def weights(self) -> Iterable[torch.Tensor]:
        """Return the local parameters and buffers of the model."""
        ...

    @property
    def streams(self) -> Streams:
        """What saves and restores streams."""
        ...

    def saves(self, item: object) -> bool:
        """Return whether checkpoints have the state of `item`, such as a loader."""
        ...

    def close(self) -> None:
        """Release what watches the program. Later calls do nothing."""
        ...
