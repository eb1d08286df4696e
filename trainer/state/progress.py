"""What a checkpoint says about training, and what a resume restored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Training progress: the plain data of a checkpoint that belongs to the session itself.

    `in_epoch` is True if a loop over epochs has begun `epoch` and has not completed its end.
    """

    step: int
    seed: int
    epoch: int = 0
    in_epoch: bool = False
    data: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The result of `TrainState.apply`. `missing` and `unused` are texts for people."""

    parts: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    reseeded: bool = False
