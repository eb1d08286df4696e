"""The methods that a framework's object gets for the loop that the program writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch

from holdfast.trainer.frameworks.program_loop.training import LoopTraining
from holdfast.trainer.frameworks.session import FrameworkSession

T = TypeVar("T", bound=LoopTraining)


class LoopMethods(Generic[T]):
    """Stands in front of a framework's class, which sets `_training`."""

    _training: T

    def epochs(self, total: int, start: int = 0) -> Iterator[int]:
        """Iterates over the remaining epochs, counted from 0, up to `total` - 1.

        It begins with `start` if the run has no checkpoint, and else where the run was:
        `epochs(n + 1, 1)` in place of `range(1, n + 1)`. All ranks call it after everything is
        prepared. Raises `SpecError` if nothing is prepared and for a second loop,
        `CheckpointError` if the run's checkpoint does not fit, and `SaveError` if the last
        checkpoint could not be committed.
        """
        return self._training.epochs(total, start)

    def resume(self) -> int:
        """Resumes, and returns the number of batches that each rank was trained on so far.

        Call it after everything is prepared, and only if the program counts its batches over all
        epochs. `epochs` resumes too. Raises as `epochs`.
        """
        self._training.start()
        return self._training.progress.trained

    @property
    def first_batch(self) -> int:
        """The number, from 0, of the first batch that the epoch's training loop gets.

        It is 0 except in the epoch in which the run resumed. Pass it to `enumerate` as the number
        to start with.
        """
        return self._training.progress.first_batch

    def epoch_total(self) -> torch.Tensor:
        """Returns a sum over the batches of this epoch, which a resume continues: one number.

        It is zero at the start of each epoch. Assign it in place of 0, and add to it with `+=`. A
        program with several sums calls it for each of them, in the same order in each epoch. A
        relaunch at another number of ranks begins with zero.
        """
        return self._training.progress.totals.give()

    @property
    def session(self) -> FrameworkSession:
        """The session, which is opened if necessary. Raises as `epochs`."""
        return self._training.start()

    def _record_numbers(self, values: Mapping[str, Any]) -> None:
        """Record the numbers that the program logs, while the session is open."""
        if self._training.is_open:
            self.session.log(**{key: float(v) for key, v in values.items() if _is_number(v)})


def _is_number(value: Any) -> bool:
    is_single = isinstance(value, torch.Tensor) and value.numel() == 1
    return is_single or isinstance(value, int | float)
