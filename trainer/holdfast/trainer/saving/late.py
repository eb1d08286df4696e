"""Saves whose copies continue while training continues, and the trial that comes before the first.

`Overlap` is how a saver asks an engine for such a copy. The first copy of a launch is complete on
return, and its image is compared with the tensors when the copy would have had to be complete. So a
program that changes tensors in another way is known before it can spoil an image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from holdfast.contracts.disk.paths import CheckpointName
from holdfast.contracts.errors import SaveError
from holdfast.trainer.placed import PlacedName
from holdfast.trainer.staging.copying import LateCopy


@dataclass(frozen=True)
class Overlap:
    """The addresses of tensors whose copies may continue, and whether this copy is the trial."""

    steady: Collection[int]
    is_trial: bool = False


AT_ONCE: Final = Overlap(())
TRIED: Final = (
    "the program changes tensors of the state before an optimizer steps, or without one, so their "
    "copies cannot continue during a step"
)
SPOILED: Final = (
    "the program changed tensors of the state while they were copied, and not by the step of an "
    "optimizer"
)


@dataclass(frozen=True)
class Completed:
    """The end of a late copy. `problem` says why the image was thrown away, "" if it is sealed.

    `blocked_s` is the time for which training waited, at the save and afterwards.
    """

    name: CheckpointName | PlacedName
    is_snapshot: bool
    blocked_s: float
    problem: str = ""
    is_spoiled: bool = False


@dataclass(frozen=True)
class LateSave:
    """A slot that a thread still fills. `seal` is given the blocked seconds, `discard` a reason."""

    copy: LateCopy
    name: CheckpointName | PlacedName
    is_snapshot: bool
    blocked_s: float
    seal: Callable[[float], None]
    discard: Callable[[str], None]

    def complete(self) -> Completed:
        """Complete the copy, and seal the slot if the image is whole.

        Call it in a thread that changes the tensors, or while that thread waits. Only then no
        change is under way that no version counter shows yet.
        """
        began = time.monotonic()
        try:
            is_whole = self.copy.finish()
        except OSError as error:
            problem = f"step {self.name.step} cannot be staged: {error.strerror}"
            self.discard(problem)
            blocked_s = self.blocked_s + time.monotonic() - began
            return Completed(self.name, self.is_snapshot, blocked_s, problem)
        blocked_s = self.blocked_s + time.monotonic() - began
        if not is_whole:
            problem = f"step {self.name.step}: {SPOILED}"
            self.discard(problem)
            return Completed(self.name, self.is_snapshot, blocked_s, problem, is_spoiled=True)
        try:
            self.seal(blocked_s)
        except SaveError as error:
            self.discard(str(error))
            return Completed(self.name, self.is_snapshot, blocked_s, str(error))
        return Completed(self.name, self.is_snapshot, blocked_s)

    def cancel(self) -> None:
        """Stop the copy and throw the image away."""
        self.copy.cancel()
        self.discard(f"step {self.name.step}: the copy was given up")
